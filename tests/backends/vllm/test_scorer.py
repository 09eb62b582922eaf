"""The scorers in vLLM's workers, and the driver's checks of vLLM's answers.

Memory is bounded, two ranks score as one does, and no rank waits for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.reference.comparison import StoredRows
from compare_q.backends.reference.store import Reader, begin, seal
from compare_q.backends.scoring import token_statistics
from compare_q.backends.vllm import vllm_scores
from compare_q.backends.vllm.chunks import CPU_ROWS
from compare_q.backends.vllm.hooks import RequestRows, ScoredRows
from compare_q.backends.vllm.logits import ProbedLogits
from compare_q.backends.vllm.probe_scorer import ProbeScorer
from compare_q.backends.vllm.scorer import Scorer
from compare_q.backends.vllm.scoring_plan import ProbePlan, ScoringPlan
from tests.support.definitions import definitions, draw
from tests.support.stores import IDENTITY, KEY, digest, digests, numbers, state_store

LIMIT = 256 << 20
OTHER_HEAD: Any = SimpleNamespace(head=None)
OWN_HEAD: Any = SimpleNamespace(
    head=SimpleNamespace(is_own=True),
    store=SimpleNamespace(head=SimpleNamespace(soft_cap=None, scale=1.0)),
)
"""Comparisons with a reference that has another head, or the model's own head."""


def scorer(
    entries: int,
    /,
    *,
    device: str = "cuda",
    tp_size: int = 1,
    soft_cap: float | None = None,
    **plan: Any,
) -> Scorer:
    """A scorer that has not received a step."""
    processor = SimpleNamespace(soft_cap=soft_cap, scale=1.0, org_vocab_size=entries)
    source: Any = SimpleNamespace(
        processors=[processor], processor=processor, shard=None, reference_windows=None
    )
    return Scorer(source, ScoringPlan(**plan), torch.device(device), entries, tp_size)


@pytest.mark.parametrize(
    "vocab_size", [320, 32_000, 49_152, 128_256, 151_936, 262_144, 1_000_000, 200_000_000]
)
@pytest.mark.parametrize(("comparison", "states"), [(None, 1), (OTHER_HEAD, 2), (OWN_HEAD, 5)])
@pytest.mark.parametrize("hidden_size", [576, 4096, 16384])
def test_a_chunk_stays_under_256_mib(
    vocab_size: int, comparison: Any, states: int, hidden_size: int
) -> None:
    """A chunk has logits of both models, states, and results.

    States are gathered; a reference adds a copy, and one product of both adds two buffers.
    """
    under_test = scorer(vocab_size)
    under_test.comparison = comparison
    rows = under_test.rows_per_chunk(hidden_size, 2)
    models = 1
    if comparison is not None:
        models = 2
    needed = rows * (2 * vocab_size * models + 2 * hidden_size * states + 48)
    # One row of 200,000,000 bf16 logits takes 400 MB: a chunk cannot be smaller than one row.
    assert rows == 1 or needed <= LIMIT
    product = rows
    if comparison is OWN_HEAD:
        product = 2 * rows
    unit = 128
    # On an H200, products of a multiple of 768 rows were fastest in 5 of 6 shapes.
    if product >= 768:
        unit = 768
    assert product < 128 or product % unit == 0
    assert rows == 1 or needed > LIMIT / 4 or rows >= 128


def test_chunks_by_hand() -> None:
    """255 MiB / 264,752 bytes per row = 1,009.

    With a reference, / 529,456 = 505; with one head, / 554,032 = 482.
    """
    assert scorer(128_256).rows_per_chunk(4096, 2) == 768
    against = scorer(128_256)
    for against.comparison in (OTHER_HEAD, OWN_HEAD):
        assert against.rows_per_chunk(4096, 2) == 384
    # 64,128 entries on each of two ranks: 255 MiB / 136,496 bytes = 1,958.  Gathered logits have
    # all 128,256 entries on each rank.
    assert scorer(128_256, tp_size=2).rows_per_chunk(4096, 2) == 1536
    assert scorer(128_256, tp_size=2, gathered=True).rows_per_chunk(4096, 2) == 768
    # Two more copies of the logits: 255 MiB / 777,776 bytes = 343, rounded down to 256.
    assert scorer(128_256, soft_cap=30.0).rows_per_chunk(4096, 2) == 256
    assert scorer(49_152, device="cpu").rows_per_chunk(576, 2) == CPU_ROWS


@pytest.mark.parametrize("keys", [{}, {"device": "cpu"}, {"gathered": True}, {"soft_cap": 30.0}])
def test_when_one_product_gives_both_logits(keys: dict[str, Any]) -> None:
    """One product computes both on a GPU, if the reference's head is the model's own."""
    under_test = scorer(320, **keys)
    for under_test.comparison in (None, OWN_HEAD, OTHER_HEAD):
        assert under_test.shares_reference_head == (not keys and under_test.comparison is OWN_HEAD)


STATES = draw(1000, 40)
REFERENCE = draw(1000, 40, seed=1)
TOKENS = torch.arange(1000) % 40
REQUEST = RequestRows((7, [(2, 1000)]), 0, 0, 1000, 1000, TOKENS)
"""A window of 1,000 tokens, number 7, scored from position 2 on; on a CPU in chunks of 256."""


def tokens(parts: Sequence[ScoredRows]) -> torch.Tensor:
    return torch.cat([part.prompt[part.token : part.token + part.n_rows] for part in parts])


class Small:
    """A model whose logits are its states, on a device that has memory for some rows at a time."""

    processors: tuple[Any, ...] = ()
    processor = shard = reference_windows = None

    def __init__(self, fits: int) -> None:
        self.fits = fits
        self.asked: list[int] = []

    def local(self, hidden: torch.Tensor) -> torch.Tensor:
        self.asked.append(len(hidden))
        if len(hidden) > self.fits:
            raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 1 GiB.")
        return hidden

    gathered = local


def new_scorer() -> Scorer:
    """A scorer of the model whose logits are its states, with memory for the whole window."""
    return Scorer(Small(1000), ScoringPlan(), torch.device("cpu"), 40, 2)  # type: ignore[arg-type]


def stepped(source: Any, **plan: Any) -> Scorer:
    """Return a scorer after one step with the whole window."""
    one = Scorer(source, ScoringPlan(**plan), torch.device("cpu"), 40, 2)
    one.step(STATES, [REQUEST], tokens)
    one.buffers.land()
    return one


@pytest.mark.parametrize(
    ("fits", "rows_of_chunks"),
    [
        # 998 scored rows = 3 x 256 + 230.
        (1000, [256, 256, 256, 230]),
        # The first chunk fails and is cut: 998 = 7 x 128 + 102.
        (255, [256, *[128] * 7, 102]),
        # 256 and 128 rows fail: 998 = 15 x 64 + 38.
        (100, [256, 128, *[64] * 15, 38]),
        (1, [256, 128, 64, 32, 16, 8, 4, 2, *[1] * 998]),
    ],
)
def test_chunks_that_do_not_fit_are_halved(fits: int, rows_of_chunks: list[int]) -> None:
    """Later chunks keep the halved size; the scores are bit-identical."""
    source = Small(fits)
    one = stepped(source)
    at_once = stepped(Small(1000))
    assert (one.error, source.asked) == ("", rows_of_chunks)
    assert one.largest_chunk == max(rows for rows in rows_of_chunks if rows <= fits)
    assert one.buffers.windows[7].landed == 998
    assert one.buffers.windows[7].written.all()
    np.testing.assert_array_equal(
        one.buffers.windows[7].statistics, at_once.buffers.windows[7].statistics
    )


@dataclass
class Event:
    """An event of a GPU that has not happened; waiting for one that ``never`` happens fails."""

    never: bool

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        assert not self.never, "the GPU would compute nothing after this step"


def start(one: Scorer, states: torch.Tensor, request: RequestRows, *, never: bool = False) -> None:
    """Let a GPU start a step, which has not ended yet."""
    one.step(states, [request], tokens)
    landings = one.buffers.landings
    landings[-1] = landings[-1]._replace(event=Event(never=never))


OTHER = REQUEST._replace(tag=(8, [(2, 1000)]))
"""The same window with number 8."""


def test_finished_windows_do_not_wait_for_a_later_step() -> None:
    """The GPU computes the later step while the host handles the windows."""
    one = new_scorer()
    start(one, STATES, REQUEST)
    start(one, STATES, OTHER, never=True)
    header, statistics = one.collect([7])
    assert (header["error"], header["counts"]) == ("", [998])
    assert statistics == stepped(Small(1000)).buffers.windows[7].statistics.tobytes()
    assert list(one.buffers.windows) == []
    # Its own step is waited for.
    header, _ = one.collect([8])
    assert "compute nothing" in header["error"]


def test_a_finished_window_waits_for_all_of_its_steps() -> None:
    """Steps of another window are between them, and its first rows come again (a preemption)."""
    one = new_scorer()
    first_rows = REQUEST._replace(n_rows=500)
    start(one, -STATES, first_rows)
    start(one, STATES, OTHER)
    start(one, STATES, first_rows)
    start(one, STATES, OTHER)
    start(one, STATES[400:], REQUEST._replace(start=400, n_rows=600))
    start(one, STATES, OTHER, never=True)
    header, statistics = one.collect([7])
    assert (header["error"], header["counts"]) == ("", [998])
    assert statistics == stepped(Small(1000)).buffers.windows[7].statistics.tobytes()
    # The rows that came twice, and the last step.
    assert one.buffers.recomputed == 499 + 100
    assert len(one.buffers.landings) == 1


def test_chunks_are_not_halved_beside_other_models() -> None:
    """Alone, there might be memory for whole chunks, whose products may round otherwise."""
    source = Small(255)
    one = stepped(source, may_halve_chunks=False)
    assert source.asked == [256]
    assert "OutOfMemoryError" in one.error


def test_rows_whose_states_are_zero_are_missing_until_they_come() -> None:
    """Missing rows may cross chunks; a step that computes the rows again fixes them.

    NaN does not count as zero.
    """
    states = STATES.clone()
    states[200:300] = 0.0
    states[300] = torch.nan
    one = new_scorer()
    one.step(states, [REQUEST], tokens)
    one.buffers.land()
    # The state of row 200 predicts token 201, which is scored position 199: scoring begins at 2.
    assert one.buffers.windows[7].written.tolist() == [not 199 <= row < 299 for row in range(998)]
    one.step(STATES[200:300], [REQUEST._replace(start=200, n_rows=100)], tokens)
    one.buffers.land()
    buffer = one.buffers.take(7)
    gold = stepped(Small(1000)).buffers.windows[7].statistics
    np.testing.assert_array_equal(np.delete(buffer.statistics, 299, 0), np.delete(gold, 299, 0))
    one.step(states, [REQUEST], tokens)
    one.buffers.land()
    missing = "window 7: vLLM computed no hidden states for 100 of its positions: .* scaled wrongly"
    with pytest.raises(ModelError, match=missing):
        one.buffers.take(7)


def reference_of(first: int, last: int) -> Any:
    """A comparison with a reference whose logits are given, cut to the entries [first, last)."""

    def logits(parts: Sequence[Any]) -> torch.Tensor:
        return torch.cat([REFERENCE[part.begin + 1 : part.end + 1, first:last] for part in parts])

    return SimpleNamespace(head=None, logits=logits)


def test_two_ranks_score_as_one_does() -> None:
    """Each rank scores its slice of the vocabulary; together they give the scores."""
    shards = []
    for first, last in ((0, 25), (25, 40)):
        source: Any = SimpleNamespace(
            processors=[],
            processor=None,
            shard=(first, last),
            reference_windows=None,
            local=lambda hidden, a=first, b=last: hidden[:, a:b],
        )
        rank = Scorer(source, ScoringPlan(), torch.device("cpu"), 40, 2)
        rank.comparison = reference_of(first, last)
        rank.step(STATES, [REQUEST], tokens)
        rank.buffers.land()
        assert rank.error == ""
        shards.append(rank.buffers.windows[7].statistics)
    targets = TOKENS[2:].numpy()
    scores = token_statistics.scores(7, targets, shards)
    for name, values in definitions(STATES[1:-1], targets, REFERENCE[1:-1]).items():
        np.testing.assert_allclose(
            getattr(scores, name), values, atol=1e-5, rtol=1e-6, err_msg=name
        )


class Ranks:
    """Two ranks of one model that gather logits together, in threads.

    ``fails``: the rank with an error in chunk 1.
    """

    def __init__(self, fails: int, error: Exception) -> None:
        self.fails = fails
        self.error = error
        # A rank that waits for ever fails the test instead of blocking it.
        self.barrier = threading.Barrier(2, timeout=30)
        self.gathered: list[list[int]] = [[], []]

    def scorer(self, rank: int) -> Scorer:
        def gathered(hidden: torch.Tensor) -> torch.Tensor:
            self.gathered[rank].append(len(hidden))
            self.barrier.wait()
            return hidden

        def logits(parts: Sequence[Any]) -> torch.Tensor:
            # In the second of four chunks: two more must be computed after the error.
            if rank == self.fails and len(self.gathered[rank]) == 2:
                raise self.error
            return reference.logits(parts)

        reference = reference_of(0, 40)
        source: Any = SimpleNamespace(
            processors=[], processor=None, shard=None, reference_windows=None, gathered=gathered
        )
        scorer = Scorer(source, ScoringPlan(gathered=True), torch.device("cpu"), 40, 2)
        scorer.comparison = SimpleNamespace(head=None, logits=logits)  # type: ignore[assignment]
        return scorer


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "error", [ValueError("no"), torch.OutOfMemoryError("CUDA out of memory.")], ids=str
)
def test_an_error_on_one_rank_leaves_no_other_waiting(rank: int, error: Exception) -> None:
    """A rank without memory does not halve its chunks, because the other rank would not."""
    ranks = Ranks(rank, error)
    scorers = [ranks.scorer(0), ranks.scorer(1)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda scorer: scorer.step(STATES, [REQUEST], tokens), scorers))
    assert [bool(scorer.error) for scorer in scorers] == [rank == 0, rank == 1]
    assert ranks.gathered == [[256, 256, 256, 230]] * 2


class Probed:
    """A model whose logits are its states; its second chunk fails."""

    processors: tuple[Any, ...] = ()
    processor = shard = reference_windows = None

    def __init__(self, error: Exception) -> None:
        self.error = error
        self.chunks: list[int] = []

    def probed(self, states: torch.Tensor) -> ProbedLogits:
        self.chunks.append(len(states))
        if len(self.chunks) == 2:
            raise self.error
        return ProbedLogits(states, 0.0, "no head")


@pytest.mark.parametrize(
    "error", [ValueError("no"), torch.OutOfMemoryError("CUDA out of memory.")], ids=str
)
def test_a_probe_computes_every_chunk_after_an_error(error: Exception) -> None:
    """All ranks compute each chunk together: another rank would wait for ever."""
    source: Any = Probed(error)
    probe = ProbeScorer(source, ProbePlan(), torch.device("cpu"), 40, 2)
    probe.step(STATES, [REQUEST], tokens)
    assert source.chunks == [256, 256, 256, 230]
    assert str(error).removesuffix(".") in probe.error
    assert probe.collect([7]) == (
        {"error": probe.error, "shard": (0, 40), "entries": 40, "counts": []},
        b"",
    )
    assert probe.end()["head_reason"] == "no head"


def test_what_is_collected() -> None:
    """Complete windows are collected; a window with a gap gives the reason.

    A rank without logits returns nothing.
    """
    one = stepped(Small(1000))
    rows = one.buffers.windows[7].statistics
    assert one.collect([7]) == (
        {"error": "", "shard": (0, 40), "entries": 40, "counts": [998]},
        rows.tobytes(),
    )
    # Rows 1 to 499 predict scored tokens: 499 of 998 positions are still missing.
    one.step(STATES, [REQUEST._replace(n_rows=500)], tokens)
    header, data = one.collect([7])
    assert (header["error"], data) == (
        "window 7: vLLM computed no hidden states for 499 of its positions",
        b"",
    )
    silent = Scorer(Small(1000), ScoringPlan(), torch.device("cpu"), 40, 2, reports=False)  # type: ignore[arg-type]
    assert silent.collect([7])[0]["counts"] == []


def test_windows_are_recorded_and_compared_by_their_digests(tmp_path: Path) -> None:
    """The plan names each window's digest: the run that compares has another index for it."""
    store = tmp_path / "store"
    begin(store, IDENTITY)
    recording = {
        "record": str(store),
        "record_key": KEY,
        "record_contents": "logits",
        "record_reason": "a test",
    }
    one = stepped(Small(1000), **recording, gathered=True, windows=((7, digest(3)),))
    one.collect([7])
    assert one.end()["error"] == ""
    seal(store, IDENTITY, [digest(3)])
    assert torch.equal(Reader(store).window(digest(3)), STATES[1:-1])
    source: Any = Small(1000)
    source.reference_head = None
    plan = ScoringPlan(
        gathered=True, reference=str(store), windows=((0, digest(0)), (2, digest(3)))
    )
    other = Scorer(source, plan, torch.device("cpu"), 40, 2)
    other.step(STATES, [REQUEST._replace(tag=(2, [(2, 1000)]))], tokens)
    header, data = other.collect([2])
    assert (header["error"], header["counts"]) == ("", [998])
    other.end()
    shard = np.frombuffer(data, np.float32).reshape(998, -1)
    scores = token_statistics.scores(2, TOKENS[2:].numpy(), [shard])
    assert scores.kld is not None
    assert not scores.kld.any()


def test_windows_that_were_read_ahead_are_used_by_the_next_run(tmp_path: Path) -> None:
    """By a run of these windows; those of another run are read anew."""
    store = state_store(tmp_path / "store", 4)
    source: Any = SimpleNamespace(processors=[], processor=None, shard=None, reference_head=None)
    source.weight = lambda: "none"
    source.reference_windows = None

    def run_of(*windows: int) -> Scorer:
        pairs = tuple(digests(windows).items())
        plan = ScoringPlan(reference=str(store.path), windows=pairs)
        return Scorer(source, plan, torch.device("cpu"), 300, 1)

    warm_up = run_of(0, 1, 2)
    assert warm_up.comparison is not None
    ahead = warm_up.comparison.windows
    warm_up.read_ahead()
    warm_up.end()
    scoring = run_of(0, 1, 2)
    assert scoring.comparison is not None
    assert scoring.comparison.windows is ahead
    assert torch.equal(ahead.get(StoredRows(1, 3, 0, 3)), numbers(3, 4, seed=1))
    scoring.end()
    run_of(0, 1, 2).read_ahead()
    other = run_of(0, 1)
    assert other.comparison is not None
    assert list(other.comparison.windows.windows) == [0, 1]
    other.end()
    # Nothing is kept for a third run.
    assert source.reference_windows is None


class Flat(list[int]):
    """The attributes of vLLM's FlatLogprobs that are read; the list only provides its length."""

    def __init__(self, tokens: list[int], starts: list[int], ends: list[int]) -> None:
        super().__init__(starts)
        self.token_ids = tokens
        self.logprobs = [-1.0, -2.0]
        self.start_indices = starts
        self.end_indices = ends


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        (None, "window 3: vLLM returned log-probabilities for none of 3"),
        (Flat([6], [0, 0], [0, 1]), "for 2 of 3 positions"),
        # Position 2 has no entry, and its start is after the end of the list.
        (Flat([6], [0, 0, 1], [0, 1, 1]), "another token, or none, at position 2"),
        (Flat([6, 8], [0, 0, 1], [0, 1, 2]), "another token, or none, at position 2"),
    ],
)
def test_a_missing_score_is_an_error(flat: Flat | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        vllm_scores.own_logprobs(Window.scored_from(3, np.array([5, 6, 7], np.int32)), flat)


TWELVE = Window.scored_from(0, np.array([4, 5, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15], np.int32))
"""Twelve scored positions, whose second and third prediction follow the same token."""


@pytest.mark.parametrize(
    ("alike", "window", "end"),
    [
        (
            range(2, 10),
            TWELVE,
            11,
        ),  # positions 3 to 10: the last of eleven tokens is predicted by the eighth row
        # Seven equal positions: one fewer than STUCK.
        (range(2, 9), TWELVE, 0),
        # Positions 1 and 2 follow one token, which may repeat its logits.
        (range(0, 8), TWELVE, 0),
        # Equal tokens may have equal logits, however many there are.
        (range(8), Window.scored_from(0, np.full(13, 7, np.int32)), 0),
        # The window has fewer positions than STUCK.
        (range(4), Window.scored_from(0, np.arange(5, dtype=np.int32)), 0),
    ],
)
def test_logits_that_do_not_change_with_the_token(alike: range, window: Window, end: int) -> None:
    """Logits count as repeated only if they repeat in all shards."""
    shard = np.random.default_rng(0).normal(size=(len(window.targets), 5)).astype(np.float32)
    same = shard.copy()
    same[alike, :3] = same[alike.start, :3]
    assert vllm_scores.repetition(window, [same]) == end
    assert vllm_scores.repetition(window, [same, same]) == end
    assert vllm_scores.repetition(window, [same, shard]) == 0
