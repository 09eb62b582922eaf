"""The contract with engines, and the shift by one on the logits that an engine returns.

The definitions are tested in tests/backends/scoring/test_statistics.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends import logits_engine
from compare_q.backends.base import ScoreRequest, TokenScores, Window
from compare_q.backends.logits_engine import LogitsEngine
from compare_q.backends.reference import comparison, head
from compare_q.backends.reference import store as reference
from tests.support.toy import brute_force, planned, toy_windows, with_gaps

MODEL = planned("stored", "stored", "none", 100)
ONLY_SCORES = ScoreRequest()


class StoredLogits(LogitsEngine):
    """An engine that returns logits that it was made with, some rows at a time; without a head."""

    def load(self) -> None: ...

    def __init__(self, logits: Mapping[int, torch.Tensor], rows: int = 1000) -> None:
        super().__init__(MODEL)
        self.logits_of_window = logits
        self.rows = rows

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        yield from self.logits_of_window[window.index].split(self.rows)


def scores_of(
    logits: torch.Tensor, window: Window, request: ScoreRequest = ONLY_SCORES
) -> TokenScores:
    engine = StoredLogits({window.index: logits})
    (scores,) = engine.score([window], request)
    return scores


def random_logits(rows: int, columns: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 8


SCORED = [toy_windows(1, 40)[0], toy_windows(1, 40, 7)[0], with_gaps(toy_windows(1, 40)[0])]
"""Windows that are scored from the first position on, from a later one, and in ranges."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", SCORED)
def test_against_float64(dtype: torch.dtype, window: Window) -> None:
    logits = random_logits(40, 300).to(dtype)
    scores = scores_of(logits, window)
    assert scores.logprob.dtype == np.float32
    assert len(scores.logprob) == window.n_scored
    np.testing.assert_allclose(scores.logprob, brute_force(logits, window), atol=1e-5)
    assert scores.kld is None


@pytest.mark.parametrize("rows", [1, 7, 39])
@pytest.mark.parametrize("window", SCORED)
def test_logits_in_pieces_score_and_are_kept_as_whole_ones(
    tmp_path: Path, window: Window, rows: int
) -> None:
    """Chunks give the same bits, even if a chunk has no scored token, or several ranges of them."""
    logits = random_logits(40, 300)
    # Files contain the name of their folder.
    whole_store = tmp_path / "whole" / "store"
    pieces_store = tmp_path / "pieces" / "store"
    whole = scores_and_records(
        StoredLogits({window.index: logits}), window, whole_store, whole_store
    )
    pieces = scores_and_records(
        StoredLogits({window.index: logits}, rows), window, pieces_store, whole_store
    )
    np.testing.assert_equal(pieces, whole)


def scores_and_records(
    engine: LogitsEngine, window: Window, record: Path, compared_with: Path
) -> tuple[list[Any], list[str]]:
    """Return all scores of a window, recorded and compared, and the names of the recorded files."""
    record.mkdir(parents=True)
    (recorded,) = engine.score([window], ScoreRequest(record=record))
    reference.seal(record, {}, [window.digest])
    (compared,) = engine.score([window], ScoreRequest(reference=compared_with))
    # The names contain the files' checksums.
    files = sorted(file.name for file in record.glob("row*"))
    return [*vars(recorded).values(), *vars(compared).values()], files


@pytest.mark.parametrize("window", SCORED)
def test_divergence_of_whole_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window: Window
) -> None:
    """Compare with float64 on the scored positions; chunks of 5 rows give the same result."""
    before = random_logits(40, 300).half()
    after = (random_logits(40, 300) + random_logits(40, 300, 2) / 8).half()
    (tmp_path / "store").mkdir()
    scores_of(before, window, ScoreRequest(record=tmp_path / "store"))
    reference.seal(tmp_path / "store", {}, [window.digest])
    assert reference.Reader(tmp_path / "store").reason == "this engine does not show its head"
    request = ScoreRequest(reference=tmp_path / "store", vocab_size=300)
    scores = scores_of(after, window, request)
    p = before[window.positions - 1].double().log_softmax(-1)
    q = after[window.positions - 1].double().log_softmax(-1)
    assert scores.kld is not None
    assert scores.ref_logprob is not None
    np.testing.assert_allclose(scores.kld, (p.exp() * (p - q)).sum(-1), atol=1e-5)
    np.testing.assert_allclose(scores.ref_logprob, brute_force(before, window), atol=1e-5)
    np.testing.assert_array_equal(scores.same_top, p.argmax(-1) == q.argmax(-1))
    monkeypatch.setattr(comparison, "CHUNK_ELEMENTS", 300 * 5)
    np.testing.assert_array_equal(scores_of(after, window, request).kld, scores.kld)
    assert not np.any(scores_of(before, window, request).kld)


class Masked(StoredLogits):
    """An engine that masks a token after its head."""

    def head(self) -> tuple[torch.Tensor, None, head.Head]:
        return torch.eye(300), None, head.Head(300, "float32")

    def states(self) -> torch.Tensor:
        return self.piece_states

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        # The head is the identity: its states are the logits before the mask.
        for self.piece_states in super().pieces(window):
            yield self.piece_states.index_fill(1, torch.tensor([5]), -torch.inf)


def test_logits_that_are_masked_after_the_head_are_kept_as_logits(tmp_path: Path) -> None:
    """From states, the head would compute a probability for the masked token."""
    (window,) = toy_windows(1, 40)
    window = replace(window, token_ids=window.token_ids.clip(6))
    (tmp_path / "store").mkdir()
    engine = Masked({0: random_logits(40, 300)})
    (scores,) = engine.score([window], ScoreRequest(record=tmp_path / "store"))
    reference.seal(tmp_path / "store", {}, [window.digest])
    store = reference.Reader(tmp_path / "store")
    assert (store.contents, store.reason) == (
        "logits",
        "its head's product differs from its logits by inf",
    )
    assert torch.isneginf(store.window(window.digest)[:, 5]).all()
    assert np.isfinite(scores.logprob).all()


def test_the_engine_in_the_docstring_is_whole() -> None:
    """Each of its 49,152 tokens has the probability 1 / 49,152."""
    assert logits_engine.__doc__ is not None
    code = logits_engine.__doc__[logits_engine.__doc__.index("    import ") :]
    names: dict[str, Any] = {}
    exec(f"from __future__ import annotations\n{textwrap.dedent(code)}", names)
    model = planned("uniform", "uniform", "none", 100)
    engine = names["UniformEngine"](model)
    engine.check(model)
    engine.load()
    windows = toy_windows(2, 50)
    for scores in engine.score(windows, ScoreRequest()):
        np.testing.assert_allclose(scores.logprob, -np.log(49_152), rtol=1e-6)
    engine.close()
    assert engine.files(model).storage().vram_bits is None
    assert "torch" in engine.versions()


def test_a_planned_model_is_changed_in_a_copy_and_only_in_fields_that_it_has() -> None:
    model = planned("m", "transformers", "folder", 100)
    assert (model.updated(stamp="s").stamp, model.stamp) == ("s", "")
    with pytest.raises(TypeError, match="stmp"):
        model.updated(stmp="s")
