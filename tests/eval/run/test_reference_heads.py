"""What a reference keeps of a model: states and a head that is recomputed, or logits."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compare_q.backends.reference.store import Reader
from tests.support.comparisons import (
    Compare,
    Models,
    assert_tokens,
    compared,
    store_of,
    text_windows,
    toy,
    transformers_logits,
    whole_logits,
)
from tests.support.stub_engine import StubEngine
from tests.support.toy import TOY_VOCAB, save_toy_tokenizer


def noisy(folder: Path, target: Path, scale: float = 0.03) -> Path:
    """A copy of a model with noise on all of its matrices, of ``scale`` times their standard deviation."""
    shutil.copytree(folder, target)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for weight in {id(weight): weight for weight in model.parameters() if weight.ndim == 2}.values():
            weight += scale * weight.std() * torch.randn(weight.shape, generator=generator)
    model.bfloat16().save_pretrained(target)
    return target


def small_model(folder: Path, name: str, **keys: Any) -> Path:
    """A random model of one of Transformers' classes, hidden size 64, and the toy tokenizer."""
    base = {
        "vocab_size": TOY_VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3,
        "bos_token_id": 256, "eos_token_id": 256, "pad_token_id": 256,
    }  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**base, **keys})
    getattr(transformers, f"{name}ForCausalLM")(config).bfloat16().save_pretrained(folder)
    save_toy_tokenizer(folder)
    return folder


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "keys", "soft_cap", "scale"),
    [
        ("Llama", {"tie_word_embeddings": True}, None, 1.0),
        ("Gemma2", {"head_dim": 32, "final_logit_softcapping": 3.0}, 3.0, 1.0),
        ("Cohere", {"logit_scale": 0.3}, None, 0.3),
        ("Granite", {"logits_scaling": 3.0}, None, 1 / 3),
        ("Phi", {}, None, 1.0),  # its head has a bias
    ],
)
def test_heads_that_are_recomputed(
    measured: Compare, own_cache: Path, toy_text: Path, tmp_path: Path,
    name: str, keys: dict[str, Any], soft_cap: float | None, scale: float, dtype: str,
) -> None:  # fmt: skip
    folder = small_model(tmp_path / name, name, **keys)
    if name == "Phi":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        torch.nn.init.normal_(model.lm_head.bias)
        model.save_pretrained(folder)
    other = noisy(folder, tmp_path / "noisy")
    ran = measured([toy(folder, "ref", dtype=dtype, reference=True), toy(other, "noisy", dtype=dtype)])
    assert ran.status == 0, ran.out
    store = Reader(store_of(own_cache))
    assert (store.contents, store.head.soft_cap, store.head.scale) == ("states", soft_cap, pytest.approx(scale))
    weight, bias = store.weight(0, TOY_VOCAB, "cpu")
    assert (weight.shape, bias is not None) == ((TOY_VOCAB, 64), name == "Phi")
    windows = text_windows(toy_text)
    gold = compared(*(transformers_logits(model, windows, dtype) for model in (folder, other)), windows)
    assert_tokens(ran.tokens("noisy"), gold)
    assert ran.models["noisy"]["kld"] > 1e-3


def strange_head(self: StubEngine) -> str:
    return "its head is a Strange"


HEAD = StubEngine.head


def wrong_scale(self: StubEngine) -> Any:
    weight, bias, facts = HEAD(self)
    return weight, bias, replace(facts, scale=1.1)


def short_head(self: StubEngine) -> Any:
    weight, bias, facts = HEAD(self)
    return weight[:-1], bias, replace(facts, vocab_size=TOY_VOCAB - 1)


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (strange_head, "its head is a Strange"),
        (wrong_scale, "its head's product differs from its logits by "),
        (short_head, "its head has 319 entries for 320 logits"),
    ],
)
def test_a_head_that_cannot_be_recomputed(
    measured: Compare, own_cache: Path, stub_model: Path, noisy_stub: Path, pair: Models, toy_text: Path,
    monkeypatch: pytest.MonkeyPatch, head: Callable[..., Any], reason: str,
) -> None:  # fmt: skip
    """Its logits instead, bit for bit, and said."""
    monkeypatch.setattr(StubEngine, "head", head)
    ran = measured(pair)
    assert ran.status == 0, ran.out
    assert f"ref: float32 logits are kept, not states: {reason}" in ran.err
    assert "of logits, in " in ran.err
    reference = ran.results["reference"]
    assert reference["contents"] == "logits"
    assert reference["contents_reason"].startswith(reason)
    windows = text_windows(toy_text)
    exact, model = (whole_logits(folder, windows) for folder in (stub_model, noisy_stub))
    found = ran.tokens("noisy")
    assert_tokens(found, compared(exact, model, windows))
    assert not list(store_of(own_cache).glob("head.*"))
