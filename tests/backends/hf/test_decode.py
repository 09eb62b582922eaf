"""Decode in Transformers: its scores equal those of prefill, except for rounding; wrong decoding is an error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import Decode, ScoreRequest, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.hf import engine as hf
from compare_q.backends.hf.engine import TransformersEngine
from compare_q.backends.reference import store as reference
from compare_q.backends.scoring.decode_check import TOKENS
from tests.support.toy import TOY_VOCAB, save_llama, toy_windows, with_gaps
from tests.support.transformers_models import loaded

WINDOWS = [*toy_windows(3, 61), with_gaps(Window.scored_from(3, toy_windows(4)[3].token_ids))]


@pytest.fixture(scope="module")
def store(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reference store of WINDOWS, from the toy in prefill and float32."""
    folder = tmp_path_factory.mktemp("prefill")
    engine = loaded(toy_model, dtype="float32")
    list(engine.score(WINDOWS, ScoreRequest(record=folder)))
    reference.seal(folder, {}, len(WINDOWS))
    engine.close()
    return folder


def sizes_of(engine: TransformersEngine) -> list[int]:
    """Return a list to which each later forward pass appends its number of tokens."""
    sizes: list[int] = []
    engine.model.register_forward_pre_hook(
        lambda _, given, keys: sizes.append((given[0] if given else keys["input_ids"]).shape[1]), with_kwargs=True
    )
    return sizes


def checked(step: int) -> list[int]:
    """Return the tokens per forward pass of the check before scoring; it compares decode with prefill."""
    return [step] * (TOKENS // step) + [TOKENS]


def kld(engine: TransformersEngine, store: Path) -> float:
    """The largest KLD of a token against the toy in prefill."""
    found = engine.score(WINDOWS, ScoreRequest(reference=store, vocab_size=TOY_VOCAB))
    return max(float(scores.kld.max()) for scores in found if scores.kld is not None)


@pytest.mark.engine
@pytest.mark.parametrize("step", [1, 4])
def test_decode_scores_what_prefill_does(toy_model: Path, store: Path, tmp_path: Path, step: int) -> None:
    """As a reference, decode records the states of all steps; its KLD from this record is almost 0."""
    engine = loaded(toy_model, dtype="float32", decode=Decode(step))
    sizes = sizes_of(engine)
    assert kld(engine, store) < 1e-5
    lengths = [len(window.token_ids) for window in WINDOWS]
    assert sizes == checked(step) + [
        min(step, length - begin) for length in lengths for begin in range(0, length, step)
    ]
    list(engine.score(WINDOWS, ScoreRequest(record=tmp_path)))
    reference.seal(tmp_path, {}, len(WINDOWS))
    assert reference.Reader(tmp_path).contents == "states"
    assert kld(engine, tmp_path) < 1e-6
    engine.close()


@pytest.mark.engine
@pytest.mark.parametrize("decode", [None, Decode()])
def test_a_model_that_decodes_wrong_is_refused(toy_model: Path, store: Path, decode: Decode | None) -> None:
    """Half of V is lost in steps of one token, as in a decode kernel (turboquant_plus, issue 99)."""

    def halved(_: Any, __: Any, value: torch.Tensor) -> torch.Tensor:
        if value.shape[1] == 1:
            value = value.clone()
            value[..., value.shape[-1] // 2 :] = 0
        return value

    engine = loaded(toy_model, dtype="float32", decode=decode)
    for layer in engine.model.model.layers:
        layer.self_attn.v_proj.register_forward_hook(halved)
    if decode is None:
        assert kld(engine, store) < 1e-6
    else:
        with pytest.raises(ModelError, match="decode"):
            kld(engine, store)
    engine.close()


@pytest.mark.engine
@pytest.mark.parametrize("step", [1, 3])
def test_positions_are_given(tmp_path: Path, step: int) -> None:
    """Bamba in Transformers counts positions from 0 in every forward pass unless they are given."""
    save_llama(
        tmp_path, "Bamba", attn_layer_indices=[1], mamba_n_heads=4, mamba_d_head=32, mamba_d_state=16, mamba_n_groups=1,
        dtype="float32",
    )  # fmt: skip
    (gold,) = loaded(tmp_path, dtype="float32").score(WINDOWS[:1], ScoreRequest())
    (found,) = loaded(tmp_path, dtype="float32", decode=Decode(step)).score(WINDOWS[:1], ScoreRequest())
    np.testing.assert_allclose(found.logprob, gold.logprob, atol=1e-4)


@pytest.mark.engine
@pytest.mark.parametrize(
    ("step", "sizes"), [(1, [20, 9, *[1] * 6, 20, 2, *[1] * 3, 1]), (4, [20, 9, 4, 2, 20, 2, 3, 1])]
)
def test_decode_behind_prompts(
    toy_model: Path, store: Path, monkeypatch: pytest.MonkeyPatch, step: int, sizes: list[int]
) -> None:
    """Positions 30 to 35 and 58 to 60 of 61 tokens are scored.  Positions 29 to 34 and 57 to 59 are computed in steps,
    and the positions before them as prompts of at most 20 tokens.  The reference's
    windows were scored at all positions, so that it has no prompts."""
    monkeypatch.setattr(hf, "PROMPT", 20)
    engine = loaded(toy_model, dtype="float32", decode=Decode(step, behind_prompts=True))
    assert kld(engine, store) < 1e-5
    whole, seen = loaded(toy_model, dtype="float32"), sizes_of(engine)
    window = replace(WINDOWS[0], spans=((30, 36), (58, 61)))
    (found,), (gold,) = (list(each.score([window], ScoreRequest())) for each in (engine, whole))
    np.testing.assert_allclose(found.logprob, gold.logprob, atol=1e-4)
    assert seen == sizes
    engine.close()
    whole.close()
