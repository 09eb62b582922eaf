"""KL divergence of every token against float64, on the positions of PPL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.reference import comparison
from compare_q.backends.reference.store import Reader
from tests.support.comparisons import (
    KLD,
    LENGTH,
    N_WINDOWS,
    Compare,
    Measured,
    Models,
    assert_tokens,
    compared,
    cut_divergence,
    fake,
    mean,
    store_of,
    stub,
    text_windows,
    toy,
    whole_logits,
)
from tests.support.stub_engine import rounding_of_rows, save_stub_model
from tests.support.toy import TOY_VOCAB

PREFIX = "system:\nuser:Say something.\na:"  # of the toy tokenizer's chat template, a token a letter


def assert_exactly_zero(ran: Measured, dtype: str) -> None:
    """The model "same" has every score of the reference "ref", whose states were kept."""
    assert ran.status == 0, ran.err
    assert ran.loaded == ["ref", "same"]
    found = ran.tokens("same")
    rounding = rounding_of_rows() if dtype == "float32" else 0.0
    assert max(map(abs, found["kld"])) <= rounding
    assert set(found["same_top"]) == {True}
    assert found["ref_logprob"] == pytest.approx(found["logprob"], abs=1e4 * rounding, rel=0)
    model = ran.models["same"]
    assert abs(model["kld"]) <= rounding
    assert abs(model["kld_sum"]) <= rounding * len(found["kld"])
    assert model["same_top"] == 1.0
    assert model["ppl"] == ran.models["ref"]["ppl"]
    assert ran.results["reference"]["contents"] == "states"
    assert ran.results["reference"]["head_dtype"] == dtype


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_against_itself_is_exactly_zero(measured: Compare, stub_model: Path, dtype: str) -> None:
    """Also though the reference's product is of fewer rows than the model's own: the warm-up is not kept."""
    models = [stub(stub_model, "ref", dtype=dtype, reference=True), stub(stub_model, "same", dtype=dtype)]
    assert_exactly_zero(measured(models, warmup_tokens=5), dtype)


@pytest.mark.engine
def test_a_model_in_transformers_against_itself_is_exactly_zero(measured: Compare, toy_model: Path) -> None:
    models = [toy(toy_model, "ref", dtype="bfloat16", reference=True), toy(toy_model, "same", dtype="bfloat16")]
    assert_exactly_zero(measured(models, warmup_tokens=5), "bfloat16")


@pytest.mark.parametrize(
    ("data", "prefix", "score_from"),
    [
        ({}, "", 1),
        ({"warmup_tokens": 30}, "", 31),
        ({"chat_template": True}, PREFIX, len(PREFIX) + 1),
        ({"chat_template": True, "warmup_tokens": 30, "eval_stride": 50}, PREFIX, len(PREFIX) + 31),
    ],
)
def test_divergence_of_every_token_against_float64(
    measured: Compare, stub_model: Path, noisy_stub: Path, pair: Models, toy_text: Path,
    data: dict[str, Any], prefix: str, score_from: int,
) -> None:  # fmt: skip
    """On exactly the positions of PPL: neither the warm-up nor the chat prefix counts."""
    ran = measured(pair, **data)
    assert ran.status == 0, ran.err
    windows = text_windows(toy_text, stride=data.get("eval_stride", 100), prefix=prefix)
    logits = [whole_logits(folder, windows) for folder in (stub_model, noisy_stub)]
    gold = compared(*logits, windows, score_from)
    assert_tokens(ran.tokens("noisy"), gold)
    model = ran.models["noisy"]
    assert model["kld"] == pytest.approx(mean(gold["kld"]), abs=1e-5)
    assert model["kld"] > 0.01  # the noise is no rounding
    assert model["same_top"] == pytest.approx(mean(gold["same_top"]), abs=1e-12)
    assert model["same_top"] < 1.0
    assert model["kld_tokens"] == model["tokens"] == N_WINDOWS * (len(prefix) + LENGTH - score_from) == len(gold["kld"])
    reference = ran.tokens("ref")
    assert "kld" not in reference
    assert [reference[name] for name in ("window", "position")] == [gold["window"], gold["position"]]


def test_divergence_of_bf16_models_against_float64(
    measured: Compare, stub_model: Path, noisy_stub: Path, toy_text: Path
) -> None:
    """The stored states give the bf16 logits that the model had, each rounded as the model rounded it."""
    models = [stub(stub_model, "ref", dtype="bfloat16", reference=True), stub(noisy_stub, "noisy", dtype="bfloat16")]
    ran = measured(models)
    assert ran.status == 0, ran.err
    windows = text_windows(toy_text)
    gold = compared(*(whole_logits(folder, windows, "bfloat16") for folder in (stub_model, noisy_stub)), windows)
    assert_tokens(ran.tokens("noisy"), gold)


def test_a_long_vocabulary_is_compared_in_pieces(
    measured: Compare, pair: Models, stub_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = measured(pair).tokens("noisy")
    monkeypatch.setattr(comparison, "CHUNK_ELEMENTS", 7 * TOY_VOCAB)
    pieces = measured(pair, "-cc").tokens("noisy")
    np.testing.assert_allclose(pieces["kld"], whole["kld"], rtol=1e-4, atol=1e-5)
    assert pieces["window"] == whole["window"]


def test_the_closed_form() -> None:
    assert cut_divergence(3.0, 500) == pytest.approx(KLD, abs=1e-6)


@pytest.mark.parametrize("vocab_size", [400, 500, 600])
def test_vocabularies_are_cut_to_what_both_have(measured: Compare, vocab_size: int) -> None:
    """Uniform logits over 400, 500 or 600 tokens against 500; what only one model has is in no softmax."""
    ran = measured([fake("ref", boost=3.0, reference=True), fake("uniform", vocab_size=vocab_size)])
    assert ran.status == 0, ran.out
    entries = min(vocab_size, 500)
    model = ran.models["uniform"]
    assert model["kld"] == pytest.approx(cut_divergence(3.0, entries), abs=1e-5)
    assert model["ppl"] == pytest.approx(entries, rel=1e-5)
    assert model["kld_tokens"] == model["tokens"] == N_WINDOWS * (LENGTH - 1)


@pytest.mark.parametrize("entries", [300, 384])
def test_a_padded_head_is_cut_and_the_table_says_so(
    measured: Compare, stub_model: Path, toy_text: Path, tmp_path: Path, entries: int
) -> None:
    """A model whose head is shorter or longer than the reference's, whose other logits it shares."""
    resized = save_stub_model(tmp_path / "resized", vocab_size=entries)
    ran = measured([stub(stub_model, "ref", reference=True), stub(resized, "resized")])
    assert ran.status == 0, ran.out
    shared, windows = min(entries, TOY_VOCAB), text_windows(toy_text)
    logits = [[z[:, :shared] for z in whole_logits(folder, windows)] for folder in (stub_model, resized)]
    assert_tokens(ran.tokens("resized"), compared(*logits, windows))
    assert f"resized: of {entries} and {TOY_VOCAB} logits, only those that both have count" in ran.out


def test_a_fake_model_against_a_real_one(measured: Compare, stub_model: Path, toy_text: Path) -> None:
    ran = measured([stub(stub_model, "ref", reference=True), fake("uniform", vocab_size=TOY_VOCAB)])
    assert ran.status == 0, ran.out
    windows = text_windows(toy_text)
    uniform = [torch.zeros(LENGTH, TOY_VOCAB)] * N_WINDOWS
    gold = compared(whole_logits(stub_model, windows), uniform, windows)
    found = ran.tokens("uniform")
    np.testing.assert_allclose(found["kld"], gold["kld"], rtol=1e-5, atol=1e-5)
    assert found["same_top"] == gold["same_top"]


def test_an_engine_without_a_head_leaves_its_logits(measured: Compare, own_cache: Path) -> None:
    ran = measured([fake("ref", boost=3.0, reference=True), fake("uniform")])
    assert ran.status == 0, ran.err
    assert "ref: float32 logits are kept, not states: this engine does not show its head" in ran.err
    assert ran.results["reference"]["contents"] == "logits"
    assert Reader(store_of(own_cache)).window(0).dtype == torch.float32
    assert ran.models["uniform"]["kld"] == pytest.approx(KLD, abs=1e-6)


def test_positions_without_a_number_are_counted_and_not_lost(measured: Compare) -> None:
    """A NaN in the reference and one in the model: two positions have no divergence, the others theirs."""
    ran = measured(
        [fake("ref", boost=3.0, nan_windows=[0], reference=True), fake("holes", nan_windows=[2]), fake("whole")]
    )
    assert ran.status == 0, ran.out
    positions = N_WINDOWS * (LENGTH - 1)
    for label, holes in (("holes", 2), ("whole", 1)):
        model = ran.models[label]
        assert (model["kld_non_finite"], model["kld_tokens"]) == (holes, positions - holes)
        assert model["kld"] == pytest.approx(KLD, abs=1e-6)
    assert ran.models["ref"]["non_finite"] == 1
