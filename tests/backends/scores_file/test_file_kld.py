"""KL divergence by a file, against the KLD of the same two distributions over all tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import ScoreRequest, TokenScores, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.reference.store import Reader
from compare_q.backends.reference.stored_logprobs import StoredLogprobs
from compare_q.backends.scores_file.asked_ids import asked_of, chosen
from compare_q.backends.scores_file.format import Asked
from compare_q.backends.scores_file.scores_file_engine import ScoresFileEngine
from tests.support import scores_files
from tests.support.scores_files import Array, exact_kld, line_of, random_logprobs
from tests.support.toy import planned

VOCAB = 60
LENGTH = 41
ROWS = LENGTH - 1
Case = tuple[Window, Array, Array, Path]


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """A window, the reference's ln p, the model's ln q [40, 60], and the reference store."""
    ids = np.random.default_rng(3).integers(0, VOCAB, LENGTH, dtype=np.int32)
    window = Window.scored_from(0, ids)
    reference = random_logprobs(ROWS, VOCAB, seed=1)
    model = random_logprobs(ROWS, VOCAB, seed=2, spread=0.7, like=reference)
    folder = scores_files.store_of_logits(tmp_path / "store", [window], [reference])
    return window, reference, model, folder


def scored(file: Path, windows: list[Window], reference: Path | None = None) -> list[TokenScores]:
    """Score windows by a file in the engine."""
    engine = ScoresFileEngine(planned("m", "scores_file", str(file), LENGTH))
    engine.check(engine.planned)
    engine.load()
    return list(engine.score(windows, ScoreRequest(reference=reference, vocab_size=VOCAB)))


def scored_line(case: Case, tmp_path: Path, **keys: Any) -> TokenScores:
    """Score the window of a case by a file that ``line_of`` makes with these keys."""
    window, _, model, store = case
    file = scores_files.write(tmp_path / "s.jsonl", [line_of(window, model, **keys)])
    return scored(file, [window], store)[0]


def test_log_probabilities_of_the_targets_are_exact(case: Case, tmp_path: Path) -> None:
    window, _, model, _ = case
    file = scores_files.write(tmp_path / "s.jsonl", [line_of(window, model)])
    (scores,) = scored(file, [window])
    expected = model[np.arange(ROWS), window.targets]
    np.testing.assert_array_equal(scores.logprob, expected.astype(np.float32))
    assert scores.kld is None
    assert scores.top1 is None


def test_targets_alone_give_no_divergence(case: Case, tmp_path: Path) -> None:
    scores = scored_line(case, tmp_path)
    assert scores.kld is None
    assert scores.ref_logprob is None


@pytest.mark.parametrize("top", [1, 5, 20, VOCAB - 1])
@pytest.mark.parametrize("decimals", [None, 3, 1])
def test_top_tokens_bound_the_divergence(
    case: Case, tmp_path: Path, top: int, decimals: int | None
) -> None:
    _, reference, model, _ = case
    scores = scored_line(case, tmp_path, top=top, decimals=decimals)
    assert scores.kld_kind == "bound"
    assert scores.kld is not None
    exact = exact_kld(reference, model)
    assert (scores.kld <= exact + 1e-6).all()
    assert (scores.kld >= 0).all()
    if top >= 20 and decimals is None:
        # With the 20 most probable of 60 tokens, most of the divergence is known.
        assert scores.kld.mean() > 0.9 * exact.mean()


def test_the_bound_of_a_model_and_itself_is_zero(case: Case, tmp_path: Path) -> None:
    window, reference, _, store = case
    # As engines compute them.
    in_float32 = reference.astype(np.float32).astype(np.float64)
    line = line_of(window, in_float32, top=20)
    (scores,) = scored(scores_files.write(tmp_path / "s.jsonl", [line]), [window], store)
    assert scores.kld is not None
    assert scores.kld.max() < 1e-5
    assert scores.same_top is not None
    assert scores.same_top.all()


def test_no_bound_of_a_peaked_model_exceeds_its_divergence(tmp_path: Path) -> None:
    """Almost all probability is known, so that 1 - Q is smaller than the rounding of Q."""
    ids = np.random.default_rng(3).integers(0, VOCAB, LENGTH, dtype=np.int32)
    window = Window.scored_from(0, ids)
    peak = np.zeros((ROWS, VOCAB))
    peak[:, 7] = 14.0
    reference = random_logprobs(ROWS, VOCAB, seed=1, like=peak)
    model = random_logprobs(ROWS, VOCAB, seed=2, spread=0.01, like=reference)
    store = scores_files.store_of_logits(tmp_path / "store", [window], [reference])
    in_float32 = model.astype(np.float32).astype(np.float64)
    # A rounding of float32 in each of the entries.
    up = np.nextafter(in_float32.astype(np.float32), np.float32(np.inf)).astype(np.float64)
    line = line_of(window, np.minimum(up, 0.0), top=3)
    (scores,) = scored(scores_files.write(tmp_path / "s.jsonl", [line]), [window], store)
    assert scores.kld is not None
    assert (scores.kld <= exact_kld(reference, model) + 1e-9).all()


def test_all_tokens_give_the_exact_divergence(case: Case, tmp_path: Path) -> None:
    _, reference, model, _ = case
    scores = scored_line(case, tmp_path, top=VOCAB)
    assert scores.kld_kind == "exact"
    assert scores.kld is not None
    np.testing.assert_allclose(scores.kld, exact_kld(reference, model), atol=2e-6)


def test_first_tokens_are_compared_and_are_those_of_the_whole_distribution(
    case: Case, tmp_path: Path
) -> None:
    window, reference, model, _ = case
    scores = scored_line(case, tmp_path, top=2)
    first = model.argmax(axis=1)
    assert scores.same_top is not None
    assert scores.top1 is not None
    np.testing.assert_array_equal(scores.same_top, first == reference.argmax(axis=1))
    np.testing.assert_array_equal(scores.top1, first == window.targets)
    assert scores.ref_logprob is not None
    expected = reference[np.arange(ROWS), window.targets]
    np.testing.assert_allclose(scores.ref_logprob, expected, atol=1e-6)
    assert scores.ref_top1_logprob is not None
    np.testing.assert_allclose(scores.ref_top1_logprob, reference.max(axis=1), atol=1e-6)


def test_asked_tokens_estimate_the_divergence_without_bias(case: Case, tmp_path: Path) -> None:
    """The mean over 200 draws is the KLD within four of its standard errors."""
    window, reference, model, store = case
    recording = Reader(store).recording(window.digest)
    means = []
    for seed in range(200):
        generator = np.random.default_rng(seed)
        ids = chosen(reference, 5, 4, generator)
        asked = Asked.of(window.digest, ids, 4, recording)
        scores = scored_line(case, tmp_path, asked=asked)
        assert scores.kld_kind == "estimate"
        assert scores.kld is not None
        means.append(scores.kld.astype(np.float64).mean())
    exact = exact_kld(reference, model).mean()
    error = np.std(means, ddof=1) / np.sqrt(len(means))
    assert error < 0.01 * exact
    assert abs(np.mean(means) - exact) < 4 * error


@pytest.mark.parametrize("appends_target", [False, True])
@pytest.mark.parametrize("sampler_spread", [0.0, 0.5])
def test_top_tokens_of_sampled_text_estimate_the_divergence_without_bias(
    tmp_path: Path, appends_target: bool, sampler_spread: float
) -> None:
    """20,000 tokens that were drawn from p, or from another distribution that is known."""
    n_tokens = 20_000
    # One distribution at all positions, so that the mean is that of many draws from it.
    reference = np.repeat(random_logprobs(1, VOCAB, seed=1, spread=1.5), n_tokens, axis=0)
    model = np.repeat(
        random_logprobs(1, VOCAB, seed=2, spread=0.7, like=reference[:1]), n_tokens, axis=0
    )
    sampler = random_logprobs(1, VOCAB, seed=4, spread=sampler_spread, like=reference[:1])[0]
    generator = np.random.default_rng(5)
    ids = generator.choice(VOCAB, n_tokens + 1, p=np.exp(sampler)).astype(np.int32)
    window = Window.scored_from(0, ids)
    window = replace(window, sampler_logprobs=sampler[window.targets].astype(np.float32))
    store = scores_files.store_of_logits(tmp_path / "store", [window], [reference])
    line = line_of(window, model, top=6)
    if appends_target:
        for position, token in enumerate(window.targets.tolist()):
            if token not in line["top_ids"][position]:
                line["top_ids"][position].append(token)
                line["top_logprobs"][position].append(line["logprob"][position])
    file = scores_files.write(tmp_path / "s.jsonl", [line])
    engine = ScoresFileEngine(planned("m", "scores_file", str(file), n_tokens + 1))
    engine.load()
    (scores,) = engine.score([window], ScoreRequest(reference=store, vocab_size=VOCAB))
    assert scores.kld_kind == "estimate"
    assert scores.kld is not None
    exact = exact_kld(reference[:1], model[:1])[0]
    error = scores.kld.std(ddof=1) / np.sqrt(n_tokens)
    assert error < 0.05 * exact
    assert abs(scores.kld.astype(np.float64).mean() - exact) < 4 * error


def test_equally_probable_tokens_do_not_bias_the_estimate(tmp_path: Path) -> None:
    """Logits of few digits, as in bfloat16: the target, which comes first in each list, is as
    probable as other tokens at the end of the list.
    """
    n_tokens = 20_000
    reference = np.repeat(random_logprobs(1, VOCAB, seed=1, spread=1.5), n_tokens, axis=0)
    logits = reference[:1] + np.random.default_rng(2).normal(0.0, 0.7, (1, VOCAB))
    model = np.repeat(scores_files.normalized(logits.round()), n_tokens, axis=0)
    window = sampled_window(reference[0], n_tokens)
    store = scores_files.store_of_logits(tmp_path / "store", [window], [reference])
    line = line_of(window, model, top=6)
    for position, token in enumerate(window.targets.tolist()):
        values = dict(zip(line["top_ids"][position], line["top_logprobs"][position], strict=True))
        values = {token: line["logprob"][position], **values}
        line["top_ids"][position] = list(values)
        line["top_logprobs"][position] = list(values.values())
    file = scores_files.write(tmp_path / "s.jsonl", [line])
    (scores,) = scored(file, [window], store)
    assert scores.kld is not None
    exact = exact_kld(reference[:1], model[:1])[0]
    error = scores.kld.std(ddof=1) / np.sqrt(n_tokens)
    assert error < 0.02 * exact
    assert abs(scores.kld.astype(np.float64).mean() - exact) < 3 * error


def sampled_window(logprobs: Array, n_tokens: int) -> Window:
    """Return a window of tokens that were drawn from ln p [60]."""
    ids = np.random.default_rng(5).choice(VOCAB, n_tokens + 1, p=np.exp(logprobs))
    window = Window.scored_from(0, ids.astype(np.int32))
    return replace(window, sampler_logprobs=logprobs[window.targets].astype(np.float32))


def test_other_windows_of_a_run_do_not_change_the_kind(case: Case, tmp_path: Path) -> None:
    """A run, its replicas and later runs score different windows of one file."""
    natural, reference, model, _ = case
    sampled = replace(sampled_window(reference[0], ROWS), index=1)
    windows = [natural, sampled]
    store = scores_files.store_of_logits(tmp_path / "both", windows, [reference, reference])
    lines = [line_of(window, model, top=5) for window in windows]
    # Here all positions of a window have another number of entries.
    for name in ("top_ids", "top_logprobs"):
        lines[0][name] = [entries[:4] for entries in lines[0][name]]
    file = scores_files.write(tmp_path / "s.jsonl", lines)
    together = scored(file, windows, store)
    assert [scores.kld_kind for scores in together] == ["bound", "estimate"]
    for window, scores in zip(windows, together, strict=True):
        (alone,) = scored(file, [window], store)
        assert alone.kld_kind == scores.kld_kind
        np.testing.assert_array_equal(alone.kld, scores.kld)


def test_asked_tokens_of_another_recording_give_a_bound(case: Case, tmp_path: Path) -> None:
    """The drawn tokens were drawn from other numbers, which would bias the estimate."""
    window, reference, model, _ = case
    asked = Asked.of(window.digest, chosen(reference, 5, 4, np.random.default_rng(0)), 4, "0" * 16)
    scores = scored_line(case, tmp_path, asked=asked)
    assert scores.kld_kind == "bound"
    assert scores.kld is not None
    assert (scores.kld <= exact_kld(reference, model) + 1e-6).all()


def test_asked_tokens_alone_do_not_tell_the_first_token(case: Case, tmp_path: Path) -> None:
    window, _, _, store = case
    asked = asked_of(window, StoredLogprobs(Reader(store)))
    scores = scored_line(case, tmp_path, asked=asked)
    assert scores.kld_kind == "estimate"
    assert scores.same_top is None


SHARED = 50
"""Number of tokens of a reference that lacks the last ones of the model."""


def with_outside_tokens(tmp_path: Path) -> Case:
    """A window of every token of the reference, ln p [50, 50], ln q [50, 60], and the store.

    All positions have the same two distributions.
    """
    window = Window.scored_from(0, np.array([0, *range(SHARED)], np.int32))
    reference = np.tile(random_logprobs(1, SHARED, seed=1), (SHARED, 1))
    logits = np.pad(reference[:1], ((0, 0), (0, VOCAB - SHARED)), constant_values=-3.0)
    model = np.tile(random_logprobs(1, VOCAB, seed=2, spread=0.7, like=logits), (SHARED, 1))
    store = scores_files.store_of_logits(tmp_path / "store", [window], [reference])
    return window, reference, model, store


@pytest.mark.parametrize("top", [5, 55, VOCAB])
def test_tokens_that_the_reference_lacks_are_a_part_of_the_divergence(
    tmp_path: Path, top: int
) -> None:
    """The KLD is over the reference's tokens; it is exact if the file has all of the model's."""
    case = with_outside_tokens(tmp_path)
    _, reference, model, _ = case
    scores = scored_line(case, tmp_path, top=top)
    exact = exact_kld(reference, model[:, :SHARED])
    assert scores.kld is not None
    assert (scores.kld <= exact + 1e-6).all()
    if top == VOCAB:
        assert scores.kld_kind == "exact"
        np.testing.assert_allclose(scores.kld, exact, atol=2e-6)
    else:
        assert scores.kld_kind == "bound"


@pytest.mark.parametrize("top", [0, 12, VOCAB - 1])
def test_the_expectation_by_draws_contains_known_tokens_that_the_reference_lacks(
    tmp_path: Path, top: int
) -> None:
    """Every token of the reference is drawn once; each value counts with its probability."""
    case = with_outside_tokens(tmp_path)
    window, reference, model, store = case
    most_probable = np.argsort(-reference[0])[:5]
    drawn = np.arange(SHARED)
    ids = np.concatenate([np.tile(most_probable, (SHARED, 1)), drawn[:, None]], axis=1)
    recording = Reader(store).recording(window.digest)
    asked = Asked.of(window.digest, ids.astype(np.int32), 1, recording)
    scores = scored_line(case, tmp_path, top=top, asked=asked)
    assert scores.kld_kind == "estimate"
    assert scores.kld is not None
    p = np.exp(reference[0])
    p[most_probable] = 0.0
    expectation = (p / p.sum() * scores.kld).sum()
    q = np.exp(model[0])
    known = np.argsort(-q)[:top]
    unknown = q[SHARED:].sum() - q[known[known >= SHARED]].sum()
    exact = exact_kld(reference[:1], model[:1, :SHARED])[0]
    assert expectation == pytest.approx(exact - unknown, abs=1e-6)
    assert (unknown > 0.01) == (top < VOCAB - 1)


@pytest.mark.parametrize("top", [1, VOCAB])
def test_a_note_has_the_share_of_known_tokens_that_the_reference_lacks(
    tmp_path: Path, top: int
) -> None:
    window, _, model, store = with_outside_tokens(tmp_path)
    file = scores_files.write(tmp_path / "s.jsonl", [line_of(window, model, top=top)])
    engine = ScoresFileEngine(planned("m", "scores_file", str(file), LENGTH))
    engine.load()
    list(engine.score([window], ScoreRequest(reference=store, vocab_size=SHARED)))
    share = 100 * np.exp(model[0, SHARED:]).sum()
    notes = " ".join(engine.provenance()["notes"])
    assert (f"{share:.2g} % of its probability" in notes) == (top == VOCAB)


def test_targets_that_the_reference_lacks_are_an_error(tmp_path: Path) -> None:
    window = Window.scored_from(0, np.array([0, 1, SHARED], np.int32))
    reference = random_logprobs(2, SHARED, seed=1)
    store = scores_files.store_of_logits(tmp_path / "store", [window], [reference])
    case = window, reference, random_logprobs(2, VOCAB, seed=2), store
    with pytest.raises(ModelError, match=f"window 0: token {SHARED}"):
        scored_line(case, tmp_path, top=VOCAB)


def shift_top(line: dict[str, Any]) -> None:
    line["top_ids"] = line["top_ids"][1:] + line["top_ids"][:1]
    line["top_logprobs"] = line["top_logprobs"][1:] + line["top_logprobs"][:1]


def shift_logprob(line: dict[str, Any]) -> None:
    line["logprob"] = line["logprob"][1:] + line["logprob"][:1]


def drop_position(line: dict[str, Any]) -> None:
    for key in ("logprob", "top_ids", "top_logprobs"):
        line[key] = line[key][1:]


def other_value_of_target(line: dict[str, Any]) -> None:
    """Lower the entry of a position's own token, without changing the order much."""
    position, place = place_of_target(line)
    line["top_logprobs"][position][place] -= 0.1


def without_target(line: dict[str, Any]) -> None:
    """Give the entry of a position's own token to another token."""
    position, place = place_of_target(line)
    ids = line["top_ids"][position]
    ids[place] = next(token for token in range(VOCAB) if token not in ids)


def place_of_target(line: dict[str, Any]) -> tuple[int, int]:
    """Return a position whose own token is the second to fourth entry, and its place there."""
    for position, values in enumerate(line["top_logprobs"]):
        for place in (1, 2):
            if values[place] == line["logprob"][position]:
                return position, place
    raise AssertionError("no such position")


@pytest.mark.parametrize(
    "fault",
    [
        shift_top,
        shift_logprob,
        drop_position,
        other_value_of_target,
        without_target,
    ],
)
def test_scores_of_other_positions_or_tokens_are_refused(
    case: Case, tmp_path: Path, fault: Callable[[dict[str, Any]], None]
) -> None:
    window, _, model, store = case
    line = line_of(window, model, top=5)
    fault(line)
    file = scores_files.write(tmp_path / "s.jsonl", [line])
    engine = ScoresFileEngine(planned("m", "scores_file", str(file), LENGTH))
    engine.load()
    with pytest.raises(ModelError) as caught:
        list(engine.score([window], ScoreRequest(reference=store, vocab_size=VOCAB)))
    assert len(str(caught.value).splitlines()) == 1


def test_missing_windows_are_named_before_any_is_scored(case: Case, tmp_path: Path) -> None:
    window, _, model, _ = case
    others = [Window.scored_from(n, np.arange(n, n + 9, dtype=np.int32)) for n in (1, 2)]
    file = scores_files.write(tmp_path / "half.jsonl", [line_of(window, model)])
    with pytest.raises(ModelError, match=r"half\.jsonl: lacks 2 of 3 windows, window 1 "):
        scored(file, [window, *others])
    with pytest.raises(ModelError, match=r"half\.jsonl: has other windows"):
        scored(file, others)


def test_chosen_tokens_are_the_most_probable_and_draws_from_the_others() -> None:
    """Frequencies of 40,000 draws against p without the 2 most probable of 6 tokens."""
    p = np.array([0.4, 0.05, 0.3, 0.15, 0.0, 0.1])
    with np.errstate(divide="ignore"):
        logprobs = np.log(np.tile(p, (10_000, 1)))
    ids = chosen(logprobs, 2, 4, np.random.default_rng(0))
    assert (ids[:, :2] == [0, 2]).all()
    counts = np.bincount(ids[:, 2:].ravel(), minlength=6)
    # sqrt(0.25 / 40,000) = 0.0025.
    np.testing.assert_allclose(counts / 40_000, [0, 1 / 6, 0, 1 / 2, 0, 1 / 3], atol=0.01)
    assert counts[4] == 0


def test_the_same_tokens_are_asked_for_again(case: Case) -> None:
    window, _, _, store = case
    first = asked_of(window, StoredLogprobs(Reader(store)))
    assert first is not None
    assert first == asked_of(window, StoredLogprobs(Reader(store)))
    assert len(first.ids[0]) == 24
