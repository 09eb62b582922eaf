"""Runs with a reference: their models, what came out, and what must come out, in float64 from whole logits."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch

from compare_q.backends.reference.store import MANIFEST
from tests.support.stub_engine import stub_logits
from tests.support.toy import Ran, log_softmax

Models = Sequence[dict[str, Any]]
N_WINDOWS, LENGTH = 3, 100  # of these tests, and their tokens
KLD = 0.078622  # of uniform logits against a boost of 3 for the real token, over 500 tokens: see tests/eval/cli


@dataclass(frozen=True)
class Measured(Ran):
    """What a command line did, the one text of its results.json, and the folder of its token scores."""

    results: dict[str, Any]
    folder: Path

    @property
    def models(self) -> dict[str, dict[str, Any]]:
        """Label -> model, in the order of the file."""
        return {model["label"]: model for model in self.results["models"]}

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


def stub(folder: Path, label: str, *, dtype: str = "float32", **keys: Any) -> dict[str, Any]:
    """A model of the stub engine."""
    return {"load_fn": "stub", "model_dir": str(folder), "label": label, "engine": {"dtype": dtype}, **keys}


def toy(folder: Path, label: str, *, dtype: str = "float32", **keys: Any) -> dict[str, Any]:
    """A model in Transformers, on the CPU also where there is a GPU: the gold values are computed there."""
    engine = {"dtype": dtype, "device_map": "cpu"}
    return {"load_fn": "transformers", "model_dir": str(folder), "label": label, "engine": engine, **keys}


def store_of(root: Path) -> Path:
    """The one store in the cache."""
    (manifest,) = root.glob(f"references/*/{MANIFEST}")
    return manifest.parent


def left_behind(root: Path) -> list[str]:
    """What lies beside the locks in the cache's folder of references."""
    return [entry.name for entry in (root / "references").iterdir() if entry.suffix != ".lock"]


def text_windows(
    text: Path, count: int = N_WINDOWS, length: int = LENGTH, stride: int = 100, prefix: str = ""
) -> list[list[int]]:
    """Token ids of the windows, by hand: one token a letter, its id its place in the sorted alphabet of bytes."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = text.read_text()
    pieces = [prefix + letters[begin : begin + length] for begin in range(0, count * stride, stride)]
    return [[alphabet.index({" ": "Ġ", "\n": "Ċ"}.get(letter, letter)) for letter in piece] for piece in pieces]


def whole_logits(folder: Path, windows: Sequence[Sequence[int]], dtype: str = "float32") -> list[torch.Tensor]:
    """The stub's logits [L, V] of every window."""
    return [stub_logits(folder, window, dtype) for window in windows]


def transformers_logits(folder: Path, windows: Sequence[Sequence[int]], dtype: str = "float32") -> list[torch.Tensor]:
    """A model's logits [L, V] of every window, by Transformers itself."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.inference_mode():
        return [model(torch.tensor([window]), use_cache=False).logits[0] for window in windows]


def divergence(p: Sequence[float], q: Sequence[float]) -> float:
    """KL(p || q) of two log-softmaxes."""
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


def compared(
    reference: Sequence[torch.Tensor], model: Sequence[torch.Tensor], windows: Sequence[Sequence[int]],
    score_from: int = 1,
) -> dict[str, list[Any]]:  # fmt: skip
    """The columns that the token scores of a comparison must have."""
    columns = ("window", "position", "token_id", "logprob", "ref_logprob", "ref_top1_logprob", "kld", "same_top")
    gold: dict[str, list[Any]] = {name: [] for name in columns}
    for number, window in enumerate(windows):
        for position in range(score_from, len(window)):
            p = log_softmax(reference[number][position - 1].double().tolist())
            q = log_softmax(model[number][position - 1].double().tolist())
            token = window[position]
            same = p.index(max(p)) == q.index(max(q))
            scores = (number, position, token, q[token], p[token], max(p), divergence(p, q), same)
            for name, value in zip(columns, scores, strict=True):
                gold[name].append(value)
    return gold


def assert_tokens(found: dict[str, list[Any]], gold: dict[str, list[Any]]) -> None:
    """Every column within 1e-5 (the largest difference seen is 3e-6), at exactly the gold's positions."""
    for name in ("window", "position", "token_id", "same_top"):
        assert found[name] == gold[name], name
    for name in ("logprob", "ref_logprob", "ref_top1_logprob", "kld"):
        np.testing.assert_allclose(found[name], gold[name], rtol=0, atol=1e-5, err_msg=name)


def mean(values: Sequence[float]) -> float:
    """The mean in float64."""
    return math.fsum(values) / len(values)


def cut_divergence(boost: float, entries: int) -> float:
    """KLD of uniform logits against a boost for the real token, over a number of entries."""
    total = math.exp(boost) + entries - 1
    p, rest = math.exp(boost) / total, 1 / total
    return p * math.log(p * entries) + (entries - 1) * rest * math.log(rest * entries)
