"""Runs of made-up models for the report, and the browser in which tests open it."""

from __future__ import annotations

import shutil
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import Storage
from compare_q.eval.results import ModelResult, RunResult, TextResult, WorstToken
from compare_q.eval.stats import estimates
from tests.support.made import run_result, text_result

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
needs_browser = [
    pytest.mark.engine,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine"),
]
"""Marks of a test that opens a report."""
N = 4000
LAYER = {"layers": "h.*", "count": 2, "weights": "int4", "activations": "float16", "kernel": "Marlin", "asked": ""}
DEVIATING = {**LAYER, "asked": "fp8"}
SOURCE = {"method": "exllamav3", "windows": 4, "window_length": 1000, "scored_tokens": N, "spec": {"dataset": "wiki2"}}


def measured(label: str, kld: float | None, bpw: float | None = 4.0, *, seed: int = 0, **fields: Any) -> ModelResult:
    """A model with random scores of that mean KLD; None: it has no reference."""
    text, own = np.random.default_rng(0), np.random.default_rng(seed)
    ref = -text.exponential(3, N)
    columns = {"logprob": ref - own.normal(0.0 if kld is None else kld, 0.1, N)}
    if kld is not None:
        columns |= {
            "kld": kld * own.lognormal(-0.5, 1, N), "same_top": own.uniform(size=N) > min(kld, 0.9),
            "ref_logprob": ref, "ref_top1_logprob": np.log(text.uniform(0.01, 1, N)),
        }  # fmt: skip
    columns = {name: each if name == "same_top" else each.astype(np.float32) for name, each in columns.items()}
    index = np.arange(N)
    found = estimates.summarize(columns, index, index % 1000 + 1, (4.0 * N, 0.8 * N))
    size = Storage(bpw, bpw, None if bpw is None else (bpw + 4) * 2**31, "" if bpw else "a server tells nothing")
    provenance = {"layers": [LAYER], "vllm": "0.26.0"} | fields.pop("provenance", {})
    return ModelResult.of(label, "fake", size, found, windows=4, score_seconds=2.0, provenance=provenance, **fields)


WORST = (
    WorstToken(window=1, position=7, kld=4.25, logprob=-4.605, ref_logprob=-0.693, before="before\n", token=" <i>",
               after=" after"),
    WorstToken(window=0, position=9, kld=3.0, logprob=-9.0, after="</script>"),
)  # fmt: skip
REFERENCE = measured("bf16 base", None, 16.0, reference=True)
MODELS = (
    REFERENCE,
    measured("bf16 other", 0.001, 16.0, seed=1, spec={"noise_floor": True}),
    measured("W4A16 g128", 0.3, 4.125, seed=2, notes=("a note",), worst_tokens=WORST),
    measured("W4A16 g32", 0.2, 4.5, seed=3, provenance={"layers": [DEVIATING]}),
    measured("EXL3 3.0", 0.18, 3.0, seed=4),
    measured("EXL3 4.0", 0.05, 4.0, seed=5),
    measured("GGUF Q4_K", 0.05, 4.5, seed=6),
    measured("GGUF Q2_K", 8.0, 2.5, seed=7),
)
FAILED = ModelResult.of("broken", "fake", error="told to fail")


def text_of(*models: ModelResult, name: str = "wiki2") -> TextResult:
    base = next((model.label for model in models if model.reference), None)
    return text_result(name, SOURCE, "wikitext2, 4 × 1000 tokens", models, None if base is None else {"label": base})


def results_of(*models: ModelResult) -> RunResult:
    return run_result((text_of(*models),))
