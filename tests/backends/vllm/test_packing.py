"""Which rows of a step are packed in which order, by hand."""

from __future__ import annotations

import numpy as np
import torch

from backends.reference.reading import StoredRows
from backends.vllm.hooks import Pack, RequestRows, ScoredRows, scored_rows, states_of
from backends.vllm.scorer import Buffer, Buffers

STATES = torch.arange(20.0)[:, None].expand(20, 3)
REQUESTS = [
    RequestRows([5, [(1, 10)]], 4, 12, 6, 10, "e"),  # window 5: positions 4 to 9, of which 9 predicts nothing
    RequestRows([2, [(4, 10)]], 0, 0, 8, 10, "b"),  # window 2: scored from token 4 on, so the rows at positions 3 to 7
    RequestRows([7, [(1, 5)]], 4, 8, 1, 5, "g"),  # window 7: its last position alone
    RequestRows([8, [(9, 12)]], 0, 9, 3, 12, "h"),  # window 8: nothing is scored yet
]
PARTS = [ScoredRows(StoredRows(2, 6, 0, 5), 3, 5, "b", 4), ScoredRows(StoredRows(5, 9, 4, 9), 12, 5, "e", 5)]


def test_scored_rows_by_hand() -> None:
    """The row at position p predicts token p + 1; parts lie as in the hidden states."""
    assert scored_rows(REQUESTS) == PARTS


def test_ranges_of_one_window_are_parts_by_hand() -> None:
    """Of positions 1 to 2, 5 to 8 and 9, of which this step holds rows 2 to 7: those before positions 5 to 8."""
    assert scored_rows([RequestRows([3, [(1, 3), (5, 9), (9, 10)]], 2, 10, 6, 10, "t")]) == [
        ScoredRows(StoredRows(3, 7, 2, 6), 12, 4, "t", 5)
    ]
    assert scored_rows([RequestRows([3, [(1, 3), (6, 8)]], 0, 0, 10, 10, "t")]) == [
        ScoredRows(StoredRows(3, 4, 0, 2), 0, 2, "t", 1),
        ScoredRows(StoredRows(3, 4, 2, 4), 5, 2, "t", 6),
    ]


def test_chunks_cut_parts() -> None:
    pack = Pack(PARTS)
    assert len(pack) == 10
    assert pack.between(0, 10) == PARTS
    assert pack.between(1, 4) == [ScoredRows(StoredRows(2, 6, 1, 4), 4, 3, "b", 5)]
    assert pack.between(4, 7) == [
        ScoredRows(StoredRows(2, 6, 4, 5), 7, 1, "b", 8),
        ScoredRows(StoredRows(5, 9, 4, 6), 12, 2, "e", 5),
    ]
    assert pack.between(5, 6) == [ScoredRows(StoredRows(5, 9, 4, 5), 12, 1, "e", 5)]
    assert pack.between(8, 20) == [ScoredRows(StoredRows(5, 9, 7, 9), 15, 2, "e", 8)]
    assert pack.between(10, 12) == []


def test_states_are_gathered_only_where_they_lie_apart() -> None:
    pack = Pack(PARTS)
    assert states_of(STATES, pack.between(0, 5)).data_ptr() == STATES[3:].data_ptr()
    assert states_of(STATES, pack.between(3, 8))[:, 0].tolist() == [6, 7, 12, 13, 14]
    assert states_of(STATES, pack.between(5, 10))[:, 0].tolist() == [12, 13, 14, 15, 16]


def test_targets_are_asked_for_at_once() -> None:
    asked = []
    Pack(PARTS).targets(lambda parts: asked.append(parts))  # type: ignore[arg-type, return-value]
    assert asked == [[("b", 4, 9), ("e", 5, 10)]]


def test_an_empty_step() -> None:
    assert len(Pack(scored_rows(REQUESTS[2:]))) == 0


def test_results_land_by_window_and_position() -> None:
    """Also out of order, and again: a repetition overwrites itself and is counted."""
    buffers = Buffers()
    rows = torch.arange(50, dtype=torch.float32).reshape(10, 5)
    buffers.send(rows, PARTS)
    assert not buffers.windows
    buffers.land()
    assert buffers.windows[2].written.tolist() == [True] * 5 + [False]
    assert buffers.windows[5].written.tolist() == [False] * 4 + [True] * 5
    np.testing.assert_array_equal(buffers.windows[5].statistics[4:], rows[5:].numpy())
    buffers.send(rows[:3] + 100, [PARTS[0].cut(3, 5), ScoredRows(StoredRows(2, 6, 5, 6), 0, 1, "b", 9)])
    buffers.land(wait=False)
    whole = buffers.finished(2)
    assert isinstance(whole, Buffer)
    np.testing.assert_array_equal(whole.statistics[:, 0], [0, 5, 10, 100, 105, 110])
    assert buffers.recomputed == 2
    assert [buffers.finished(window) for window in (2, 5)] == [-1, 4]


def test_what_is_kept_goes_to_its_windows() -> None:
    buffers, kept = Buffers(), torch.arange(20.0).reshape(10, 2)
    buffers.keep(kept[:7], Pack(PARTS).between(0, 7))
    buffers.keep(kept[7:], Pack(PARTS).between(7, 10))
    assert buffers.windows[2].kept is not None
    assert buffers.windows[5].kept is not None
    assert torch.equal(buffers.windows[2].kept[:5], kept[:5])
    assert torch.equal(buffers.windows[5].kept[4:], kept[5:])
