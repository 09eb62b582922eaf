"""The toy model that every engine runs, with windows, specs, outcomes of runs and brute force."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.shapes import write_tokenizer
from compare_q import backends
from compare_q.backends.base import PlannedModel, Window
from compare_q.backends.common.errors import InputError

TOY_VOCAB = 320
TOY_CONTEXT = 256

# Tolerances for comparisons with float64: float32 matrix products are TF32 on a GPU (on an H200,
# log-probabilities were off by up to 0.037 and logits by 0.12).  Two batches of one engine differ
# only by the order of additions.
GPU = torch.cuda.is_available()
ATOL_LOGPROB = 2e-4
ATOL_LOGIT = 2e-4
ATOL_BATCH = 1e-5
if GPU:
    ATOL_LOGPROB = 0.1
    ATOL_LOGIT = 0.3
    ATOL_BATCH = 1e-3

needs_accelerate = pytest.mark.skipif(
    find_spec("accelerate") is None, reason="accelerate is not installed"
)
"""For tests that read a model's files in Transformers.

Without accelerate, the engine is refused before that.
"""
PROGRESS = ("tokenizing ", "checking reference ", "reading ")
"""Beginnings of progress lines that may precede a refusal."""
EMULATED = "16-bit products are emulated"
"""In the note that precedes a refusal on a CPU without arithmetic for bf16."""


@dataclass(frozen=True)
class Ran:
    """The outcome of a command line."""

    status: int
    out: str
    err: str


Run = Callable[..., Ran]
Specs = Callable[..., tuple[Path, Path]]
Models = Callable[..., tuple[Ran, list[dict[str, Any]]]]
FAKE = {"load_fn": "fake", "label": "fake", "model_dir": "none"}


def in_transformers(model: Path, **keys: Any) -> dict[str, Any]:
    """The spec of a model that Transformers would load."""
    return {"load_fn": "transformers", "label": "toy", "model_dir": str(model), **keys}


def planned(
    label: str,
    load_fn: str,
    model_dir: str,
    max_tokens: int,
    options: Mapping[str, Any] | None = None,
    override_tensors: tuple[Path, ...] = (),
    **more: Any,
) -> PlannedModel:
    """Return a ``PlannedModel`` with the engine of this ``load_fn``."""
    engine_name = load_fn
    for name, engine in backends.engines():
        if load_fn in engine.capabilities.load_fns:
            engine_name = name
            break
    return PlannedModel(
        label=label,
        engine=engine_name,
        load_fn=load_fn,
        model_dir=model_dir,
        max_tokens=max_tokens,
        options=dict(options or {}),
        override_tensors=override_tensors,
        **more,
    )


def assert_refused(ran: Ran, *parts: str) -> None:
    """Assert exit status 2, one line of error with every part, and that no model was loaded."""
    assert ran.status == 2, ran.out + ran.err
    lines = []
    for line in ran.err.splitlines():
        if not line.startswith(PROGRESS) and EMULATED not in line:
            lines.append(line)
    (line,) = lines
    assert line.startswith("error: ")
    assert "Traceback" not in line
    for part in parts:
        assert part in line
    assert ran.out == ""


def refusal(function: Callable[..., object], *arguments: Any, **keys: Any) -> str:
    """Return the text, one line, of the InputError that a call raises."""
    with pytest.raises(InputError) as caught:
        function(*arguments, **keys)
    text = str(caught.value)
    assert len(text.splitlines()) == 1, text
    return text


def save_toy_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer: a token per byte, a special token, 256, and a chat template."""
    template = (
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + '\n' }}{% endfor %}{{ 'a:' }}"
    )
    write_tokenizer(folder, chat_template=template)


def swap_letters(folder: Path) -> None:
    """Exchange the ids of "a" and "b" in a model's tokenizer."""
    content = json.loads((folder / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    id_of_a = vocab["a"]
    vocab["a"] = vocab["b"]
    vocab["b"] = id_of_a
    (folder / "tokenizer.json").write_text(json.dumps(content))


def save_llama(folder: Path, family: str = "Llama", **keys: Any) -> Path:
    """Save a two-layer Llama with random weights, and its tokenizer.

    It has an untied head, bf16 and a context of 256.  ``keys`` replace keys of its config;
    ``family``: another class of Transformers.
    """
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": TOY_VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": TOY_CONTEXT,
        "tie_word_embeddings": False,
        # With Transformers' 0.02, predictions would be nearly uniform.
        "initializer_range": 0.3,
        "bos_token_id": 256,
        "eos_token_id": 256,
        "dtype": "bfloat16",
        **keys,
    }
    # Families of image-text models have a config of their text model.
    config_class = getattr(transformers, f"{family}TextConfig", None)
    if config_class is None:
        config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    model = model_class(config_class(**shape))
    model.to(getattr(torch, shape["dtype"])).save_pretrained(folder)
    save_toy_tokenizer(folder)
    return folder


def with_config(model: Path, folder: Path, **keys: Any) -> Path:
    """Write a copy of a model whose config has these keys."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    return folder


def with_changed_weight(model: Path, folder: Path, module: str) -> Path:
    """Save a copy of a model in which the weight of one module is 1.5 times as large."""
    shutil.copytree(model, folder)
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights[f"{module}.weight"] *= 1.5
    save_file(weights, file, metadata={"format": "pt"})
    return folder


def toy_windows(count: int = 4, length: int = 100, first: int = 1) -> list[Window]:
    """Windows of random toy tokens."""
    generator = np.random.default_rng(1)
    windows = []
    for index in range(count):
        # The tokens of bytes; 256 is the special token.
        token_ids = generator.integers(0, 256, length, dtype=np.int32)
        windows.append(Window.scored_from(index, token_ids, first))
    return windows


def with_gaps(window: Window) -> Window:
    """Return a window with the same tokens, of which some ranges without the last are scored."""
    length = len(window.token_ids)
    spans = ((3, 4), (length // 4, length // 2), (length // 2 + 1, length - 1))
    return replace(window, spans=spans)


def log_softmax(logits: Sequence[float]) -> list[float]:
    """Return the logarithm of the softmax in float64, in plain Python.

    Independent of the code under test.
    """
    peak = max(logits)
    log_total = math.log(math.fsum(math.exp(z - peak) for z in logits))
    return [z - peak - log_total for z in logits]


def brute_force(logits: torch.Tensor, window: Window) -> list[float]:
    """Return log-probabilities of a window's scored tokens from its logits [L, V], one by one."""
    logprobs = []
    for position in window.positions.tolist():
        row = log_softmax(logits[position - 1].double().tolist())
        logprobs.append(row[int(window.token_ids[position])])
    return logprobs


def rounds_by_place(rows: int, width: int, entries: int, dtype: torch.dtype) -> bool:
    """True if on this CPU the roundings of a row depend on other rows of the product.

    The product is that of [rows, width] and [width, entries].  This happens with MKL in float32
    with AVX2, and oneDNN in bfloat16 with AVX-512 but without AVX-512 BF16: about one entry in a
    million changes by one bit.
    """
    from torch.nn.functional import linear

    generator = torch.Generator().manual_seed(0)
    states = torch.randn(rows, width, generator=generator).to(dtype)
    head = torch.randn(entries, width, generator=generator).to(dtype)
    logits = linear(states, head)
    for first in range(1, min(rows, 100)):
        if not torch.equal(logits[first:], linear(states[first:], head)):
            return True
    return False
