"""Shared pieces: a toy model that every engine runs, its byte tokenizer, and the command line in this process."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from backends.base import InputError, Window
from eval import cli

TOY_VOCAB = 320
TOY_CONTEXT = 256
BPW_BF16 = 16.0

# Against float64: float32 matrix products are float32 on a CPU, and TF32 on a GPU (0.037 of a log-probability and 0.12
# of a logit seen on an H200).  Two batches of one engine differ by the order of additions only.
GPU = torch.cuda.is_available()
ATOL_LOGPROB, ATOL_LOGIT, ATOL_BATCH = (0.1, 0.3, 1e-3) if GPU else (2e-4, 2e-4, 1e-5)


@dataclass(frozen=True)
class Ran:
    """What a command line did."""

    status: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the user's cache."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("COMPARE_Q_CACHE", str(folder))
    return folder


@pytest.fixture
def compare_q(capfd: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """Run the command line in this process: ``compare_q("-d", file, ...)``."""

    def run(*words: object) -> Ran:
        capfd.readouterr()
        try:
            status = cli.main([str(word) for word in words])
        except SystemExit as stop:  # argparse
            status = int(stop.code or 0)
        out, err = capfd.readouterr()
        return Ran(status, out, err)

    return run


def refusal(function: Callable[..., object], *arguments: Any, **keys: Any) -> str:
    """The text of the InputError that a call raises, which is one line."""
    with pytest.raises(InputError) as caught:
        function(*arguments, **keys)
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    return text


def save_toy_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer: one token a byte, ids 0 to 255, and one special token, 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}{{ 'a:' }}"
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def toy_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with random weights, untied head, bf16, context 256, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("toy") / "toy-llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=TOY_VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=TOY_CONTEXT, tie_word_embeddings=False, initializer_range=0.3,
        bos_token_id=256, eos_token_id=256, dtype="bfloat16",
    )  # fmt: skip
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    save_toy_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def toy_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1,000 ASCII letters, so 1,000 toy tokens."""
    letters = np.random.default_rng(0).choice(list("abcdefgh \n"), 1000)
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text("".join(letters))
    return file


@pytest.fixture
def write_specs(tmp_path: Path, toy_model: Path, toy_text: Path) -> Callable[..., tuple[Path, Path]]:
    """Write a data spec (toy text, windows of 100 every 100, changed by ``data``) and a list of model specs."""

    def write(models: list[dict[str, Any]] | None = None, **data: Any) -> tuple[Path, Path]:
        base = {
            "tokenizer_dir": str(toy_model),
            "dataset": "text",
            "path": str(toy_text),
            "eval_len": 100,
            "eval_stride": 100,
        }
        data_file, models_file = tmp_path / "data.json", tmp_path / "models.json"
        merged = {key: value for key, value in {**base, **data}.items() if value is not ...}
        data_file.write_text(json.dumps(merged))
        default = [{"load_fn": "fake", "label": "fake uniform", "model_dir": "none", "engine": {"vocab_size": 500}}]
        models_file.write_text(json.dumps(default if models is None else models))
        return data_file, models_file

    return write


def toy_windows(count: int = 4, length: int = 100, score_from: int = 1) -> list[Window]:
    """Windows of random toy tokens."""
    generator = np.random.default_rng(1)
    return [Window(row, generator.integers(0, 256, length, dtype=np.int32), score_from) for row in range(count)]


def brute_force(logits: torch.Tensor, window: Window) -> list[float]:
    """log softmax in float64, one position at a time in plain Python loops: nothing shared with the code under test."""
    scores = []
    for position in range(window.score_from, len(window.token_ids)):
        row = [float(z) for z in logits[position - 1].double()]
        peak = max(row)
        total = math.fsum(math.exp(z - peak) for z in row)
        scores.append(row[int(window.token_ids[position])] - peak - math.log(total))
    return scores
