"""Damaged specs and texts: any file is read as a spec, or refused in one line."""

from __future__ import annotations

import io
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from rich.console import Console

from compare_q.backends.common.message_text import printable
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs import spec_files
from compare_q.eval.specs.spec_types import DataSpec, ModelSpec
from compare_q.eval.text import corpus
from tests.support.hostile import answer_of, damaged, fuzzed, randoms

DATA = {
    "tokenizer_dir": "t",
    "dataset": "text",
    "path": "text.jsonl",
    "text_column": "text",
    "eval_stride": 512,
    "eval_len": 2048,
    "max_rows": 4,
    "warmup_tokens": 1,
    "max_text_rows": 100,
    "dataset_display_name": "letters",
}
FILES = {
    "tokenizer_dir": "t",
    "dataset": "parquet",
    "dataset_data_files": {"train": ["a.parquet"]},
    "split": "train",
    "eval_len": 100,
    "eval_stride": 100,
    "display_rows": 3,
    "method": "exllamav3",
    "revision": "main",
}
MODELS = [
    {
        "load_fn": "vllm_score",
        "label": "W4A16",
        "model_dir": ["m", {"bits": 4}],
        "engine": {"a": [1, {"b": "c"}]},
        "override_bpw_layer": 4.5,
        "reference": True,
        "group": "g",
        "out_logits": "o",
    },
    {
        "load_fn": "transformers",
        "model_dir": ["m", ["o.safetensors"]],
        "revision": "main",
        "noise_floor": True,
    },
    {
        "$schema": "x",
        "load_fn": "llamacpp",
        "label": "GGUF",
        "model_dir": "m.gguf",
        "sweep": {"engine.type_k": ["f16", "q8_0"], "gpus": [1, 2]},
    },
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("specs")
    (folder / "text.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    return folder


def read_text(spec: DataSpec) -> str:
    """Perform the checks of a data spec that precede tokenizing."""
    spec.digest(), spec.locate(spec.tokenizer_dir), corpus.display_name(spec)
    if spec.dataset != "text":
        corpus.is_here(spec)
        return ""
    corpus.text_identity(spec)
    return corpus.load_texts(spec, Progress(quiet=True))[0]


@fuzzed
@given(random=randoms)
def test_data_specs(folder: Path, random: Random) -> None:
    file = folder / "data.json"
    file.write_bytes(damaged(random.choice([DATA, FILES]), random))
    for spec in answer_of(lambda: spec_files.load_data_specs([file])) or []:
        answer_of(lambda spec=spec: read_text(spec))


def use(specs: list[ModelSpec]) -> None:
    """Perform the checks of model specs that precede the checks of their engines."""
    masked = spec_files.apply_mask(specs, "w4;gguf;m")
    compared, lines = spec_files.one_reference(masked)
    console = Console(file=io.StringIO())
    for spec in compared:
        spec.digest(), spec.located, spec.options, spec.override_tensors
        console.print(printable(spec.name), markup=False)
    for line in lines:
        console.print(printable(line), markup=False)


@fuzzed
@given(random=randoms)
def test_model_specs(folder: Path, random: Random) -> None:
    file = folder / "models.json"
    file.write_bytes(damaged(MODELS, random))
    specs = answer_of(lambda: spec_files.load_model_specs([file]))
    if specs is not None:
        answer_of(lambda: use(specs))
