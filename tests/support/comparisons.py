"""Runs with a reference: their models, their results, and the correct results."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet

from compare_q.backends.reference.store import STORE_MANIFEST
from tests.support.toy import Ran

Models = Sequence[dict[str, Any]]
N_WINDOWS = 3
LENGTH = 100
"""Number and tokens of the windows in runs of one text."""
# Of uniform logits from logits with a boost of 3 for the real token; 500 tokens.
# p = e^3 / (e^3 + 499) of the real token; ``cut_divergence`` has the sum.
KLD = 0.078622
LENGTHS = {"prose": 100, "code": 60, "logs": 100}
"""Name of each text of 1,000 characters -> tokens per window; the texts have 9, 15 and 9 windows.
"""


@dataclass(frozen=True)
class Measured(Ran):
    """The outcome of a command line, its results.json, and the folder of its token scores."""

    results: dict[str, Any]
    folder: Path

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Label -> row, in the order of the file."""
        return {model["label"]: model for model in self.results["models"]}

    @property
    def loaded(self) -> list[str]:
        """Labels of the models that were loaded, in order."""
        return re.findall(
            r"^loading (.*?)(?: \(model \d+ of \d+\))?: [\d.]+ s$", self.err, re.MULTILINE
        )

    def tokens(self, label: str) -> dict[str, list[Any]]:
        """A model's token scores."""
        table = parquet.read_table(self.folder / f"{label}.parquet")
        columns: dict[str, list[Any]] = table.to_pydict()
        return columns


Compare = Callable[..., Measured]


def fake(label: str, *, vocab_size: int = 500, **keys: Any) -> dict[str, Any]:
    """Return the spec of a fake model; all keys except ``reference`` are options of its engine."""
    marks = {}
    for name in ("reference", "out_logits"):
        if name in keys:
            marks[name] = keys.pop(name)
    engine = {"vocab_size": vocab_size, **keys}
    return {"load_fn": "fake", "model_dir": "none", "label": label, "engine": engine, **marks}


def three(**keys: Any) -> list[dict[str, Any]]:
    """Return the specs of a reference and two models, ``a`` and ``b``; ``b`` has these options."""
    return [fake("ref", boost=3.0, reference=True), fake("a"), fake("b", boost=1.0, **keys)]


UNIFORM: Models = (fake("ref", boost=3.0, reference=True), fake("uniform"))


def stub(folder: Path, label: str, *, dtype: str = "float32", **keys: Any) -> dict[str, Any]:
    """A model of the stub engine."""
    return {
        "load_fn": "stub",
        "model_dir": str(folder),
        "label": label,
        "engine": {"dtype": dtype},
        **keys,
    }


def toy(folder: Path, label: str, *, dtype: str = "float32", **keys: Any) -> dict[str, Any]:
    """Return the spec of a model in Transformers, on the CPU like the gold values."""
    engine = {"dtype": dtype, "device_map": "cpu"}
    return {
        "load_fn": "transformers",
        "model_dir": str(folder),
        "label": label,
        "engine": engine,
        **keys,
    }


def write_texts(folder: Path, tokenizer: Path) -> dict[str, Path]:
    """Write data specs of texts of 1,000 random characters; return name -> file of the spec."""
    generator = np.random.default_rng(5)
    files = {}
    for name, length in LENGTHS.items():
        (folder / f"{name}.txt").write_text("".join(generator.choice(list("abcdefgh \n"), 1000)))
        spec = {
            "tokenizer_dir": str(tokenizer),
            "dataset": "text",
            "path": f"{name}.txt",
            "eval_len": length,
            "eval_stride": length,
        }
        files[name] = folder / f"{name}.json"
        files[name].write_text(json.dumps(spec))
    return files


def result_of(ran: Ran, file: Path, folder: Path) -> Measured:
    """Return the outcome of a command line, with the files that it wrote."""
    results = {}
    if file.exists():
        results = json.loads(file.read_text())
    return Measured(ran.status, ran.out, ran.err, results, folder)


def store_of(root: Path) -> Path:
    """Return the only store in the cache."""
    (manifest,) = root.glob(f"references/*/{STORE_MANIFEST}")
    return manifest.parent


def cut_divergence(boost: float, entries: int) -> float:
    """Return the KLD of uniform logits from logits with a boost for the real token.

    ``entries``: number of vocabulary entries.
    """
    total = math.exp(boost) + entries - 1
    p = math.exp(boost) / total  # of the real token
    q = 1 / total  # of each other token
    # The uniform model gives each token 1 / entries: ln(p / (1 / entries)) = ln(p * entries).
    return p * math.log(p * entries) + (entries - 1) * q * math.log(q * entries)
