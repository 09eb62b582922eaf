"""Two files of JSON Lines: windows for another engine, and the scores that its script returns.

**Windows** (``compare-q windows`` writes them).  The first line is
``{"compare_q": "windows", "version": 1, "text": {...}}``; ``text`` describes the windows.  Each
other line is one window:

- ``window``: its digest;
- ``token_ids``: its tokens;
- ``spans``: the scored positions, as ranges [begin, end).  The token at a position is predicted
  from all tokens before it;
- ``asked``: the ids whose log-probabilities are requested at each scored position (``Asked``).
  Only if the reference is known.

**Scores** (an engine's script writes them).  The first line is ``{"compare_q": "scores",
"version": 1, "label": ..., "engine": ..., "engine_version": ..., "text": ...}``; ``text`` is
copied.  Each other line is one window, in any order, with natural logarithms at temperature 1:

- ``window``: the digest, copied;
- ``logprob``: of the token at each scored position;
- ``top_ids``, ``top_logprobs``: the most probable tokens at each scored position, as many as the
  engine gives;
- ``asked``, ``asked_logprobs``: the object, copied, and the log-probabilities of its ids.

All lines of a file have the same keys.  Every fault is an InputError that names file and line.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from ..common.engine_options import describe
from ..common.errors import InputError
from ..common.json_files import LARGEST_JSON_BYTES, open_regular, parsed_line
from ..common.jsonl_kinds import KIND, WINDOWS
from ..common.message_text import is_name, printable
from ..scoring.entries import NO_ID, Entries, Ids, Logprobs
from ..scoring.rounding import Rounding, rounding_of
from ..window import Window

SCORES = "scores"
VERSION = 1
LOGPROB_ERROR = 1e-3
"""Largest excess of a log-probability over 0, or of a sum of probabilities over 1."""
AGREE = 0.01
"""Largest difference, in nats, of two log-probabilities of one token at one position."""
MOST_ENTRIES = 1 << 20
"""Four times the largest vocabulary."""
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Name = Annotated[str, Field(min_length=1, max_length=200)]


def shown(name: str) -> str:
    """Return a name that the table shows; ValueError for one that cannot be read."""
    if not is_name(name):
        raise ValueError("must be one line of printable text")
    return name


ShownName = Annotated[Name, AfterValidator(shown)]


class Line(BaseModel):
    """Base of all lines: strict types, and no unknown keys."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())


class Text(Line):
    """A description of windows, for messages; ``longest``: tokens of the longest one."""

    names: list[Name]
    windows: int
    longest: Annotated[int, Field(ge=2)]
    scored_tokens: int
    windows_sha256: str
    vocabulary_sha256: str


class WindowsHeader(Line):
    """The first line of a file of windows."""

    compare_q: Literal["windows"] = "windows"
    version: int = VERSION
    text: Text


class RowHeader(Line):
    """The keys of the first line of a file that is a row of the table.

    Attributes:
        label: the row's name in the table.
        engine, engine_version: what computed the log-probabilities.
        model: its model.
        hardware: its machine.
    """

    version: int
    label: ShownName | None = None
    engine: ShownName | None = None
    engine_version: ShownName | None = None
    model: ShownName | None = None
    hardware: ShownName | None = None


class ScoresHeader(RowHeader):
    """The first line of a file of scores.

    Attributes:
        temperature: divisor of its logits; only 1 is comparable.
        text: copied from the file of windows.
    """

    compare_q: Literal["scores"]
    temperature: float = 1.0
    text: Text | None = None


class Asked(Line):
    """The ids of one window whose log-probabilities are requested; scripts copy it unchanged.

    Attributes:
        ids: at each scored position.  The first ones are the reference's most probable tokens, the
            last ``drawn`` ones are drawn independently from its other tokens, with its
            probabilities.
        recording: of the reference's numbers of the window (``store.Reader.recording``).
        check: digest of all that, and of the window.
    """

    ids: list[list[int]]
    drawn: int = Field(ge=1)
    recording: str
    check: str

    @classmethod
    def of(cls, window: str, ids: Ids, drawn: int, recording: str) -> Asked:
        """Return the ids [T, m] of a window (digest), with their check."""
        asked = cls(ids=ids.tolist(), drawn=drawn, recording=recording, check="")
        return asked.model_copy(update={"check": asked.digest(window)})

    def digest(self, window: str) -> str:
        """Return the right value of ``check`` for a window (digest)."""
        facts = json.dumps([window, self.ids, self.drawn, self.recording])
        return hashlib.sha256(facts.encode()).hexdigest()[:16]


class WindowLine(Line):
    """One window of a file of windows."""

    window: Digest
    token_ids: list[int]
    spans: list[tuple[int, int]]
    asked: Asked | None = None


class ScoresLine(Line):
    """One window of a file of scores."""

    window: Digest
    logprob: list[float]
    top_ids: list[list[int]] | None = None
    top_logprobs: list[list[float]] | None = None
    asked: Asked | None = None
    asked_logprobs: list[list[float]] | None = None


@dataclass(frozen=True)
class WindowScores:
    """The scores of one window in a file.

    Attributes:
        line: its number in the file, from 1.
        window: its digest.
        logprob: of the targets [T], nats.
        top: the most probable tokens; None without.
        asked: the log-probabilities of the requested ids; None without.
        drawn: number of the last entries of ``asked`` that were drawn from the reference.
        recording: of the reference that they were drawn from.
        rounding: of its log-probabilities.
    """

    line: int
    window: str
    logprob: Logprobs
    top: Entries | None
    asked: Entries | None
    drawn: int
    recording: str
    rounding: Rounding


def lines_of_windows(
    windows: Sequence[Window], text: Text, asked: Iterable[Asked | None]
) -> Iterator[str]:
    """Yield the lines of a file of windows, without line ends; ``asked``: of each window."""
    yield WindowsHeader(text=text).model_dump_json()
    for window, ids in zip(windows, asked, strict=True):
        line = WindowLine(
            window=window.digest,
            token_ids=window.token_ids.tolist(),
            spans=list(window.spans),
            asked=ids,
        )
        yield line.model_dump_json(exclude_none=True)


def read_header(file: Path) -> ScoresHeader:
    """Return the first line of a file of scores; InputError."""
    for _, where, content in lines_in(file):
        return header_in(where, content)
    raise InputError(f"{printable(file)}: is empty; its first line must be an object with {KIND}")


def header_in(where: str, content: bytes) -> ScoresHeader:
    """Return the first line of a file of scores; InputError that begins with ``where``."""
    value = parsed_line(content, where)
    kind = None
    if isinstance(value, dict):
        kind = value.get(KIND)
    if kind == WINDOWS:
        raise InputError(
            f"{where}: {KIND}: the file holds windows that are to be scored; give the file that an "
            "engine's script made of it (docs/other_engines.md)"
        )
    if kind != SCORES:
        raise InputError(
            f'{where}: is not a file of scores: its first line must have "{KIND}": "{SCORES}"; '
            "docs/other_engines.md has scripts that write it"
        )
    check_version(value, where)
    header = validated(ScoresHeader, value, where)
    if header.temperature != 1.0:
        raise InputError(
            f"{where}: temperature: {header.temperature:g}: only log-probabilities at temperature "
            "1 can be compared; score the windows again"
        )
    return header


def check_version(header: Mapping[str, Any], where: str) -> None:
    """InputError that begins with ``where`` for a first line of another version."""
    version = header.get("version")
    if version != VERSION:
        raise InputError(
            f"{where}: version: {version!r}: this compare_q reads {VERSION}; write the file again"
        )


def read_scores(file: Path) -> Iterator[WindowScores]:
    """Yield the checked scores of each window of a file; InputError with file and line."""
    seen: dict[str, int] = {}
    keys: frozenset[str] | None = None
    has_header = False
    for number, where, content in lines_in(file):
        if not has_header:
            header_in(where, content)
            has_header = True
            continue
        line = validated(ScoresLine, parsed_line(content, where), where)
        if line.window in seen:
            raise InputError(
                f"{where}: window: {line.window} is also in line {seen[line.window]}; "
                "keep one of the two"
            )
        seen[line.window] = number
        keys_of_line = keys_with_values(line)
        if keys is None:
            keys = keys_of_line
        elif keys != keys_of_line:
            different = min(keys ^ keys_of_line)
            raise InputError(
                f"{where}: {different}: some lines have it and others do not; write it for all "
                "windows or for none"
            )
        yield checked(line, number, where)
    if not seen:
        raise InputError(f"{printable(file)}: has no window; is the script still running?")


def keys_with_values(line: Line) -> frozenset[str]:
    """Return the keys of a line whose value is not null."""
    keys = set()
    for key in line.model_fields_set:
        if getattr(line, key) is not None:
            keys.add(key)
    return frozenset(keys)


def lines_in(file: Path) -> Iterator[tuple[int, str, bytes]]:
    """Yield (number from 1, file and line in words, content) of each line that is not empty.

    InputError for a line that is too long, or a file that cannot be read.
    """
    with open_regular(file) as stream:
        number = 0
        while True:
            content = stream.readline(LARGEST_JSON_BYTES + 1)
            number += 1
            where = f"{printable(file)}: line {number}"
            if not content:
                return
            if len(content) > LARGEST_JSON_BYTES:
                raise InputError(f"{where}: longer than {LARGEST_JSON_BYTES:,} bytes")
            if content.strip():
                yield number, where, content


Model = TypeVar("Model", bound=Line)


def validated(model: type[Model], value: Any, where: str) -> Model:
    """Return a value as a ``model``; InputError that begins with ``where``."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise InputError(f"{where}: {describe(error, model.model_fields)}") from None


def checked(line: ScoresLine, number: int, where: str) -> WindowScores:
    """Return the scores of a line; InputError for what cannot be log-probabilities."""
    logprob = np.array(line.logprob, np.float64)
    # Several parts of a run have the same arrays (``kept_lines.py``).
    logprob.setflags(write=False)
    n_scored = len(logprob)
    check_at_most_zero(logprob, f"{where}: logprob")
    top = entries_of(line.top_ids, line.top_logprobs, n_scored, f"{where}: top_")
    asked_ids = None
    if line.asked is not None:
        asked_ids = line.asked.ids
    asked = entries_of(asked_ids, line.asked_logprobs, n_scored, f"{where}: asked_")
    drawn = 0
    recording = ""
    all_logprobs = [logprob]
    for entries in (top, asked):
        if entries is not None:
            all_logprobs.append(entries.logprobs.ravel())
    rounding = rounding_of(np.concatenate(all_logprobs))
    if top is not None:
        check_distinct(top.ids, f"{where}: top_ids")
        check_sums(top.logprobs, rounding, f"{where}: top_logprobs")
        check_by_rank(top.logprobs, logprob, f"{where}: top_logprobs")
    if asked is not None and line.asked is not None:
        drawn = line.asked.drawn
        recording = line.asked.recording
        check_asked(line.asked, line.window, where)
        # Drawn ids may be equal.
        known = asked.ids[:, : asked.ids.shape[1] - drawn]
        check_distinct(known, f"{where}: asked.ids")
        check_sums(asked.logprobs[:, : known.shape[1]], rounding, f"{where}: asked_logprobs")
    return WindowScores(
        line=number,
        window=line.window,
        logprob=logprob,
        top=top,
        asked=asked,
        drawn=drawn,
        recording=recording,
        rounding=rounding,
    )


def entries_of(
    ids: Sequence[Sequence[int]] | None,
    logprobs: Sequence[Sequence[float]] | None,
    n_scored: int,
    where: str,
) -> Entries | None:
    """Return ids and log-probabilities of T positions as arrays; InputError for other lengths.

    None without both.  ``where``: file, line and the beginning of the keys' names.
    """
    if ids is None and logprobs is None:
        return None
    if ids is None or logprobs is None:
        raise InputError(f"{where}logprobs: ids and log-probabilities belong together; write both")
    for name, rows in (("ids", ids), ("logprobs", logprobs)):
        if len(rows) != n_scored:
            raise InputError(
                f"{where}{name}: has {len(rows)} positions, and logprob has {n_scored}"
            )
    width = max((len(row) for row in ids), default=0)
    all_ids = np.full((n_scored, width), NO_ID, np.int32)
    all_logprobs = np.full((n_scored, width), -np.inf)
    for position, (row, values) in enumerate(zip(ids, logprobs, strict=True)):
        if len(row) != len(values):
            raise InputError(
                f"{where}logprobs: position {position} has {len(values)} log-probabilities of "
                f"{len(row)} ids"
            )
        if not row:
            raise InputError(
                f"{where}ids: position {position} has no ids; write them at every position, or "
                "leave both keys out"
            )
        if not 0 <= min(row) <= max(row) < MOST_ENTRIES:
            raise InputError(f"{where}ids: position {position}: not the id of a token")
        all_ids[position, : len(row)] = row
        all_logprobs[position, : len(row)] = values
    check_at_most_zero(all_logprobs, f"{where}logprobs")
    all_ids.setflags(write=False)
    all_logprobs.setflags(write=False)
    return Entries(all_ids, all_logprobs)


def check_at_most_zero(logprobs: Logprobs, where: str) -> None:
    """InputError for a log-probability above 0."""
    if logprobs.size and logprobs.max() > LOGPROB_ERROR:
        raise InputError(
            f"{where}: {logprobs.max():.6g} is above 0 and so no log-probability; "
            "write natural logarithms of probabilities"
        )


def check_distinct(ids: Ids, where: str) -> None:
    """InputError if a token appears twice at one position."""
    ordered = np.sort(ids, axis=1)
    is_twice = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] != NO_ID)
    if is_twice.any():
        position, place = np.argwhere(is_twice)[0].tolist()
        raise InputError(
            f"{where}: position {position} has token {ordered[position, place]} twice; "
            "write each token once"
        )


def check_sums(logprobs: Logprobs, rounding: Rounding, where: str) -> None:
    """InputError if probabilities at one position sum to more than 1."""
    sums = np.exp(logprobs - rounding.errors(logprobs)).sum(axis=1)
    if sums.size and sums.max() > 1.0 + LOGPROB_ERROR:
        position = int(sums.argmax())
        raise InputError(
            f"{where}: the probabilities at position {position} sum to {sums[position]:.6g}; "
            "write log-probabilities over the whole vocabulary, at temperature 1"
        )


def check_by_rank(logprobs: Logprobs, target: Logprobs, where: str) -> None:
    """InputError if the most probable tokens [T, k] cannot be that, given the targets' [T].

    A position's target is one of them, or at most as probable as the least probable one.  No token
    is more probable than that, apart from them: with its probability for all others, the sum is at
    least 1.
    """
    if not logprobs.size:
        return
    is_known = np.isfinite(logprobs)
    # vLLM appends the target: the entry before the least probable one is by rank.
    ordered = np.sort(np.where(is_known, logprobs, np.inf), axis=1)
    second_least = ordered[:, min(1, ordered.shape[1] - 1)]
    with np.errstate(invalid="ignore"):
        most_of_all = np.exp(logprobs).sum(axis=1) + MOST_ENTRIES * np.exp(second_least)
    is_too_small = is_known.any(axis=1) & (most_of_all < 1.0 - LOGPROB_ERROR)
    is_too_probable = target > logprobs.max(axis=1) + AGREE
    for problem, is_wrong in (
        ("the entries are too improbable to be the most probable ones", is_too_small),
        ("logprob is larger than every entry", is_too_probable),
    ):
        if is_wrong.any():
            position = int(np.argmax(is_wrong))
            raise InputError(
                f"{where}: position {position}: {problem}; the entries at position p of a window "
                "must be those that predict its token p"
            )


def check_asked(asked: Asked, window: str, where: str) -> None:
    """InputError if the ids differ from the requested ones of this window."""
    if asked.check != asked.digest(window):
        raise InputError(
            f"{where}: asked: is not what the file of windows has for this window; copy the object "
            "unchanged"
        )
    widths = {len(row) for row in asked.ids}
    if len(widths) > 1 or min(widths, default=0) <= asked.drawn:
        raise InputError(f"{where}: asked.ids: every position must have as many ids")
