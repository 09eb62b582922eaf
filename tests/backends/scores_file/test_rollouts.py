"""Files of rollouts: what is read, their row, and one line about each mistake."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import ScoreRequest, TokenScores, Window
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.scores_file.rollouts import longest, read_header, read_rollouts
from compare_q.backends.scores_file.rollouts_engine import RolloutsEngine
from tests.support.rollouts import line_of, write
from tests.support.toy import planned

LINE = line_of([5, 6], [7, 8, 9], [-0.5, None, -2.0])
Change = Callable[[dict[str, Any]], None]


def scored(file: Path, windows: list[Window]) -> list[TokenScores]:
    """Score windows by a file in the engine."""
    engine = RolloutsEngine(planned("m", "rollouts", str(file), 10))
    engine.check(engine.planned)
    engine.load()
    return list(engine.score(windows, ScoreRequest()))


def window_of(token_ids: list[int], *spans: tuple[int, int]) -> Window:
    return Window(0, np.array(token_ids, np.int32), spans)


def test_a_sequence_is_read(tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", [LINE, line_of([1], [2], [0])], engine="e", temperature=0.7)
    first, second = read_rollouts(file)
    assert (first.line, second.line) == (2, 3)
    assert first.token_ids.tolist() == [5, 6, 7, 8, 9]
    np.testing.assert_array_equal(first.logprobs, [np.nan, np.nan, -0.5, np.nan, -2.0])
    assert longest(file) == 5
    header = read_header(file)
    assert (header.engine, header.temperature, header.label) == ("e", 0.7, None)


def test_the_row_has_the_recorded_log_probabilities(tmp_path: Path) -> None:
    file = write(tmp_path / "r.jsonl", [LINE])
    (scores,) = scored(file, [window_of([5, 6, 7, 8, 9], (2, 3), (4, 5))])
    assert scores.logprob.tolist() == [-0.5, -2.0]
    assert scores.kld is None


def test_a_window_may_be_the_beginning_of_a_sequence(tmp_path: Path) -> None:
    """A whole sequence comes before the beginning of a longer one with the same tokens."""
    file = write(tmp_path / "r.jsonl", [LINE, line_of([5], [6, 7], [-3.0, -4.0])])
    (scores,) = scored(file, [window_of([5, 6, 7, 8], (2, 3))])
    assert scores.logprob.tolist() == [-0.5]
    (scores,) = scored(file, [window_of([5, 6, 7], (1, 3))])
    assert scores.logprob.tolist() == [-3.0, -4.0]


@pytest.mark.parametrize(
    "window",
    [
        window_of([5, 6, 7, 8, 1], (2, 3)),
        # The token of this position was not sampled.
        window_of([5, 6, 7, 8, 9], (2, 4)),
    ],
)
def test_other_windows_are_an_error(tmp_path: Path, window: Window) -> None:
    file = write(tmp_path / "r.jsonl", [LINE])
    with pytest.raises(ModelError, match="1 of 1 windows"):
        scored(file, [window])


def test_repeated_sequences_with_other_numbers_are_counted(tmp_path: Path) -> None:
    other = line_of([5, 6], [7, 8, 9], [-0.25, None, -2.0])
    notes = []
    for lines in ([LINE, LINE], [LINE, other, LINE, other]):
        file = write(tmp_path / "r.jsonl", lines)
        engine = RolloutsEngine(planned("m", "rollouts", str(file), 10))
        engine.load()
        notes.append(" ".join(engine.provenance()["notes"]))
    assert "repeat" not in notes[0]
    assert "2 of 4 sequences repeat" in notes[1]


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (lambda line: line.pop("logprobs"), ["logprobs: missing"]),
        (lambda line: line["logprobs"].pop(), ["logprobs", "2 entries", "3"]),
        (lambda line: line.update(logprobs=[-0.5, 0.25, -2.0]), ["logprobs", "0.25", "above 0"]),
        (lambda line: line.update(logprobs=[None] * 3), ["logprobs", "null"]),
        (lambda line: line.update(logprobs=[-0.5, float("nan"), -2.0]), ["logprobs", "nan"]),
        (lambda line: line.update(logprobs=[-0.5, "x", -2.0]), ["logprobs.1", "number"]),
        (lambda line: line.pop("prompt_ids"), ["prompt_ids", "no prompt"]),
        (lambda line: line.update(prompt_ids=[]), ["prompt_ids", "no prompt"]),
        (lambda line: line.pop("sampled_ids"), ["sampled_ids"]),
        (lambda line: line.update(sampled_ids=[], logprobs=[]), ["sampled_ids"]),
        (lambda line: line.update(sampled_ids=[7, -1, 9]), ["sampled_ids", "-1"]),
        (lambda line: line.update(prompt_ids=[1 << 30]), ["prompt_ids", str(1 << 30)]),
        (lambda line: line.update(log_probs=[1]), ["log_probs", "unknown", "logprobs"]),
    ],
)
def test_mistakes_in_a_line_name_it(tmp_path: Path, change: Change, parts: list[str]) -> None:
    line = line_of([5, 6], [7, 8, 9], [-0.5, None, -2.0])
    change(line)
    file = write(tmp_path / "r.jsonl", [LINE, line])
    assert_one_line(file, "line 3", *parts)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("", ["empty"]),
        ('{"compare_q": "rollouts", "version": 1}\n', ["no sequence"]),
        ('{"compare_q": "rollouts", "version": 2}\n', ["line 1", "version"]),
        ('{"compare_q": "rollouts", "version": 1, "top_p": 0.9}\n', ["line 1", "top_p"]),
        ('{"compare_q": "rollouts", "version": 1, "label": "  "}\n', ["line 1: label"]),
        ('{"compare_q": "scores", "version": 1}\n', ["line 1", "rollouts"]),
        ('{"prompt_ids": [1]}\n', ["line 1", "rollouts"]),
        ("[1]\n", ["line 1", "rollouts"]),
    ],
)
def test_mistakes_in_a_file_name_it(tmp_path: Path, content: str, parts: list[str]) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text(content)
    assert_one_line(file, *parts)


def assert_one_line(file: Path, *parts: str) -> None:
    """Assert that reading a file raises one line with its name and all parts."""
    with pytest.raises(InputError) as caught:
        list(read_rollouts(file))
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert text.startswith(str(file))
    for part in parts:
        assert part in text
