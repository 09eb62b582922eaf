"""Passages and most damaged tokens, from stored scores written by hand; their texts, from a byte tokenizer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.scoring import segments
from compare_q.eval.common.cache import Cache
from compare_q.eval.html import inspector
from compare_q.eval.results.run_result import ModelResult, TextResult
from compare_q.eval.specs.reading import parse_data_spec
from compare_q.eval.text.windows import EvalData
from tests.support.report_page import measured
from tests.support.toy import save_toy_tokenizer

LENGTH, STRIDE, COUNT = 1025, 512, 4
TEXT = "".join(f"{i:04x} Ünï " for i in range(400)).encode()
POSITIONS = np.tile(np.arange(1, LENGTH, dtype=np.int32), COUNT)
WINDOWS = np.repeat(np.arange(COUNT, dtype=np.int32), LENGTH - 1)
INDEX = WINDOWS * STRIDE + POSITIONS
REFERENCE = {"label": "base"}
TAG = "0123456789abcdef"


@pytest.fixture
def data(tmp_path: Path) -> EvalData:
    save_toy_tokenizer(tmp_path)
    tokenizer = inspector.vocabulary.load_tokenizer(tmp_path, trust_remote_code=False)
    ids = np.asarray(tokenizer(TEXT.decode())["input_ids"], np.int32)
    starts = tuple(window * STRIDE for window in range(COUNT))
    windows = tuple(Window.scored_from(i, ids[start : start + LENGTH], 1) for i, start in enumerate(starts))
    spec = parse_data_spec(
        {"tokenizer_dir": "t", "dataset": "text", "path": "a", "eval_len": 9, "eval_stride": 9}, tmp_path
    )
    return EvalData(spec, windows, len(ids), 256, "", "", "", tmp_path, starts, len(windows), None)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache")


def keep(cache: Cache, data: EvalData, label: str, **columns: np.ndarray) -> ModelResult:
    """A model whose scores are in the cache: logprob -1 where nothing else is said."""
    named = {"logprob": np.full(len(INDEX), -1, np.float32), **columns}
    scored = [
        (window, TokenScores(window.index, **{name: each[window.index == WINDOWS] for name, each in named.items()}))
        for window in data.windows
    ]
    folder = cache.path("scores", label, "")
    segments.commit(folder, TAG, scored, "s", 1.0)
    segments.write_record(folder, "s", {"known": {}, "provenance": {}, "load_seconds": 0, "reference": None})
    return ModelResult(label, "fake", scores_key=f"{label}/{TAG}")


def compared(cache: Cache, data: EvalData, label: str, damaged: dict[int, float], size: float = 0.01) -> ModelResult:
    """A model whose KLD is ``size``, but ``damaged`` at some places of the text, wherever they are scored."""
    kld = np.full(len(INDEX), size, np.float32)
    for place, value in damaged.items():
        kld[place == INDEX] = value
    ref = np.full(len(INDEX), -0.5, np.float32)
    return keep(cache, data, label, kld=kld, ref_logprob=ref)


def text_of(*models: ModelResult, reference: dict[str, str] | None = REFERENCE) -> TextResult:
    return TextResult("text", models=models, reference=reference)


def test_most_damaged_tokens_come_once_with_their_surroundings(data: EvalData, cache: Cache) -> None:
    """Place 600 is scored in two windows; the first has most of the text before it."""
    model = compared(cache, data, "a", {600: 2.0, 700: 3.0, 5: 1.0})
    found = inspector.inspect_tokens(text_of(model), data, cache)
    worst = found.worst[0]
    assert [(each.window, each.position, each.kld) for each in worst[:3]] == [(0, 700, 3.0), (0, 600, 2.0), (0, 5, 1.0)]
    assert len(worst) == inspector.WORST
    first = worst[0]
    assert (first.logprob, first.ref_logprob) == (-1.0, -0.5)
    expected = TEXT[700 - inspector.BEFORE : 701 + inspector.AFTER]
    assert (first.before + first.token + first.after).encode()[-12:] == expected[-12:]
    assert first.token.encode() == TEXT[700:701]
    assert worst[2].before.encode() == TEXT[:5]


def test_passages_are_where_models_differ_beyond_noise_in_each_part_of_the_text(data: EvalData, cache: Cache) -> None:
    """A part is 640 tokens.  The broken model's KLD is a thousand times the other's: each counts by its own mean."""
    noisy = compared(cache, data, "noisy", {800: 50.0})
    floor = replace(measured("noisy", 0.01), spec={"noise_floor": True}, scores_key=noisy.scores_key)
    fine = compared(cache, data, "fine", {100: 1.0, 800: 50.01, 1200: 5.0}, size=0.01)
    broken = compared(cache, data, "broken", {800: 60.0, 2300: 5000.0}, size=10.0)
    found = inspector.inspect_tokens(text_of(fine, floor, broken), data, cache)
    places = [each.window * STRIDE + each.position for each in found.passages]
    assert [each.start for each in found.passages] == places
    assert [(place - 1) // 640 for place in places] == [0, 1, 2, 3] == list(range(inspector.PASSAGES))
    assert [each.chosen for each in found.passages] == [inspector.CHOSEN.format(part=i, parts=4) for i in (1, 2, 3, 4)]
    covered = [range(place, place + inspector.PASSAGE) for place in places]
    assert [at in covered[part] for at, part in ((100, 0), (1200, 1), (800, 1), (2300, 3))] == [True, True, False, True]
    assert all(abs(a - b) >= inspector.PASSAGE for i, a in enumerate(places) for b in places[:i])
    kld = found.passages[1].kld[0]
    assert kld[1200 - places[1]] == 5.0
    assert kld.count(0.01) == inspector.PASSAGE - 1
    assert found.passages[1].ref_logprob == (-0.5,) * inspector.PASSAGE


def test_texts_of_a_passage_are_those_of_the_text(data: EvalData, cache: Cache) -> None:
    """Letters of two bytes are two tokens: the first adds nothing, the second the letter."""
    found = inspector.inspect_tokens(text_of(compared(cache, data, "a", {})), data, cache)
    passage = found.passages[0]
    assert len(passage.tokens) == inspector.PASSAGE
    begin = passage.position  # the first at which no token is guessed
    assert inspector.CONTEXT <= begin < inspector.CONTEXT + inspector.STEP
    assert "".join(passage.tokens) == TEXT[begin : begin + inspector.PASSAGE].decode(errors="ignore")
    at = TEXT.index("Ü".encode(), begin) - begin
    assert passage.tokens[at : at + 2] == ("", "Ü")


def test_scores_stand_at_their_tokens_where_only_ranges_are_scored(data: EvalData, cache: Cache) -> None:
    """As in a conversation: of every hundred positions the first forty are scored, by their number in the window."""
    spans = tuple((begin, begin + 40) for begin in range(100, 1000, 100))
    data = replace(data, windows=tuple(replace(each, spans=spans) for each in data.windows))
    folder = cache.path("scores", "a", "")
    scored = [(each, TokenScores(each.index, -each.positions.astype(np.float32))) for each in data.windows]
    segments.commit(folder, TAG, scored, "s", 1.0)
    segments.write_record(folder, "s", {"known": {}, "provenance": {}, "load_seconds": 0, "reference": None})
    model = ModelResult("a", "fake", scores_key=f"a/{TAG}")
    found = inspector.inspect_tokens(text_of(model, reference=None), data, cache)
    for passage in found.passages:
        (logprob,) = passage.logprob
        assert inspector.PASSAGE - 60 <= len(logprob) == len(passage.tokens) <= inspector.PASSAGE
        at = range(passage.position, passage.position + len(logprob))
        assert list(logprob) == [-each if each % 100 < 40 else None for each in at]
        begin = STRIDE * passage.window
        shown = TEXT[begin + at[0] : begin + at[-1] + 1].decode(errors="ignore")  # without half a letter at its ends
        assert "".join(passage.tokens).endswith(shown)


def test_without_a_reference_the_loss_counts(data: EvalData, cache: Cache) -> None:
    logprob = np.full(len(INDEX), -1, np.float32)
    logprob[INDEX == 1500] = -12.3456
    found = inspector.inspect_tokens(text_of(keep(cache, data, "a", logprob=logprob), reference=None), data, cache)
    worst = found.worst[0]
    assert (worst[0].window, worst[0].position, worst[0].logprob, worst[0].kld) == (1, 988, -12.3, None)
    assert [(each.ref_logprob, each.kld) for each in found.passages] == [(None, (None,))] * inspector.PASSAGES


def test_the_reference_gives_its_own_scores_and_chooses_nothing(data: EvalData, cache: Cache) -> None:
    loss = np.full(len(INDEX), -1, np.float32)
    loss[INDEX == 1500] = -1e6
    reference = replace(keep(cache, data, "base", logprob=loss), is_reference=True)
    model = compared(cache, data, "a", {1800: 9.0})
    found = inspector.inspect_tokens(text_of(reference, model), data, cache)
    assert found.passages[0].ref_logprob == (-1.0,) * inspector.PASSAGE
    places = [each.window * STRIDE + each.position for each in found.passages]
    assert not any(place <= 1500 < place + inspector.PASSAGE for place in places)


def test_what_is_not_finite_is_none_and_never_the_worst(data: EvalData, cache: Cache) -> None:
    model = compared(cache, data, "a", {100: np.inf, 101: np.nan, 102: 1.0})
    found = inspector.inspect_tokens(text_of(model), data, cache)
    worst, kld = found.worst[0], found.passages[0].kld[0]
    begin = 100 - found.passages[0].position
    assert (worst[0].position, kld[begin : begin + 3]) == (102, (None, None, 1.0))


def test_models_without_scores(data: EvalData, cache: Cache) -> None:
    failed = ModelResult("broken", "fake", error="told to fail", scores_key=f"a/{TAG}")
    model = compared(cache, data, "a", {})
    found = inspector.inspect_tokens(text_of(failed, model), data, cache)
    assert found.worst[0] is None
    assert found.passages[0].kld[0] is None
    assert found.passages[0].kld[1] is not None
    assert inspector.inspect_tokens(text_of(failed, ModelResult("x", "fake")), data, cache) is None


def test_passages_of_short_or_overlapping_windows() -> None:
    """The second window begins 100 tokens after the first, so that its passages hold the same text."""
    index, total = np.concatenate((np.arange(512), np.arange(100, 612))), np.zeros(1024)
    total[index == 300] = 1
    found = inspector.choose_passages(total, index, np.repeat([0, 1], 512))
    assert found == {0: 64, 2: 736}  # the text from 64 and from 324 on
    window = np.repeat(np.arange(3), 10)
    assert inspector.choose_passages(np.arange(30.0), np.arange(30) * 300, window) == {0: 0, 1: 10, 2: 20}


@pytest.mark.parametrize(
    ("floor", "steps", "noise"),
    [
        ([], [10.0, 15.0, 18.0, 19.0, 19.0], 0.0),
        ([0.0] * 20, [10.0, 15.0, 18.0, 19.0, 19.0], 0.0),
        ([16.0] * 20, [None] * 5, 16.0),
        ([-1.0] * 19 + [None], [10.0, 15.0, 18.0, 19.0, 19.0], 1.0),
    ],
)
def test_tokens_are_coloured_by_quantiles(floor: list[float | None], steps: list[float | None], noise: float) -> None:
    """Of their values above the noise floor's; what 99 % of its own stay below has no colour."""
    found = inspector.colours_of([float(i) for i in range(20)], floor)
    assert (found["steps"], found["noise"], found["above"]) == (steps, noise, bool(floor))
    assert inspector.colours_of([None, None], [])["steps"] == []
