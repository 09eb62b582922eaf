"""Ranks that exchange the rows of the first pass for the second: the same chunks on all, and none is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from backends.scoring import divergences
from backends.vllm.hooks import RequestRows
from backends.vllm.scorer import Plan, Scorer
from backends.vllm.worker import ScoringExtension, ScoringPass
from tests.support.definitions import assert_divergences_of, draw

STATES, REFERENCE, TOKENS = draw(1000, 40), draw(1000, 40, seed=1), torch.arange(1000) % 40
REQUEST = RequestRows((7, [(1, 1000)]), 0, 0, 1000, 1000, TOKENS)
"""A window of 1,000 tokens, number 7; on a CPU in chunks of 256."""
SHARDS = ((0, 25), (25, 40))


def tokens(parts: Sequence[tuple[Any, int, int]]) -> torch.Tensor:
    return torch.cat([prompt[a:b] for prompt, a, b in parts])


class Ranks:
    """Two ranks of one model whose logits are its states, in threads; ``fails``: (rank, number of its chunk)."""

    def __init__(self, fails: tuple[int, int] | None, error: Exception) -> None:
        self.fails, self.error = fails, error
        self.barrier = threading.Barrier(2, timeout=30)
        self.rows: dict[int, torch.Tensor] = {}
        self.exchanged: list[list[int]] = [[], []]

    def scorer(self, rank: int) -> Scorer:
        first, last = SHARDS[rank]
        chunks = iter(range(100))

        def local(hidden: torch.Tensor) -> torch.Tensor:
            if (rank, next(chunks)) == self.fails:
                raise self.error
            return hidden[:, first:last]

        def of_all_ranks(rows: torch.Tensor) -> torch.Tensor:
            self.rows[rank] = rows.clone()
            self.exchanged[rank].append(len(rows))
            self.barrier.wait()
            found = torch.stack([self.rows[0], self.rows[1]])
            self.barrier.wait()
            return found

        source: Any = SimpleNamespace(processors=[], processor=None, shard=(first, last), local=local)
        one = Scorer(source, Plan(divergences=True), torch.device("cpu"), 40, 2, of_all_ranks=of_all_ranks)
        one.comparison = SimpleNamespace(  # type: ignore[assignment]
            head=None, logits=lambda parts: torch.cat([REFERENCE[a.begin : a.end, first:last] for a in parts])
        )
        return one

    def step(self) -> list[Scorer]:
        """Both ranks after one step with the whole window."""
        scorers = [self.scorer(0), self.scorer(1)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda one: one.step(STATES, [REQUEST], tokens), scorers))
        for one in scorers:
            one.buffers.land()
        return scorers


def test_two_ranks_score_as_one_does() -> None:
    ranks = Ranks(None, ValueError())
    scorers = ranks.step()
    assert [one.error for one in scorers] == ["", ""]
    shards = [one.buffers.windows[7].statistics for one in scorers]
    found = divergences.scores(7, TOKENS[1:].numpy(), shards)
    assert_divergences_of(found, STATES[:-1], REFERENCE[:-1], atol=1e-5)
    assert ranks.exchanged == [[256, 256, 256, 231]] * 2


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("error", [ValueError("no"), torch.OutOfMemoryError("CUDA out of memory.")], ids=str)
def test_an_error_on_one_rank_leaves_no_other_waiting(rank: int, error: Exception) -> None:
    """Chunks are not halved for want of memory then: the other rank would not halve its own."""
    ranks = Ranks((rank, 1), error)
    scorers = ranks.step()
    assert [bool(one.error) for one in scorers] == [rank == 0, rank == 1]
    assert ranks.exchanged == [[256, 256, 256, 231]] * 2


@pytest.mark.parametrize("together", [True, False])
def test_a_rank_whose_error_was_told_takes_part_where_others_wait(together: bool) -> None:
    """The engine may be some steps ahead of the driver, which ends the requests."""
    steps: list[Any] = []
    extension = ScoringExtension()
    under_test: Any = SimpleNamespace(together=together, step=lambda *given: steps.append(given))
    extension._compare_q_pass = ScoringPass(under_test, last_stage=True, error="out of memory")
    extension._compare_q_step(STATES, [REQUEST], tokens)
    assert len(steps) == together


@pytest.mark.parametrize("tp_size", [1, 2])
def test_chunks_do_not_depend_on_whose_head_it_is(tp_size: int) -> None:
    """One rank's part of the reference's head may be the model's own, and another's not."""
    rows = set()
    for is_own in (True, False):
        processor = SimpleNamespace(soft_cap=None, scale=1.0, org_vocab_size=128_256)
        source: Any = SimpleNamespace(processors=[processor], processor=processor, shard=None)
        one = Scorer(source, Plan(divergences=True), torch.device("cuda"), 128_256, tp_size)
        one.comparison = SimpleNamespace(  # type: ignore[assignment]
            head=SimpleNamespace(is_own=is_own),
            store=SimpleNamespace(head=SimpleNamespace(soft_cap=None, scale=1.0)),
        )
        assert one.has_head_beside is is_own
        assert one.exchanges is (tp_size == 2)
        rows.add(one.chunk_rows(4096, 2))
        assert max(rows) * (128_256 // tp_size * 4 + 4096 * 10 + 33 * 4 + 8 + 80) < 256 << 20
    assert rows == {384} if tp_size == 1 else len(rows) == 1
    assert np.all([each % 128 == 0 for each in rows])
