"""A streamed model gives the whole model's logits, bit for bit, with two layers on the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import ScoreRequest
from compare_q.backends.hf import layer_offload
from compare_q.backends.reference import store
from tests.support.toy import save_llama, toy_windows
from tests.support.transformers_models import loaded

pytest.importorskip("greenlet", reason="streaming needs greenlet")
pytestmark = pytest.mark.engine

BF16 = "transformers_auto_bf16"


# Five windows: alone, in groups of 3 and 2, in one group, and in as large a group as fits.
@pytest.mark.parametrize(
    ("group", "options"), [(1, {}), (3, {}), (5, {}), (None, {}), (3, {"noise": "bf16"})]
)
def test_same_logits_as_the_whole_model(
    toy_model: Path, group: int | None, options: dict[str, Any]
) -> None:
    """Layers run for some windows at a time, or for each alone; each token keeps its noise."""
    windows = toy_windows(5, 40)
    whole = loaded(toy_model, BF16, **options)
    streamed = loaded(toy_model, BF16, streaming=True, streaming_windows=group, **options)
    streamed.prepare(windows)
    for window in windows:
        assert torch.equal(streamed.logits(window), whole.logits(window))
    streamed.close()


def test_two_layers_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of six layers is copied once for each of three groups, at most two at a time."""
    save_llama(tmp_path, num_hidden_layers=6)
    resident_bytes: list[int] = []
    copies = layer_offload.Streamer.copies

    def watched(self: layer_offload.Streamer, layer: int) -> list[torch.Tensor]:
        n_bytes = sum(host.nbytes for _, host in self.hosts[layer])
        for hosts in self.hosts:
            for weight, host in hosts:
                # Only the weights of a copied layer are not in the host's memory.
                if weight.data_ptr() != host.data_ptr():
                    n_bytes += host.nbytes
        resident_bytes.append(n_bytes)
        return copies(self, layer)

    monkeypatch.setattr(layer_offload.Streamer, "copies", watched)
    streamed = loaded(tmp_path, BF16, streaming=True, streaming_windows=2)
    assert len(list(streamed.score(toy_windows(6, 40), ScoreRequest()))) == 6
    layer = sum(host.nbytes for _, host in streamed.streamer.hosts[0])
    assert len(resident_bytes) == 3 * 6
    assert max(resident_bytes) == 2 * layer
    streamed.close()


def test_it_can_be_the_reference(toy_model: Path, tmp_path: Path) -> None:
    """The streamed model's states, head and scores equal those of the whole model."""
    windows = toy_windows(4, 40, 3)
    stores = []
    scores = []
    for name, options in (("whole", {}), ("streamed", {"streaming": True, "streaming_windows": 3})):
        (tmp_path / name).mkdir()
        engine = loaded(toy_model, BF16, **options)
        scores.append(list(engine.score(windows, ScoreRequest(record=tmp_path / name))))
        store.seal(tmp_path / name, {}, [window.digest for window in windows])
        stores.append(store.Reader(tmp_path / name))
        engine.close()
    assert stores[1].contents == "states"
    for window, whole, streamed in zip(windows, *scores, strict=True):
        assert torch.equal(stores[0].window(window.digest), stores[1].window(window.digest))
        np.testing.assert_array_equal(whole.logprob, streamed.logprob)
