"""Files of scores: what is read, and one line about each mistake."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import Window
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.jsonl_kinds import kind_of
from compare_q.backends.scores_file import format
from compare_q.backends.scores_file.format import Asked
from compare_q.backends.scoring.rounding import COMPUTED, rounding_of
from tests.support import scores_files

WINDOW = Window.scored_from(0, np.array([5, 3, 4], np.int32))
ASKED = Asked.of(WINDOW.digest, np.array([[3, 8], [4, 9]], np.int32), 1, "f" * 16)
LINE = {
    "window": WINDOW.digest,
    "logprob": [-0.5, -2.5],
    "top_ids": [[3, 7], [7, 8, 4]],
    "top_logprobs": [[-0.5, -1.25], [-0.25, -2.0, -2.5]],
    "asked": ASKED.model_dump(),
    "asked_logprobs": [[-0.5, -3.5], [-2.5, -4.5]],
}
Change = Callable[[dict[str, Any]], None]


def test_a_line_is_read(tmp_path: Path) -> None:
    file = scores_files.write(tmp_path / "s.jsonl", [LINE], label="other engine")
    header = format.read_header(file)
    assert (header.label, header.engine, header.engine_version) == ("other engine", "other", "1.2")
    (scores,) = format.read_scores(file)
    assert (scores.line, scores.window) == (2, WINDOW.digest)
    assert scores.logprob.tolist() == [-0.5, -2.5]
    assert scores.top is not None
    assert scores.top.ids.tolist() == [[3, 7, -1], [7, 8, 4]]
    assert scores.top.logprobs.tolist() == [[-0.5, -1.25, -np.inf], [-0.25, -2.0, -2.5]]
    assert scores.asked is not None
    assert scores.asked.ids.tolist() == [[3, 8], [4, 9]]
    assert (scores.drawn, scores.recording) == (1, "f" * 16)


def test_windows_are_written_with_everything_that_a_script_needs() -> None:
    text = format.Text(
        names=["a"],
        windows=1,
        longest=3,
        scored_tokens=2,
        windows_sha256="0",
        vocabulary_sha256="0",
    )
    first, line = map(json.loads, format.lines_of_windows([WINDOW], text, [ASKED]))
    assert (first["compare_q"], first["version"], first["text"]["longest"]) == ("windows", 1, 3)
    assert line == {
        "window": WINDOW.digest,
        "token_ids": [5, 3, 4],
        "spans": [[1, 3]],
        "asked": ASKED.model_dump(),
    }


def setting(key: str, value: Any) -> Change:
    """Return a change of a line: the key has this value."""

    def change(line: dict[str, Any]) -> None:
        line[key] = value

    return change


def without(key: str) -> Change:
    def change(line: dict[str, Any]) -> None:
        del line[key]

    return change


def improbable(line: dict[str, Any]) -> None:
    """At position 1, entries to which no other token can be added so that the sum is 1."""
    line["logprob"] = [-0.5, -25.0]
    line["top_logprobs"] = [[-0.5, -1.25], [-17.0, -18.0, -19.0]]


def without_entries(line: dict[str, Any]) -> None:
    """Without a first token, the same top would be 0."""
    line["top_ids"] = [[], []]
    line["top_logprobs"] = [[], []]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (setting("logprob", [0.5, -2.5]), "logprob"),
        (setting("logprob", [float("nan"), -2.5]), "logprob"),
        (setting("logprob", [float("-inf"), -2.5]), "logprob"),
        (setting("logprob", [None, -2.5]), "logprob"),
        (setting("logprob", ["-0.5", -2.5]), "logprob"),
        (setting("logprob", [-0.5]), "top_ids"),
        (setting("logprobs", [-0.5, -2.5]), "logprobs"),
        (setting("window", "abc"), "window"),
        (without("window"), "window"),
        (without("logprob"), "logprob"),
        (without("top_ids"), "top_"),
        (without("asked_logprobs"), "asked_"),
        (setting("top_ids", [[3, 3], [7, 8, 4]]), "top_ids"),
        (setting("top_ids", [[3, -7], [7, 8, 4]]), "top_ids"),
        (setting("top_ids", [[3], [7, 8, 4]]), "top_"),
        (setting("top_logprobs", [[-0.5, -0.5], [-0.25, -2.0, -2.5]]), "top_logprobs"),
        (improbable, "top_logprobs: position 1"),
        (without_entries, "top_ids: position 0"),
        (setting("top_logprobs", [[-0.75, -1.25], [-0.25, -2.0, -2.5]]), "top_logprobs"),
        (setting("asked", {**ASKED.model_dump(), "ids": [[3, 8], [4, 8]]}), "asked"),
        (setting("asked", {**ASKED.model_dump(), "recording": "e" * 16}), "asked"),
    ],
)
def test_a_mistake_is_one_line_that_names_file_line_and_key(
    tmp_path: Path, change: Change, part: str
) -> None:
    line = dict(LINE)
    change(line)
    file = scores_files.write(tmp_path / "s.jsonl", [line])
    with pytest.raises(InputError) as caught:
        list(format.read_scores(file))
    text = str(caught.value)
    assert len(text.splitlines()) == 1
    assert text.startswith(f"{file}: line 2: {part}")


@pytest.mark.parametrize(
    "first",
    [
        {"compare_q": "windows", "version": 1, "text": {}},
        {"compare_q": "scores", "version": 2},
        {"compare_q": "scores", "version": 1, "temperature": 0.7},
        {"compare_q": "scores", "version": 1, "labels": "x"},
        {"compare_q": "scores", "version": 1, "label": "  "},
        {"compare_q": "scores", "version": 1, "engine": "\u00a0"},
        {"compare_q": "scores", "version": 1, "model": "a\nb"},
        {"version": 1},
        [1, 2],
    ],
)
def test_another_first_line_is_refused(tmp_path: Path, first: Any) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text(json.dumps(first) + "\n" + json.dumps(LINE) + "\n")
    with pytest.raises(InputError) as caught:
        list(format.read_scores(file))
    assert str(caught.value).startswith(f"{file}: line 1: ")


@pytest.mark.parametrize(
    "content", ["", "\n", '{"compare_q": "scores", "version": 1}\n', "no JSON\n"]
)
def test_a_file_without_windows_is_refused(tmp_path: Path, content: str) -> None:
    file = tmp_path / "s.jsonl"
    file.write_text(content)
    with pytest.raises(InputError) as caught:
        list(format.read_scores(file))
    assert str(caught.value).startswith(str(file))


def test_a_window_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = scores_files.write(tmp_path / "s.jsonl", [LINE, LINE])
    with pytest.raises(InputError, match=r"line 3: window: .* is also in line 2"):
        list(format.read_scores(file))


def test_empty_lines_count_in_the_numbers_of_lines(tmp_path: Path) -> None:
    file = scores_files.write(tmp_path / "s.jsonl", [LINE, LINE])
    file.write_text("\n" + file.read_text().replace("\n", "\n\n"))
    with pytest.raises(InputError, match=r"line 6: window: .* is also in line 4"):
        list(format.read_scores(file))


@pytest.mark.parametrize("number", [1, 3])
def test_broken_json_has_the_line_of_the_file_and_the_column(tmp_path: Path, number: int) -> None:
    file = scores_files.write(tmp_path / "s.jsonl", [LINE, LINE])
    lines = file.read_text().splitlines()
    lines[number - 1] = '{"window": 1,, "logprob": []}'
    file.write_text("\n".join(lines))
    with pytest.raises(InputError) as caught:
        list(format.read_scores(file))
    # The second comma.
    assert str(caught.value).startswith(f"{file}: line {number}, column 14: ")


@pytest.mark.parametrize("keys", [{}, dict.fromkeys(LINE)])
def test_lines_with_different_keys_are_refused(tmp_path: Path, keys: dict[str, Any]) -> None:
    other = {**keys, "window": "0" * 32, "logprob": [-1.0]}
    file = scores_files.write(tmp_path / "s.jsonl", [LINE, other])
    with pytest.raises(InputError, match="line 3: "):
        list(format.read_scores(file))


def test_the_kind_of_a_file_is_in_its_first_line(tmp_path: Path) -> None:
    assert kind_of(scores_files.write(tmp_path / "s.jsonl", [LINE])) == "scores"
    assert kind_of(scores_files.write(tmp_path / "s.txt", [LINE])) == ""
    other = tmp_path / "chat.jsonl"
    other.write_text('{"messages": []}\n')
    assert kind_of(other) == ""
    assert kind_of(tmp_path / "missing.jsonl") == ""
    assert kind_of(tmp_path) == ""


NUMBERS = -np.random.default_rng(0).gamma(2.0, 2.0, 100)


@pytest.mark.parametrize(
    ("values", "absolute", "relative"),
    [
        (NUMBERS.astype(np.float32), 0.0, 2.0**-24),
        (NUMBERS.astype(np.float16), 0.0, 2.0**-11),
        # bfloat16: the first 16 bits of float32.
        ((NUMBERS.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32), 0.0, 2.0**-8),
        (NUMBERS.round(4), 0.5e-4, 2.0**-24),
        (NUMBERS.round(1), 0.05, 2.0**-24),
    ],
)
def test_the_rounding_of_numbers_is_found(values: Any, absolute: float, relative: float) -> None:
    rounding = rounding_of(values.astype(np.float64))
    assert rounding.absolute == pytest.approx(absolute + COMPUTED)
    assert rounding.relative == relative
    # The numbers before they were rounded are in the range.
    errors = rounding.errors(values.astype(np.float64))
    if values.dtype == np.float64 or relative != 2.0**-8:
        assert (np.abs(NUMBERS - values) <= errors).all()
