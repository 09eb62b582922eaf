"""What is left behind as a reference: states where the head can be recomputed, logits elsewhere, by one rule."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from compare_q.backends.common import storage
from compare_q.backends.reference import recorder
from compare_q.backends.reference.head import Head, head_logits
from compare_q.backends.reference.recorder import Recorder
from tests.support.stores import numbers

HEAD = Head(50, "float32")


def test_states_are_kept_where_the_head_makes_the_engines_logits_of_them(tmp_path: Path) -> None:
    """Up to four spacings of the largest logit; the comparison is of the first 64 rows."""
    states, weight = numbers(80, 4), numbers(50, 4, seed=1)
    logits = head_logits(HEAD, states, weight, None)
    near, far = logits.clone(), logits.clone()
    near[3, 7] += 3 * 2**-14 * logits[:64].abs().max()
    far[3, 7] += 5 * 2**-14 * logits[:64].abs().max()
    later = logits.clone()
    later[64:] += 1
    for given, contents in ((logits, "states"), (near, "states"), (far, "logits"), (later, "states")):
        recorder = Recorder.of_engine(tmp_path, (weight, None, HEAD), given, lambda: states)
        assert (recorder.contents, bool(recorder.reason)) == (contents, contents == "logits")
        assert recorder.chosen(given, lambda: states) is (states if contents == "states" else given)


CASES = {
    "a window": {"states": numbers(5, 4, dtype=torch.bfloat16)},
    "a head with a bias": {"weight": numbers(50, 4, dtype=torch.float16), "bias": numbers(50, dtype=torch.float16)},
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
    monkeypatch.setattr(recorder, "PIECE_BYTES", piece)
    tensors, metadata = CASES[name], storage.facts_line({"reason": "é"})
    file = storage.keep(tmp_path, "row.000000", recorder.pieces(tensors, metadata))
    data = file.read_bytes()
    assert data == save({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, metadata=metadata)
    assert file.name == f"row.000000.{hashlib.sha256(data).hexdigest()[:40]}.safetensors"
    assert storage.header_of(file)[0] == {"reason": "é"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_what_a_gpu_still_computes_is_kept_as_it_will_be() -> None:
    """Half a second of products are queued when the bytes are asked for."""
    factor = torch.randn(4096, 4096, device="cuda") / 64
    kept = factor
    for _ in range(200):
        kept = torch.tanh(kept @ factor)
    assert b"".join(map(bytes, recorder.raw(kept))) == kept.cpu().numpy().tobytes()
