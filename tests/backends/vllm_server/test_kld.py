"""KL divergence of a server from its most probable tokens, against the closed form of the stub."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.common.errors import ModelError
from compare_q.backends.reference.store import open_reference
from compare_q.backends.reference.stored_logprobs import StoredLogprobs
from compare_q.backends.scoring.entries import Entries
from compare_q.backends.vllm_server.server_engine import VllmServerEngine
from compare_q.backends.vllm_server.server_kld import compared
from tests.support import scores_files
from tests.support.scores_files import Array, exact_kld
from tests.support.toy import toy_windows, with_gaps
from tests.support.vllm_server import (
    VOCAB,
    Stub,
    by_probability,
    choice,
    described,
    gold,
    request_for,
    scores_of,
    weight,
)

REFERENCE = 9
"""Number of the stub's model that is the reference; the server has model 0."""


def distribution(before: int, model: int) -> Array:
    """Return the log-probabilities [VOCAB] after a token."""
    weights = np.array([weight(token, before, model) for token in range(VOCAB)], np.float64)
    return np.asarray(np.log(weights / weights.sum()), np.float64)


ALL = {model: np.stack([distribution(t, model) for t in range(VOCAB)]) for model in (0, REFERENCE)}
"""Model -> log-probabilities [VOCAB, VOCAB] of each token after each token."""


def predictions(window: Window, model: int) -> Array:
    """Return the log-probabilities [T, VOCAB] at the scored positions."""
    return ALL[model][window.token_ids[window.positions - 1]]


def store_of(folder: Path, windows: list[Window], model: int) -> Path:
    logits = [predictions(window, model) for window in windows]
    return scores_files.store_of_logits(folder / "store", windows, logits)


def loaded(stub: Stub) -> VllmServerEngine:
    engine = VllmServerEngine(request_for(stub.url, concurrency=2))
    engine.load()
    return engine


def by_definition(window: Window, top: int) -> Array:
    """Return the bounds [T] in float64, from the most probable tokens and the real one."""
    bounds = []
    p_of_all = predictions(window, REFERENCE)
    q_of_all = predictions(window, 0)
    ids = window.token_ids.tolist()
    for row, position in enumerate(window.positions.tolist()):
        known = sorted({ids[position], *by_probability(ids[position - 1], 0)[:top]})
        p = np.exp(p_of_all[row, known])
        q = np.exp(q_of_all[row, known])
        p_rest = 1 - p.sum()
        of_rest = p_rest * np.log(p_rest / (1 - q.sum()))
        bounds.append((p * np.log(p / q)).sum() + of_rest)
    return np.array(bounds)


@pytest.mark.parametrize("most", [20, 5, 1])
def test_the_most_probable_tokens_bound_the_divergence(
    stub: Stub, tmp_path: Path, most: int
) -> None:
    """Also of a server that allows fewer tokens than requested, which its row notes."""
    windows = [toy_windows(1, 60, 4)[0], *map(with_gaps, toy_windows(3, 60)[1:])]
    stub.most = most
    engine = loaded(stub)
    store = store_of(tmp_path, windows, REFERENCE)
    scores = scores_of(engine, windows, reference=store)
    for window in windows:
        row = scores[window.index]
        assert row.kld_kind == "bound"
        assert row.kld is not None
        assert (row.kld <= exact_kld(predictions(window, REFERENCE), predictions(window, 0))).all()
        # The rounding of float32 is 2e-4 of one of 20 log-probabilities.
        np.testing.assert_allclose(row.kld, by_definition(window, most), atol=2e-3)
    notes = " ".join(engine.provenance()["notes"])
    assert (f"{most} instead of 20" in notes) == (most < 20)


def test_first_tokens_are_those_of_the_whole_distribution(stub: Stub, tmp_path: Path) -> None:
    """Several tokens of the stub are equally probable: the lowest id counts, as in every engine."""
    windows = toy_windows(2, 60)
    scores = scores_of(loaded(stub), windows, reference=store_of(tmp_path, windows, REFERENCE))
    for window in windows:
        row = scores[window.index]
        q = predictions(window, 0)
        p = predictions(window, REFERENCE)
        np.testing.assert_array_equal(row.top1, q.argmax(1) == window.targets)
        np.testing.assert_array_equal(row.same_top, q.argmax(1) == p.argmax(1))
        assert row.top1_logprob is not None
        np.testing.assert_allclose(row.top1_logprob, q.max(1), atol=1e-6)
        assert row.ref_logprob is not None
        of_targets = p[np.arange(window.n_scored), window.targets]
        np.testing.assert_allclose(row.ref_logprob, of_targets, atol=1e-6)


def test_the_bound_of_a_model_and_itself_is_zero(stub: Stub, tmp_path: Path) -> None:
    windows = toy_windows(2, 60)
    scores = scores_of(loaded(stub), windows, reference=store_of(tmp_path, windows, 0))
    for row in scores.values():
        assert row.kld is not None
        assert row.same_top is not None
        assert (row.kld == 0).all()
        assert row.same_top.all()


def sampled_windows(count: int, length: int) -> list[Window]:
    """Windows whose tokens were drawn from the reference, each from the token before it."""
    generator = np.random.default_rng(6)
    p = np.exp(ALL[REFERENCE])
    windows = []
    for index in range(count):
        ids = [int(generator.integers(VOCAB))]
        for _ in range(length - 1):
            ids.append(int(generator.choice(VOCAB, p=p[ids[-1]])))
        logprobs = [gold(token, before, REFERENCE) for before, token in pairwise(ids)]
        window = Window.scored_from(index, np.array(ids, np.int32))
        windows.append(replace(window, sampler_logprobs=np.array(logprobs, np.float32)))
    return windows


def test_on_sampled_text_the_divergence_is_estimated_without_bias(
    stub: Stub, tmp_path: Path
) -> None:
    """The mean over 8,000 tokens lies within its error of the exact KLD of the same tokens.

    With the real token among the most probable ones, most of the KLD would be lost.
    """
    windows = sampled_windows(40, 201)
    scores = scores_of(loaded(stub), windows, reference=store_of(tmp_path, windows, REFERENCE))
    assert {row.kld_kind for row in scores.values()} == {"estimate"}
    differences = []
    exact = []
    for window in windows:
        kld = scores[window.index].kld
        assert kld is not None
        exact.append(exact_kld(predictions(window, REFERENCE), predictions(window, 0)))
        differences.append(kld - exact[-1])
    all_differences = np.concatenate(differences)
    error = all_differences.std(ddof=1) / np.sqrt(len(all_differences))
    assert error < 0.1 * np.concatenate(exact).mean()
    assert abs(all_differences.mean()) < 4 * error


def test_each_window_has_its_own_kind(stub: Stub, tmp_path: Path) -> None:
    """A window's stored scores must not depend on the other windows of the run."""
    windows = [*sampled_windows(1, 50), replace(toy_windows(1, 50)[0], index=1)]
    store = store_of(tmp_path, windows, REFERENCE)
    scores = scores_of(loaded(stub), windows, reference=store)
    assert [scores[0].kld_kind, scores[1].kld_kind] == ["estimate", "bound"]
    (alone,) = scores_of(loaded(stub), windows[:1], reference=store).values()
    np.testing.assert_array_equal(alone.kld, scores[0].kld)


SHARED = 300
"""Number of tokens of a reference that lacks the last ones of the server."""


def small_reference(window: Window) -> Array:
    """Return ln p [T, SHARED] at the scored positions."""
    return scores_files.normalized(predictions(window, REFERENCE)[:, :SHARED])


def with_shared_tokens(windows: list[Window]) -> list[Window]:
    """Return windows of the tokens that both have."""
    changed = []
    for window in windows:
        token_ids = (window.token_ids % SHARED).astype(np.int32)
        changed.append(Window.scored_from(window.index, token_ids))
    return changed


def test_tokens_that_the_reference_lacks_are_a_part_of_the_bound(
    stub: Stub, tmp_path: Path
) -> None:
    """Such as rows that pad the server's head: the row does not fail, and a note has their share.

    The bound is that of all known tokens, and at most the KLD over the reference's tokens.
    """
    windows = with_shared_tokens(toy_windows(3, 60))
    logits = [small_reference(window) for window in windows]
    engine = loaded(stub)
    store = scores_files.store_of_logits(tmp_path / "store", windows, logits)
    scores = scores_of(engine, windows, reference=store)
    outside = []
    for window, p in zip(windows, logits, strict=True):
        row = scores[window.index]
        assert row.kld_kind == "bound"
        assert row.kld is not None
        q = predictions(window, 0)
        assert (row.kld <= exact_kld(p, q[:, :SHARED]) + 1e-6).all()
        expected = []
        for at, position in enumerate(window.positions.tolist()):
            ids = window.token_ids.tolist()
            top = by_probability(ids[position - 1], 0)[:20]
            known = {ids[position], *top}
            shared = [token for token in known if token < SHARED]
            q_known = np.exp(q[at, sorted(known)]).sum()
            p_rest = 1 - np.exp(p[at, shared]).sum()
            of_known = (np.exp(p[at, shared]) * (p[at, shared] - q[at, shared])).sum()
            expected.append(of_known + p_rest * np.log(p_rest / (1 - q_known)))
            outside.append(sum(np.exp(q[at, token]) for token in top if token >= SHARED))
        np.testing.assert_allclose(row.kld, expected, atol=2e-3)
    share = f"{100 * np.mean(outside):.2g} % of its probability"
    assert any(share in note for note in engine.provenance()["notes"])


@pytest.mark.parametrize("top", [1, 20, VOCAB])
def test_the_expectation_of_an_estimate_contains_known_tokens_that_the_reference_lacks(
    tmp_path: Path, top: int
) -> None:
    """Every token of the reference is the target once; each value counts with its probability.

    The expectation is the KLD over the reference's tokens, without the probability of the server's
    other tokens that are not among its most probable ones.
    """
    before = 7
    p = scores_files.normalized(ALL[REFERENCE][[before], :SHARED])[0]
    q = ALL[0][before]
    window = Window.scored_from(0, np.array([before, *range(SHARED)], np.int32))
    window = replace(window, sampler_logprobs=p.astype(np.float32))
    store = scores_files.store_of_logits(tmp_path / "store", [window], [np.tile(p, (SHARED, 1))])
    ids = np.array(by_probability(before, 0)[:top], np.int32)
    entries = Entries(np.tile(ids, (SHARED, 1)), np.tile(q[ids], (SHARED, 1)))
    reference = StoredLogprobs(open_reference(store))
    row = compared(window, q[:SHARED].astype(np.float32), entries, reference)
    assert row.kld_kind == "estimate"
    assert row.kld is not None
    expectation = (np.exp(p) * row.kld).sum()
    unknown = np.exp(q[SHARED:]).sum() - np.exp(q[ids[ids >= SHARED]]).sum()
    exact = exact_kld(p[None], q[None, :SHARED])[0]
    assert expectation == pytest.approx(exact - unknown, abs=1e-6)
    assert (unknown > 0.01) == (top < VOCAB)


def test_targets_that_the_reference_lacks_are_an_error(stub: Stub, tmp_path: Path) -> None:
    ids = np.array([5, 6, SHARED, 7], np.int32)
    window = Window.scored_from(0, ids)
    logits = [small_reference(window)]
    store = scores_files.store_of_logits(tmp_path / "store", [window], logits)
    with pytest.raises(ModelError, match=f"window 0: token {SHARED}"):
        scores_of(loaded(stub), [window], reference=store)


Edit = Callable[[dict[str, Any]], None]


def edited(stub: Stub, edit: Edit) -> None:
    """Change the entries of the fifth position of each answer, in their own dictionary."""

    def edit_answer(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body["prompt_logprobs"]:
            edit(choice(answer)["prompt_logprobs"][5])

    stub.edit = edit_answer


def without_ranks(entry: dict[str, Any]) -> None:
    for token_scores in entry.values():
        del token_scores["rank"]


def same_rank(entry: dict[str, Any]) -> None:
    *_, last = entry.values()
    last["rank"] = 3


def one_more(entry: dict[str, Any]) -> None:
    entry["319"] = {"logprob": -30.0, "rank": 300}
    entry["318"] = {"logprob": -30.0, "rank": 301}


def texts(entry: dict[str, Any]) -> None:
    """Name the last token by its text, as servers do that do not know vLLM's ids."""
    *_, last = entry
    entry["the"] = entry.pop(last)


@pytest.mark.parametrize("edit", [without_ranks, same_rank, one_more, texts])
def test_other_entries_than_the_most_probable_tokens_give_perplexity_only(
    stub: Stub, tmp_path: Path, edit: Edit
) -> None:
    windows = toy_windows(1)
    store = store_of(tmp_path, windows, REFERENCE)
    edited(stub, edit)
    engine = loaded(stub)
    (row,) = scores_of(engine, windows, reference=store).values()
    assert row.kld is None
    ids = windows[0].token_ids.tolist()
    expected = [gold(token, before) for before, token in pairwise(ids)]
    np.testing.assert_allclose(row.logprob, expected, rtol=1e-6)
    assert "at position 5" in engine.provenance()["no_kld"]


def too_probable(entry: dict[str, Any]) -> None:
    for token_scores in entry.values():
        token_scores["logprob"] = -1.0


def beyond_every_vocabulary(entry: dict[str, Any]) -> None:
    *_, last = entry
    entry[str(1 << 20)] = entry.pop(last)


@pytest.mark.parametrize(
    "edit", [without_ranks, same_rank, one_more, texts, too_probable, beyond_every_vocabulary]
)
def test_windows_with_other_entries_fail_in_one_line(
    stub: Stub, tmp_path: Path, edit: Edit
) -> None:
    """A server that changes its answers after the sample."""
    windows = toy_windows(1)
    store = store_of(tmp_path, windows, REFERENCE)
    engine = loaded(stub)
    edited(stub, edit)
    with pytest.raises(ModelError, match="window 0") as caught:
        scores_of(engine, windows, reference=store)
    assert len(str(caught.value).splitlines()) == 1


def test_without_torch_there_is_a_reason_instead_of_a_divergence(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    windows = toy_windows(1)
    store = store_of(tmp_path, windows, REFERENCE)
    engine = loaded(stub)
    monkeypatch.setitem(sys.modules, "torch", None)
    scores: dict[int, TokenScores] = scores_of(engine, windows, reference=store)
    assert scores[0].kld is None
    assert "torch" in engine.provenance()["no_kld"]


def test_another_limit_has_scores_of_its_own(stub: Stub) -> None:
    """The bound depends on the number of tokens: it is a part of the scores' key."""
    first = described(stub)
    stub.most = 5
    assert described(stub).stamp != first.stamp
