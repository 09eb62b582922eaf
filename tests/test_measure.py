"""Log-probabilities from logits, against float64 brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.base import Backend, LoadRequest, ModelError, Storage, Window
from eval import measure
from tests.conftest import brute_force, toy_windows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score_from", [1, 7])
def test_against_float64(dtype: torch.dtype, score_from: int) -> None:
    (window,) = toy_windows(1, 40, score_from)
    torch.manual_seed(1)
    logits = (torch.randn(40, 300) * 8).to(dtype)
    found = measure.target_logprobs(logits, window)
    assert found.dtype == np.float32
    assert len(found) == 40 - score_from
    np.testing.assert_allclose(found, brute_force(logits, window), atol=1e-5)


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    (window,) = toy_windows(1, 33)
    logits = torch.randn(33, 300)
    whole = measure.target_logprobs(logits, window)
    monkeypatch.setattr(measure, "CHUNK_ELEMENTS", 300 * 5)
    np.testing.assert_array_equal(measure.target_logprobs(logits, window), whole)
    monkeypatch.setattr(measure, "CHUNK_ELEMENTS", 1)
    np.testing.assert_array_equal(measure.target_logprobs(logits, window), whole)


def test_tails_are_not_floored() -> None:
    """log q below -23.03 is where exllamav3's log(p + 1e-10) ended, and -200 where its clamp did."""
    window = Window(0, np.array([0, 1, 1], np.int32))
    logits = torch.tensor([[0.0, -50.0], [0.0, -1000.0], [0.0, 0.0]])
    np.testing.assert_allclose(measure.target_logprobs(logits, window), [-50.0, -1000.0])


def test_masked_logits_and_nan_stay_what_they_are() -> None:
    inf = float("inf")
    window = Window(0, np.array([0, 1, 0, 1], np.int32))
    logits = torch.tensor([[0.0, 0.0, -inf], [0.0, -inf, -inf], [0.0, float("nan"), 0.0], [0.0, 0.0, 0.0]])
    found = measure.target_logprobs(logits, window)
    np.testing.assert_allclose(found[:2], [-np.log(2), 0.0], atol=1e-7)
    assert np.isnan(found[2])
    masked = measure.target_logprobs(torch.tensor([[0.0, -inf], [0.0, 0.0]]), Window(0, np.array([0, 1], np.int32)))
    assert masked[0] == -inf


@pytest.mark.parametrize(
    ("shape", "message"), [((3, 300), "shape"), ((1, 4, 300), "shape"), ((4, 5), "outside the 5 logits")]
)
def test_logits_that_do_not_fit(shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        measure.target_logprobs(torch.zeros(shape), Window(7, np.array([1, 2, 3, 9], np.int32)))


def test_an_engine_must_be_of_one_kind() -> None:
    class Neither(Backend):
        @classmethod
        def versions(cls) -> dict[str, str]:
            return {}

        def load(self) -> None: ...

        def storage(self) -> Storage:
            return Storage()

        def close(self) -> None: ...

    with pytest.raises(TypeError, match="neither"):
        list(measure.token_scores(Neither(LoadRequest("x", "x", "x", 1)), []))
