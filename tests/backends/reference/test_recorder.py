"""Recorded references: states if the head can be recomputed, otherwise logits."""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from compare_q.backends.common import storage
from compare_q.backends.reference import recorder
from compare_q.backends.reference.head import (
    Head,
    head_difference,
    head_logits,
    head_mismatch,
    largest_difference,
    largest_finite,
)
from compare_q.backends.reference.recorder import Recorder
from tests.support.stores import numbers

HEAD = Head(50, "float32")


def test_states_are_kept_where_the_head_makes_the_engines_logits_of_them(tmp_path: Path) -> None:
    """Logits may differ by four spacings of the largest logit, in the first 64 rows."""
    states = numbers(80, 4)
    weight = numbers(50, 4, seed=1)
    head = (weight, None, HEAD)

    def recorder_of(logits: torch.Tensor) -> Recorder:
        return Recorder.of_engine(tmp_path, "", {}, head, logits, lambda: states)

    exact = head_logits(HEAD, states, weight, None)
    # 2**-14 is the spacing that head.SPACINGS has for float32.
    spacing = 2**-14 * exact[:64].abs().max()
    close = exact.clone()
    close[3, 7] += 3 * spacing
    distant = exact.clone()
    distant[3, 7] += 5 * spacing
    distant_later = exact.clone()
    # The recorder compares only its first SAMPLED_ROWS = 64 rows.
    distant_later[64:] += 1
    for logits in (exact, close, distant_later):
        recorder = recorder_of(logits)
        assert (recorder.contents, recorder.reason) == ("states", "")
        assert recorder.chosen(logits, lambda: states) is states
    recorder = recorder_of(distant)
    assert recorder.contents == "logits"
    assert recorder.reason
    assert recorder.chosen(distant, lambda: states) is distant


CASES = {
    "a window": {"states": numbers(5, 4, dtype=torch.bfloat16)},
    "a head with a bias": {
        "weight": numbers(50, 4, dtype=torch.float16),
        "bias": numbers(50, dtype=torch.float16),
    },
    "two dtypes": {"a": numbers(3, 5, dtype=torch.bfloat16), "b": numbers(2, dtype=torch.float32)},
    "no rows": {"states": torch.zeros(0, 4)},
    "rows that lie apart": {"logits": numbers(6, 8)[::2, 1:4]},
    "a gradient": {"logits": numbers(6, 8).requires_grad_()},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("piece", [1, 50, 1 << 24])
def test_files_are_byte_for_byte_those_of_the_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, piece: int
) -> None:
    monkeypatch.setattr(recorder, "WRITE_BYTES", piece)
    tensors = CASES[name]
    metadata = storage.facts_line({"reason": "é"})
    file = storage.keep(tmp_path, "row.000000", recorder.pieces(tensors, metadata))
    data = file.read_bytes()
    assert data == save(
        {key: tensor.detach().contiguous() for key, tensor in tensors.items()}, metadata=metadata
    )
    assert file.name == f"row.000000.{hashlib.sha256(data).hexdigest()[:40]}.safetensors"
    assert storage.header_of(file)[0] == {"reason": "é"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_what_a_gpu_still_computes_is_kept_as_it_will_be() -> None:
    """Half a second of matrix products is queued when the bytes are requested."""
    factor = torch.randn(4096, 4096, device="cuda") / 64
    product = factor
    for _ in range(200):
        product = torch.tanh(product @ factor)
    content = b"".join(bytes(piece) for piece in recorder.raw(product))
    assert content == product.cpu().numpy().tobytes()


INF = math.inf
NAN = math.nan


def test_logits_from_states_by_hand() -> None:
    """State [1, 2], head rows [3, 4], [5, 6], [0, -1]: the logits are 11, 17, -2.

    Then plus a bias, 10 tanh(z / 10), and halved.
    """
    states = torch.tensor([[1.0, 2.0]])
    weight = torch.tensor([[3.0, 4.0], [5.0, 6.0], [0.0, -1.0]])
    bias = torch.tensor([0.5, 0.0, -1.0])
    # 1 * 3 + 2 * 4 = 11, 1 * 5 + 2 * 6 = 17, 1 * 0 - 2 * 1 = -2.
    (plain,) = head_logits(Head(3, "float32"), states, weight, None).tolist()
    assert plain == [11.0, 17.0, -2.0]
    (biased,) = head_logits(Head(3, "float32"), states, weight, bias).tolist()
    assert biased == [11.5, 17.0, -3.0]
    (scaled,) = head_logits(Head(3, "float32", scale=0.5), states, weight, bias).tolist()
    assert scaled == [5.75, 8.5, -1.5]
    gold = [10 * math.tanh(z / 10) for z in (11.5, 17.0, -3.0)]
    (capped,) = head_logits(Head(3, "float32", soft_cap=10.0), states, weight, bias).tolist()
    assert capped == pytest.approx(gold, rel=1e-6)
    head = Head(3, "float32", soft_cap=10.0, scale=0.5)
    (both,) = head_logits(head, states, weight, bias).tolist()
    assert both == pytest.approx([z / 2 for z in gold], rel=1e-6)
    assert states.tolist() == [[1.0, 2.0]]
    assert bias.tolist() == [0.5, 0.0, -1.0]


def test_a_masked_or_nan_logit_never_makes_two_things_equal() -> None:
    logits = torch.tensor([[1.0, -INF, 3.0]])
    assert largest_difference(logits, logits.clone()) == 0.0
    assert largest_difference(logits, torch.tensor([[1.0, -INF, 3.5]])) == 0.5
    assert largest_difference(logits, torch.tensor([[1.0, 2.0, 3.0]])) == INF
    assert largest_difference(logits, torch.tensor([[NAN, -INF, 3.0]])) == INF
    assert largest_finite(torch.tensor([[NAN, -INF, -7.0]])) == 7.0


def test_a_head_is_recomputable_up_to_four_spacings_of_the_largest_logit() -> None:
    """For bfloat16 and logits up to 32, the limit is 4 * 2**-7 * 32 = 1."""
    assert head_mismatch(1.0, 32.0, "bfloat16") == ""
    assert (
        head_mismatch(1.01, 32.0, "bfloat16")
        == "its head's product differs from its logits by 1.01"
    )
    # For float16, the limit is 4 * 2**-10 * 32 = 0.125.
    assert head_mismatch(1.0, 32.0, "float16") == "its head's product differs from its logits by 1"
    assert head_mismatch("its head is a Strange", 32.0, "bfloat16") == "its head is a Strange"
    for bad in (INF, NAN):
        assert (
            head_mismatch(bad, 32.0, "bfloat16")
            == f"its head's product differs from its logits by {bad}"
        )


def test_how_far_a_heads_product_is_from_the_logits() -> None:
    states = numbers(5, 4)
    weight = numbers(9, 4, seed=1)
    bias = numbers(9, seed=2)
    head = (weight, bias, Head(9, "float32", 30.0, 0.5))
    logits = head_logits(head[2], states, weight, bias)
    assert head_difference(head, states, logits) == 0.0
    assert head_difference(head, states, logits + 0.25) == pytest.approx(0.25, rel=1e-6)
    assert head_difference("its head is a Strange", states, logits) == "its head is a Strange"
    assert head_difference(head, states, logits[:, :8]) == "its head has 9 entries for 8 logits"
    assert (
        head_difference(head, states[:4], logits)
        == "its head is given other rows than its logits have"
    )
