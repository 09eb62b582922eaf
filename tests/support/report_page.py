"""Reports of made-up models, and their pages in a real headless Chromium."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import Storage
from compare_q.eval.html.inspector import Damaged, Inspection, Passage
from compare_q.eval.results.run_result import ModelResult, Results, TextResult
from compare_q.eval.stats import estimates

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
    return ModelResult(label, "fake", size, found, windows=4, score_seconds=2.0, provenance=provenance, **fields)


REFERENCE = measured("bf16 base", None, 16.0, is_reference=True)
MODELS = (
    REFERENCE,
    measured("bf16 other", 0.001, 16.0, seed=1, spec={"noise_floor": True}),
    measured("W4A16 g128", 0.3, 4.125, seed=2, notes=("a note",)),
    measured("W4A16 g32", 0.2, 4.5, seed=3, provenance={"layers": [DEVIATING]}),
    measured("EXL3 3.0", 0.18, 3.0, seed=4),
    measured("EXL3 4.0", 0.05, 4.0, seed=5),
    measured("GGUF Q4_K", 0.05, 4.5, seed=6),
    measured("GGUF Q2_K", 8.0, 2.5, seed=7),
)
FAILED = ModelResult("broken", "fake", error="told to fail")
SIZELESS = measured("server", 0.1, None, seed=8)


def text_of(*models: ModelResult, name: str = "wiki2") -> TextResult:
    base = next((model.label for model in models if model.is_reference), None)
    return TextResult(name, SOURCE, "wikitext2, 4 × 1000 tokens", models, None if base is None else {"label": base})


def results_of(*models: ModelResult) -> Results:
    return Results((text_of(*models),))


def inspection_of(text: TextResult) -> Inspection:
    """Twenty tokens, whose KLD is their number in hundredths, twice that for the next model, next to 0 for noise."""
    tokens = ("", "Ü", "\n\n", " <b>", "</script>", *(f" t{i}" for i in range(15)))

    def numbers(scale: float) -> tuple[float, ...]:
        return tuple(scale * i for i in range(20))

    places = [0.01 if m.is_noise_floor else at for at, m in enumerate(text.models)]
    klds = tuple(
        None if m.error or m.is_reference else numbers(0.01 * at) for at, m in zip(places, text.models, strict=True)
    )
    logprobs = tuple(None if m.error else numbers(-0.1 * (at + 1)) for at, m in zip(places, text.models, strict=True))
    worst = (Damaged(1, 7, "before\n", " <i>", " after", math.log(0.5), math.log(0.01), 4.25),)
    passage = Passage(2, 17, tokens, numbers(-0.1), logprobs, klds, "for its words", 1023)
    return Inspection((passage,), tuple(None if m.error else worst for m in text.models))


def plain(text: str) -> str:
    """A cell's text as the terminal's table writes it."""
    return text.replace("\N{MINUS SIGN}", "-")


@dataclass(eq=False)
class Opened:
    """A page of a report: its locators, and what the browser complained of or asked for."""

    page: Any
    file: Path
    complaints: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def load(self) -> None:
        """Load the report (anew, if it is open): every choice that an earlier test made is gone."""
        self.page.mouse.move(0, 0)
        self.page.goto("about:blank")
        self.complaints.clear()
        self.requests.clear()
        self.page.goto(self.file.as_uri())
        self.page.wait_for_timeout(50)

    def texts(self, selector: str) -> list[str]:
        return [text.strip() for text in self.page.locator(selector).all_text_contents()]

    def cells(self, column: str) -> list[str]:
        """The numbers of a column."""
        return [text.removeprefix("★") for text in self.texts(f"#table tbody [data-column='{column}'] .value")]

    def labels(self, section: str = "#table") -> list[str]:
        """Of the rows that are shown."""
        return self.texts(f"{section} tbody tr:not(.hidden) .label > span")

    def heading(self) -> str:
        """Of the tooltip, which is to be seen."""
        self.page.locator("#tip").wait_for(state="visible", timeout=10_000)
        return self.texts("#tip strong")[0]

    def tip(self) -> dict[str, str]:
        names, values = self.texts("#tip dt"), self.texts("#tip dd:not(.wide)")
        return dict(zip(names, values, strict=True))

    def pick(self, section: str, text: str) -> None:
        self.page.locator(f"#{section} .choice").get_by_text(text, exact=True).click()

    def copied(self, button: str) -> str:
        """The clipboard after a click on a button."""
        self.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        self.page.locator(button).click()
        self.page.get_by_role("button", name="Done").wait_for()
        return str(self.page.evaluate("navigator.clipboard.readText()"))


ShowPage = Callable[..., Opened]
