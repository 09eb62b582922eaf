"""Divergences of every token, compared with float64 on the positions of PPL.

It also tests the content of the reference's store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file

from compare_q.backends.reference.store import Reader
from tests.support.comparisons import (
    KLD,
    LENGTH,
    N_WINDOWS,
    UNIFORM,
    Compare,
    Models,
    cut_divergence,
    fake,
    store_of,
    stub,
    toy,
)
from tests.support.definitions import definitions
from tests.support.stub_engine import StubEngine, rounding_of_rows, save_stub_model, stub_logits
from tests.support.toy import TOY_VOCAB, save_llama
from tests.support.transformers_models import changed


def text_windows(
    text: Path, count: int = N_WINDOWS, length: int = LENGTH, stride: int = 100, prefix: str = ""
) -> list[list[int]]:
    """Return the windows' token ids, by hand.

    One token per character; its id is the index in the sorted bytes.
    """
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = text.read_text()
    pieces = [
        prefix + letters[begin : begin + length] for begin in range(0, count * stride, stride)
    ]
    # The byte-level alphabet writes a space as Ġ and a line break as Ċ.
    return [
        [alphabet.index({" ": "Ġ", "\n": "Ċ"}.get(letter, letter)) for letter in piece]
        for piece in pieces
    ]


def whole_logits(
    folder: Path, windows: Sequence[Sequence[int]], dtype: str = "float32"
) -> list[torch.Tensor]:
    """Return the stub's logits [L, V] of every window."""
    return [stub_logits(folder, window, dtype) for window in windows]


def compared(
    reference: Sequence[torch.Tensor],
    model: Sequence[torch.Tensor],
    windows: Sequence[Sequence[int]],
    score_from: int = 1,
) -> dict[str, list[Any]]:
    """Return the correct columns of the token scores of a comparison."""
    gold: dict[str, list[Any]] = {name: [] for name in ("window", "position", "token_id")}
    for number, window in enumerate(windows):
        # The logits of a position are those of the next token.
        scored = slice(score_from - 1, len(window) - 1)
        gold["window"] += [number] * (len(window) - score_from)
        gold["position"] += range(score_from, len(window))
        gold["token_id"] += window[score_from:]
        statistics = definitions(
            model[number][scored], window[score_from:], reference[number][scored]
        )
        for name in ("logprob", "ref_logprob", "ref_top1_logprob", "kld", "same_top"):
            gold.setdefault(name, []).extend(statistics[name])
    return gold


def assert_tokens(found: dict[str, list[Any]], gold: dict[str, list[Any]]) -> None:
    """Assert that every column is within 1e-5 of the gold, at the same positions.

    3e-6 was the largest difference.
    """
    for name, values in gold.items():
        if name in ("window", "position", "token_id", "same_top"):
            assert found[name] == values, name
        else:
            np.testing.assert_allclose(found[name], values, rtol=0, atol=1e-5, err_msg=name)


# from the toy tokenizer's chat template, one token per character
PREFIX = "system:\nuser:Say something.\na:"


@pytest.mark.parametrize(
    ("make", "dtype"),
    [
        (stub, "float32"),
        (stub, "bfloat16"),
        pytest.param(toy, "bfloat16", marks=pytest.mark.engine),
    ],
)
def test_a_model_against_itself_is_exactly_zero(
    measured: Compare,
    stub_model: Path,
    toy_model: Path,
    make: Callable[..., dict[str, Any]],
    dtype: str,
) -> None:
    """The KLD is 0 even if the reference's product has fewer rows than the model's.

    The warm-up is not stored.
    """
    folder = stub_model if make is stub else toy_model
    ran = measured(
        [make(folder, "ref", dtype=dtype, reference=True), make(folder, "same", dtype=dtype)],
        warmup_tokens=5,
    )
    assert (ran.status, ran.loaded) == (0, ["ref", "same"]), ran.err
    scores = ran.tokens("same")
    model = ran.models["same"]
    # In float32 a row of a product may round differently among fewer rows (with AVX2, a KLD of up
    # to 1e-10).
    rounding = rounding_of_rows() if dtype == "float32" else 0.0
    assert max(map(abs, scores["kld"])) <= rounding
    assert set(scores["same_top"]) == {True}
    assert scores["ref_logprob"] == pytest.approx(scores["logprob"], abs=1e4 * rounding, rel=0)
    assert abs(model["kld"]) <= rounding
    assert abs(model["kld_sum"]) <= rounding * len(scores["kld"])
    assert (model["same_top"], model["ppl"]) == (1.0, ran.models["ref"]["ppl"])
    assert (ran.results["reference"]["contents"], ran.results["reference"]["head_dtype"]) == (
        "states",
        dtype,
    )


@pytest.mark.parametrize(
    ("data", "prefix", "score_from", "dtype"),
    [
        ({}, "", 1, "float32"),
        # Logits from stored states have the model's roundings.
        ({}, "", 1, "bfloat16"),
        ({"warmup_tokens": 30}, "", 31, "float32"),
        ({"chat_template": True}, PREFIX, len(PREFIX) + 1, "float32"),
        # The warm-up begins after the prefix.
        (
            {"chat_template": True, "warmup_tokens": 30, "eval_stride": 50},
            PREFIX,
            len(PREFIX) + 31,
            "float32",
        ),
    ],
)
def test_divergence_of_every_token_against_float64(
    measured: Compare,
    stub_model: Path,
    noisy_stub: Path,
    toy_text: Path,
    data: dict[str, Any],
    prefix: str,
    score_from: int,
    dtype: str,
) -> None:
    """Exactly the positions of PPL count, without the warm-up and the chat prefix."""
    ran = measured(
        [
            stub(stub_model, "ref", dtype=dtype, reference=True),
            stub(noisy_stub, "noisy", dtype=dtype),
        ],
        **data,
    )
    assert ran.status == 0, ran.err
    windows = text_windows(toy_text, stride=data.get("eval_stride", 100), prefix=prefix)
    logits = [whole_logits(folder, windows, dtype) for folder in (stub_model, noisy_stub)]
    gold = compared(*logits, windows, score_from)
    model = ran.models["noisy"]
    assert_tokens(ran.tokens("noisy"), gold)
    assert model["kld"] == pytest.approx(np.mean(gold["kld"]), abs=1e-5)
    # The noise is larger than rounding.
    assert model["kld"] > 0.01
    assert model["same_top"] == pytest.approx(np.mean(gold["same_top"]), abs=1e-12)
    assert model["same_top"] < 1.0
    assert (
        model["kld_tokens"]
        == model["tokens"]
        == N_WINDOWS * (len(prefix) + LENGTH - score_from)
        == len(gold["kld"])
    )
    reference = ran.tokens("ref")
    assert "kld" not in reference
    assert [reference[name] for name in ("window", "position")] == [
        gold["window"],
        gold["position"],
    ]


@pytest.mark.parametrize("vocab_size", [400, 500, 600])
def test_vocabularies_are_cut_to_what_both_have(
    measured: Compare, own_cache: Path, vocab_size: int
) -> None:
    """Uniform logits over 400, 500 or 600 tokens are compared with 500.

    The engine does not provide a head. Tokens that only one model has are in neither softmax.
    """
    assert cut_divergence(3.0, 500) == pytest.approx(KLD, abs=1e-6)
    ran = measured([UNIFORM[0], fake("uniform", vocab_size=vocab_size)])
    assert ran.status == 0, ran.out
    assert "ref: float32 logits are kept, not states: this engine does not show its head" in ran.err
    opened = Reader(store_of(own_cache))
    assert len(opened.windows) == N_WINDOWS
    assert {opened.window(window).dtype for window in opened.windows} == {torch.float32}
    entries = min(vocab_size, 500)
    model = ran.models["uniform"]
    assert model["kld"] == pytest.approx(cut_divergence(3.0, entries), abs=1e-5)
    assert model["ppl"] == pytest.approx(entries, rel=1e-5)
    assert model["kld_tokens"] == model["tokens"] == N_WINDOWS * (LENGTH - 1)


# Fewer and more entries than the 320 of the reference.
@pytest.mark.parametrize("entries", [300, 384])
def test_a_padded_head_is_cut_and_the_table_says_so(
    measured: Compare, stub_model: Path, toy_text: Path, tmp_path: Path, entries: int
) -> None:
    """The model's head is shorter or longer than the reference's; the shared logits are equal."""
    resized = save_stub_model(tmp_path / "resized", vocab_size=entries)
    ran = measured([stub(stub_model, "ref", reference=True), stub(resized, "resized")])
    assert ran.status == 0, ran.out
    shared = min(entries, TOY_VOCAB)
    windows = text_windows(toy_text)
    logits = [
        [z[:, :shared] for z in whole_logits(folder, windows)] for folder in (stub_model, resized)
    ]
    assert_tokens(ran.tokens("resized"), compared(*logits, windows))
    assert (
        f"resized: of {entries} and {TOY_VOCAB} logits, only those that both have count" in ran.out
    )


def test_positions_without_a_number_are_counted_and_not_lost(measured: Compare) -> None:
    """One NaN in the reference and one in the model: two positions have no divergence.

    The others are correct.
    """
    ref = fake("ref", boost=3.0, nan_windows=[0], reference=True)
    ran = measured([ref, fake("holes", nan_windows=[2]), fake("whole")])
    assert ran.status == 0, ran.out
    positions = N_WINDOWS * (LENGTH - 1)
    for label, holes in (("holes", 2), ("whole", 1)):
        model = ran.models[label]
        assert (model["kld_non_finite"], model["kld_tokens"]) == (holes, positions - holes)
        assert model["kld"] == pytest.approx(KLD, abs=1e-6)
    assert ran.models["ref"]["non_finite"] == 1


def noisy(folder: Path, target: Path, scale: float = 0.03) -> Path:
    """Copy a model, and add noise of ``scale`` times its standard deviation to each matrix."""
    weights = load_file(folder / "model.safetensors").items()
    generator = torch.Generator().manual_seed(7)
    matrices = {name: matrix.float() for name, matrix in weights if matrix.ndim == 2}
    return changed(
        folder,
        target,
        {},
        **{
            name: (
                matrix + scale * matrix.std() * torch.randn(matrix.shape, generator=generator)
            ).bfloat16()
            for name, matrix in matrices.items()
        },
    )


def transformers_logits(
    folder: Path, windows: Sequence[Sequence[int]], dtype: str = "float32"
) -> list[torch.Tensor]:
    """Return a model's logits [L, V] of every window by Transformers.

    For Gemma 2, attention has its soft cap.
    """
    # Transformers' default attention leaves this soft cap out, which costs a KLD of 0.02 in a toy.
    soft_cap = "attn_logit_softcapping" in (folder / "config.json").read_text()
    keys = {"attn_implementation": "eager"} if soft_cap else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), **keys
    ).eval()
    with torch.inference_mode():
        return [model(torch.tensor([window]), use_cache=False).logits[0] for window in windows]


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "keys", "soft_cap", "scale"),
    [
        ("Llama", {"tie_word_embeddings": True}, None, 1.0),
        (
            "Gemma2",
            {"head_dim": 32, "final_logit_softcapping": 3.0, "tie_word_embeddings": True},
            3.0,
            1.0,
        ),
        ("Cohere", {"logit_scale": 0.3, "tie_word_embeddings": True}, None, 0.3),
        ("Granite", {"logits_scaling": 3.0}, None, 1 / 3),
        # Its head has a bias.
        ("Phi", {}, None, 1.0),
    ],
)
def test_heads_that_are_recomputed(
    measured: Compare,
    own_cache: Path,
    toy_text: Path,
    tmp_path: Path,
    name: str,
    keys: dict[str, Any],
    soft_cap: float | None,
    scale: float,
    dtype: str,
) -> None:
    folder = save_llama(tmp_path / name, name, pad_token_id=256, **keys)
    if name == "Phi":
        folder = changed(
            folder, tmp_path / "biased", {}, **{"lm_head.bias": torch.randn(TOY_VOCAB).bfloat16()}
        )
    other = noisy(folder, tmp_path / "noisy")
    ran = measured(
        [toy(folder, "ref", dtype=dtype, reference=True), toy(other, "noisy", dtype=dtype)]
    )
    assert ran.status == 0, ran.out
    store = Reader(store_of(own_cache))
    assert (store.contents, store.head.soft_cap, store.head.scale) == (
        "states",
        soft_cap,
        pytest.approx(scale),
    )
    weight, bias = store.weight(0, TOY_VOCAB, "cpu")
    assert (weight.shape, bias is not None) == ((TOY_VOCAB, 64), name == "Phi")
    windows = text_windows(toy_text)
    gold = compared(
        *(transformers_logits(model, windows, dtype) for model in (folder, other)), windows
    )
    assert_tokens(ran.tokens("noisy"), gold)
    assert ran.models["noisy"]["kld"] > 1e-3


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
        (lambda self: "its head is a Strange", "its head is a Strange"),
        (wrong_scale, "its head's product differs from its logits by "),
        (short_head, "its head has 319 entries for 320 logits"),
    ],
)
def test_a_head_that_cannot_be_recomputed(
    measured: Compare,
    own_cache: Path,
    stub_model: Path,
    noisy_stub: Path,
    pair: Models,
    toy_text: Path,
    monkeypatch: pytest.MonkeyPatch,
    head: Callable[..., Any],
    reason: str,
) -> None:
    """The store has the model's logits instead, bit for bit, and a note reports this."""
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
    assert_tokens(ran.tokens("noisy"), compared(exact, model, windows))
    assert not list(store_of(own_cache).glob("head.*"))
