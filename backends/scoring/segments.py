"""Scores on disk, a file for the windows that finished together, so that a killed run loses only what was under way.

A folder holds the scores of one model, text and engine, with whatever it was compared with.  It knows two files
(``backends/common/storage.py``), and nothing is changed in place: segments are only added.

- a segment, ``<tag>.<digest>.safetensors``: the scores of some windows, the columns of ``TokenScores`` one window after
  the other, each float32 [N] or bool [N].  ``tag`` is "alone", or 16 hexadecimal digits of the key of the reference
  that the windows were compared with, and ``DIVERGENCES_SUFFIX`` if the divergences that have to be asked for are
  there.  Its facts say which windows these are, with the digest of each window's tokens, so that no segment serves
  another window, and name the session that made it and the seconds that these windows took;
- a record, ``record.<session>.json``: what is known of one session.

This file needs numpy and safetensors, and no torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.common import json_files, storage
from compare_q.backends.common.errors import InputError, ModelError

DIVERGENCES_SUFFIX = "-more"
"""At the end of the tag of segments that hold the divergences that have to be asked for."""
TAG = re.compile(rf"alone|[0-9a-f]{{16}}(?:{DIVERGENCES_SUFFIX})?")
RECORD = re.compile(r"record\.([0-9A-Za-z_-]{1,64})\.json")
ALONE = "alone"
"""The tag of scores that were compared with nothing."""
VERSION = 2
"""Version of the segments.

1: columns of several windows, and their digests in the metadata.
2: the windows are in the metadata alone, and no more in the name of the file.
"""
COLUMNS = {
    "logprob": np.float32, "entropy": np.float32, "top1_logprob": np.float32, "top1": np.bool_,
    "ref_logprob": np.float32, "ref_top1_logprob": np.float32, "kld": np.float32, "same_top": np.bool_,
    "reverse_kld": np.float32, "js": np.float32, "tv": np.float32, "top5": np.float32,
}  # fmt: skip
"""The fields of ``TokenScores`` and their dtypes."""


@dataclass(frozen=True)
class Segment:
    """What a segment's header says; ``windows``: (index, scored positions, digest of its tokens), in their order."""

    file: Path
    tag: str
    session: str
    seconds: float
    windows: tuple[tuple[int, int, str], ...]

    @property
    def n_scored(self) -> int:
        """Scored positions of all windows."""
        return sum(count for _, count, _ in self.windows)

    @property
    def indices(self) -> frozenset[int]:
        """The windows' numbers."""
        return frozenset(index for index, _, _ in self.windows)


@dataclass(frozen=True)
class Loaded:
    """What a folder has of the wanted windows: ``scores`` by window, ``sessions`` with the seconds that these took.

    ``records``: what is known of each session; ``damaged``: files of ours that are not what they were, whose windows
    count as missing.
    """

    scores: dict[int, TokenScores]
    sessions: dict[str, float]
    records: dict[str, dict[str, Any]]
    damaged: tuple[Path, ...] = ()


def commit(
    folder: Path, tag: str, scored: Sequence[tuple[Window, TokenScores]], session: str, seconds: float
) -> Path | None:
    """Keep the scores of some windows, which took ``seconds`` together; None without any.

    With ``ALONE`` what depends on a reference is left out.  ModelError if a window is not scored throughout, or lacks a
    column that another one has; InputError if the file cannot be written, and then nothing of it is there.
    """
    if not scored:
        return None
    ordered = sorted(scored, key=lambda pair: pair[0].index)
    columns = joined([(window, asked_for(scores, tag)) for window, scores in ordered])
    facts = {
        "version": VERSION, "tag": tag, "session": session, "seconds": seconds,
        "windows": [[window.index, window.n_scored, digest_of(window)] for window, _ in ordered],
    }  # fmt: skip
    with writing(folder):
        return storage.keep(folder, tag, [safetensors.save(columns, metadata=storage.facts_line(facts))])


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """A block that writes into the folder, which is there then; InputError in one line if that fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise InputError(f"{folder}: the scores cannot be kept: {error.strerror}") from None


def joined(scored: Sequence[tuple[Window, TokenScores]]) -> dict[str, NDArray[Any]]:
    """The columns of some windows, one window after the other; ModelError as ``commit`` says it."""
    given: dict[str, list[NDArray[Any]]] = {}
    for number, (window, scores) in enumerate(scored):
        there = {name: column for name in COLUMNS if (column := getattr(scores, name)) is not None}
        if number and there.keys() != given.keys():
            differ = ", ".join(sorted(there.keys() ^ given.keys()))
            raise ModelError(f"window {window.index}: some windows have {differ} and others do not")
        for name, column in there.items():
            if column.shape != (window.n_scored,) or column.dtype != COLUMNS[name]:
                what = f"{name}: {len(column)} of {window.n_scored} positions were scored, in {column.dtype}"
                raise ModelError(f"window {window.index}: {what}")
            given.setdefault(name, []).append(column)
    return {name: np.concatenate(parts) for name, parts in given.items()}


def digest_of(window: Window) -> str:
    """Digest of what a window scores: its tokens, and which of them."""
    tokens = window.token_ids.astype("<i4").tobytes()
    return hashlib.sha256(f"{window.what_is_scored} ".encode() + tokens).hexdigest()[:32]


def committed(folder: Path, tag: str) -> frozenset[int]:
    """Windows that have a segment, by the headers of files alone; ``load`` says whether these are whole.

    Segments of another tag count if they hold what is asked for (``satisfies``).
    """
    segments = (segment_in(file) for file in files_for(folder, tag))
    return frozenset().union(*(segment.indices for segment in segments if segment is not None))


def files_for(folder: Path, tag: str) -> list[Path]:
    """The segments that may hold what is asked for under a tag, by their names."""
    files = [(file, storage.what_of(file.name)) for file in storage.files_in(folder)]
    return [file for file, what in files if TAG.fullmatch(what) and satisfies(what, tag)]


def satisfies(stored_tag: str, wanted_tag: str) -> bool:
    """Whether segments of a stored tag hold all that is asked for under a wanted one.

    What does not depend on a reference is in all of them, and with ``DIVERGENCES_SUFFIX`` there is all that is there
    without it.
    """
    return wanted_tag in (ALONE, stored_tag, stored_tag.removesuffix(DIVERGENCES_SUFFIX))


def asked_for(scores: TokenScores, tag: str) -> TokenScores:
    """Of some scores those that belong under a tag."""
    if tag == ALONE:
        return scores.alone()
    return scores if tag.endswith(DIVERGENCES_SUFFIX) else scores.without_divergences()


def load(folder: Path, tag: str, windows: Sequence[Window]) -> Loaded:
    """The scores of these windows that the folder has, every one of them checked.

    Where segments of several tags hold them, those of the tag that has most of the windows come first, so that few
    sessions are mixed, and of equals those of the tag itself; what was not asked for is left out.  Of a segment that is
    used in part its share of the seconds counts.
    """
    wanted = {window.index: window for window in windows}
    damaged: list[Path] = []
    segments: list[Segment] = []
    for file in files_for(folder, tag):
        segment = segment_in(file)
        if segment is None:
            damaged.append(file)
        elif segment.indices & wanted.keys():
            segments.append(segment)
    covered: dict[str, set[int]] = {}
    for segment in segments:
        covered.setdefault(segment.tag, set()).update(segment.indices & wanted.keys())
    segments.sort(key=lambda each: (-len(covered[each.tag]), each.tag != tag, each.tag, each.windows, each.file.name))
    scores: dict[int, TokenScores] = {}
    sessions: dict[str, float] = {}
    for segment in segments:
        if not segment.indices & (wanted.keys() - scores.keys()):
            continue
        columns = columns_in(segment)
        if columns is None:
            damaged.append(segment.file)
            continue
        new = {index: each for index, each in windows_of(segment, columns, wanted) if index not in scores}
        scores |= {index: asked_for(each, tag) for index, each in new.items()}
        if new:
            share = sum(len(each.logprob) for each in new.values()) / segment.n_scored
            sessions[segment.session] = sessions.get(segment.session, 0.0) + segment.seconds * share
    records, damaged_records = read_records(folder)  # after the segments: a session's last one comes after its record
    return Loaded(scores, sessions, records, (*damaged_records, *damaged))


def windows_of(
    segment: Segment, columns: Mapping[str, NDArray[Any]], wanted: Mapping[int, Window]
) -> Iterator[tuple[int, TokenScores]]:
    """The wanted windows of a segment that are the windows that it was made of."""
    begin = 0
    for index, count, digest in segment.windows:
        window = wanted.get(index)
        if window is not None and window.n_scored == count and digest_of(window) == digest:
            yield index, TokenScores(index, **{name: column[begin : begin + count] for name, column in columns.items()})
        begin += count


def segment_in(file: Path) -> Segment | None:
    """A segment by its header; None if that is damaged, or is not what the file's name says."""
    with suppress(ValueError, KeyError, TypeError):
        facts = storage.header_of(file)[0]
        windows = tuple((int(index), int(count), str(digest)) for index, count, digest in facts["windows"])
        segment = Segment(file, str(facts["tag"]), str(facts["session"]), float(facts["seconds"]), windows)
        if facts["version"] == VERSION and segment.tag == storage.what_of(file.name):
            return segment
    return None


def columns_in(segment: Segment) -> dict[str, NDArray[Any]] | None:
    """The columns [N] of a segment by their names; None if it is damaged."""
    try:
        data = segment.file.read_bytes()
        return safetensors.load(data) if storage.is_content_of(segment.file.name, data) else None
    except Exception:  # safetensors raises its own
        return None


def write_record(folder: Path, session: str, record: Mapping[str, Any]) -> None:
    """Keep what is known of a session (JSON types), in the place of what was kept of it before.

    InputError if it cannot be written.
    """
    with writing(folder):
        content = storage.dump({"session": session, "record": dict(record)})
        storage.write_whole(folder / f"record.{session}.json", content)
        storage.sweep(folder)  # what a killed worker left half-written


def read_records(folder: Path) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    """(session -> its record, the files of records that are damaged, or are another session's)."""
    records, damaged = {}, []
    for file in storage.files_in(folder):
        if named := RECORD.fullmatch(file.name):
            try:
                content = storage.load(json_files.read_bytes(file))
                if content["session"] != named[1]:
                    raise ValueError("it is another session's")
                records[named[1]] = dict(content["record"])
            except (InputError, ValueError, KeyError, TypeError):
                damaged.append(file)
    return records, damaged


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Session -> its record; damaged ones are left out, and are among those that ``load`` calls damaged."""
    return read_records(folder)[0]


def own_files(folder: Path) -> list[Path]:
    """The segments and records of a folder that is no link, whole or not."""
    files = [] if folder.is_symlink() else storage.files_in(folder)
    return [file for file in files if RECORD.fullmatch(file.name) or storage.what_of(file.name)]
