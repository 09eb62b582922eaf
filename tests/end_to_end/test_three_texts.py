"""Three texts and three models in real engines, one load each: the numbers of three runs, to the last digit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.chats import MARKED, SUMS, WEATHER, save_chat_tokenizer, write_lines
from tests.support.text_runs import Texts, measured, write_texts

pytestmark = pytest.mark.engine

LABELS = ["bf16", "W4A16", "NVFP4"]


def compare(folder: Path, cache: str, *names: str) -> Texts:
    """A run of the command line on these texts, in a process of its own, with workers of its own."""
    output = folder / "results.json"
    command = [
        sys.executable, "eval/compare_q.py", "-m", folder / "models.json", "-o", output, "--timing",
        "--cache-dir", folder / cache, "-d", *(folder / f"{name}.json" for name in names),
    ]  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "COMPARE_Q_IN_PROCESS"}
    ran = subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False,
        env={**environment, "VLLM_CPU_INT4_W4A8": "0"},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return Texts(ran.returncode, ran.stdout, ran.stderr, json.loads(output.read_text()))


@pytest.fixture(scope="module")
def folder(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy in bf16, and quantized to W4A16 and NVFP4; two texts with windows of other lengths, and conversations."""
    from demo.quantize import quantize

    found = tmp_path_factory.mktemp("texts")
    write_texts(found, toy_model, letters=600)
    tokenizer = save_chat_tokenizer(found / "tokenizer", MARKED)  # another one than the other texts'
    talks = write_lines(found / "talks.jsonl", WEATHER, SUMS)
    chat = {"tokenizer_dir": str(tokenizer), "dataset": "chat", "path": str(talks), "eval_len": 240, "label": "chat"}
    (found / "chat.json").write_text(json.dumps(chat))
    models: list[dict[str, Any]] = [
        {"load_fn": "transformers_auto_bf16", "label": "bf16", "model_dir": str(toy_model), "reference": True}
    ]
    for label, preset, keys in (("W4A16", "W4A16", {"group_size": 32}), ("NVFP4", "NVFP4", {})):
        quantize(toy_model, preset, found / label, **keys)
        models.append({"load_fn": "vllm_score", "label": label, "model_dir": str(found / label)})
    (found / "models.json").write_text(json.dumps(models))
    return found


@pytest.fixture(scope="module")
def many(folder: Path) -> Texts:
    return compare(folder, "cache", "prose", "chat", "code")


def test_each_model_loads_once(many: Texts) -> None:
    assert many.loaded == LABELS
    for label in LABELS:
        first, *others = (many.model(label, name)["seconds"]["load"] for name in ("prose", "chat", "code"))
        assert first > 0
        assert others == [0, 0]
    assert all(each["mean_kld"] > 0 for each in many.results["means"][1:])


def test_the_numbers_are_those_of_a_run_of_the_text_alone(many: Texts, folder: Path) -> None:
    """A fresh cache, and engines that are told of windows of 60 tokens, where the others are told of 240.

    Of one text: each costs two starts of vLLM; ``tests/eval/run/test_several_texts.py`` compares all three.
    """
    alone = compare(folder, "cache-code", "code")
    assert alone.loaded == LABELS
    for label in LABELS:
        assert measured(many.model(label, "code")) == measured(alone.model(label))
    assert many.texts["code"]["data"] == alone.results["texts"][0]["data"]
