"""Runs with a reference: their models, what came out, and what must come out, in float64 from whole logits."""

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

from compare_q.backends.reference.store import MANIFEST
from tests.support.toy import Ran

Models = Sequence[dict[str, Any]]
N_WINDOWS, LENGTH = 3, 100  # of runs of one text, and their tokens
KLD = 0.078622  # of uniform logits against a boost of 3 for the real token, over 500 tokens: see tests/eval/cli
LENGTHS = {"prose": 100, "code": 60, "logs": 100}
"""Three texts of 1,000 letters each, and the tokens of their windows, of which there are 9, 15 and 9."""


@dataclass(frozen=True)
class Measured(Ran):
    """What a command line did, its results.json, and the folder of its token scores."""

    whole: dict[str, Any]
    folder: Path

    @property
    def texts(self) -> dict[str, dict[str, Any]]:
        """Name -> text; of one text under an empty name too."""
        texts = {text["name"]: text for text in self.whole.get("texts", [])}
        return {**texts, "": next(iter(texts.values()))} if len(texts) == 1 else texts

    @property
    def results(self) -> dict[str, Any]:
        """The only text."""
        return self.texts[""]

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Label -> model of the only text, in the order of the file."""
        return {model["label"]: model for model in self.results["models"]}

    def model(self, label: str, text: str = "") -> dict[str, Any]:
        """A model's result for a text."""
        return next(model for model in self.texts[text]["models"] if model["label"] == label)

    @property
    def loaded(self) -> list[str]:
        """Labels of the models that were loaded, in order."""
        return re.findall(r"^loading (.*?)(?: \(model \d+ of \d+\))?: [\d.]+ s$", self.err, re.MULTILINE)

    def tokens(self, label: str) -> dict[str, list[Any]]:
        """A model's token scores."""
        columns: dict[str, list[Any]] = parquet.read_table(self.folder / f"{label}.parquet").to_pydict()
        return columns


Compare = Callable[..., Measured]


def fake(label: str, *, vocab_size: int = 500, **keys: Any) -> dict[str, Any]:
    """A fake model; all keys but the mark of a reference are its engine's."""
    marks = {name: keys.pop(name) for name in ("reference", "out_logits") if name in keys}
    engine = {"vocab_size": vocab_size, **keys}
    return {"load_fn": "fake", "model_dir": "none", "label": label, "engine": engine, **marks}


def three(**keys: Any) -> list[dict[str, Any]]:
    """A reference and two models, the second one with these options."""
    return [fake("ref", boost=3.0, reference=True), fake("a"), fake("b", boost=1.0, **keys)]


UNIFORM: Models = (fake("ref", boost=3.0, reference=True), fake("uniform"))


def stub(folder: Path, label: str, *, dtype: str = "float32", **keys: Any) -> dict[str, Any]:
    """A model of the stub engine."""
    return {"load_fn": "stub", "model_dir": str(folder), "label": label, "engine": {"dtype": dtype}, **keys}


def toy(folder: Path, label: str, *, dtype: str = "float32", **keys: Any) -> dict[str, Any]:
    """A model in Transformers, on the CPU also where there is a GPU: the gold values are computed there."""
    engine = {"dtype": dtype, "device_map": "cpu"}
    return {"load_fn": "transformers", "model_dir": str(folder), "label": label, "engine": engine, **keys}


def write_texts(folder: Path, tokenizer: Path) -> dict[str, Path]:
    """Name -> data spec of a text of 1,000 random letters."""
    generator, files = np.random.default_rng(5), {}
    for name, length in LENGTHS.items():
        (folder / f"{name}.txt").write_text("".join(generator.choice(list("abcdefgh \n"), 1000)))
        spec = {"tokenizer_dir": str(tokenizer), "dataset": "text", "path": f"{name}.txt", "eval_len": length,
                "eval_stride": length}  # fmt: skip
        files[name] = folder / f"{name}.json"
        files[name].write_text(json.dumps(spec))
    return files


def result_of(ran: Ran, file: Path, folder: Path) -> Measured:
    """What a command line did, with what it wrote."""
    whole = json.loads(file.read_text()) if file.exists() else {}
    return Measured(ran.status, ran.out, ran.err, whole, folder)


def store_of(root: Path) -> Path:
    """The one store in the cache."""
    (manifest,) = root.glob(f"references/*/{MANIFEST}")
    return manifest.parent


def cut_divergence(boost: float, entries: int) -> float:
    """KLD of uniform logits against a boost for the real token, over a number of entries."""
    total = math.exp(boost) + entries - 1
    p, rest = math.exp(boost) / total, 1 / total
    return p * math.log(p * entries) + (entries - 1) * rest * math.log(rest * entries)
