"""Token scores on disk: one file per group of windows committed together, so that a killed run
loses little.

A folder holds the scores of one model in one engine, alone and compared with any reference, for
windows of any text.  A window is found by its digest (``Window.digest``).  Files are added and
deleted, and never changed (``backends/common/storage.py``):

- segments, ``<tag>.<digest>.safetensors``: the columns of ``TokenScores`` of some windows, joined,
  each float32 [N] or bool [N].  ``tag`` is "alone", or 16 hexadecimal digits of the reference's
  key.  The header has the key (the folder's name), the session that made it, the seconds that its
  windows took, and for each window its digest, its number of scored positions and its recording;
- records, ``record.<session>.json``: metadata of one session, and the key.

A window's **recording** identifies the reference's numbers that it was compared with
(``Reader.recording``).  If the reference has other numbers of this window now, the scores are not
used.  If it no longer has the window, they are.

Files that name another key, or do not name a key, are misplaced or older.  They are ignored and
kept.

This module needs numpy and safetensors, but not torch.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from ..base import TokenScores, Window
from ..common import json_files, storage
from ..common.errors import InputError, ModelError
from ..common.message_text import redacted

TAG = re.compile("alone|[0-9a-f]{16}")
RECORD = re.compile(r"record\.([0-9A-Za-z_-]{1,64})\.json")
ALONE = "alone"
"""Tag of scores without a reference."""
VERSION = 4
"""Version of the segments: 1 also had the windows in the file name; 2 did not name the key of the
scores; 3 (compare_q 0.3) numbered the windows of one text."""
COLUMNS = {
    "logprob": np.float32,
    "entropy": np.float32,
    "top1_logprob": np.float32,
    "top1": np.bool_,
    "ref_logprob": np.float32,
    "ref_top1_logprob": np.float32,
    "kld": np.float32,
    "same_top": np.bool_,
}
"""The fields of ``TokenScores`` and their dtypes."""


MOST_HEADERS = 10_000
"""Number of segments whose headers a process keeps, because a run looks up its scores several
times."""


@dataclass(frozen=True)
class Entry:
    """A window in the header of a segment."""

    window: str  # its digest
    n_scored: int  # number of its scored positions
    recording: (
        str  # of the reference's numbers that it was compared with; empty without a reference
    )


@dataclass(frozen=True)
class Segment:
    """The header of a segment; the columns have the scores of its windows in their order."""

    file: Path
    key: str
    tag: str
    session: str
    seconds: float
    windows: tuple[Entry, ...]

    def windows_for(self, tag: str, recordings: Mapping[str, str]) -> frozenset[str]:
        """Return the digests of the windows whose scores can be used as scores of a tag.

        ``recordings``: of the windows that the reference has now, by the windows' digests.
        """
        if tag == ALONE:
            return frozenset(entry.window for entry in self.windows)
        if tag != self.tag:
            return frozenset()
        return frozenset(
            entry.window
            for entry in self.windows
            if recordings.get(entry.window, entry.recording) == entry.recording
        )


@dataclass(frozen=True)
class Loaded:
    """The scores in a folder."""

    scores: dict[str, TokenScores]  # by the windows' digests
    sessions: dict[str, float]  # seconds that each session took for these scores
    records: dict[str, dict[str, Any]]  # metadata of each session
    used: tuple[Path, ...] = ()  # files that the scores were read from
    damaged: tuple[Path, ...] = ()  # files whose windows count as missing


def commit(
    folder: Path,
    tag: str,
    scored: Sequence[tuple[Window, TokenScores]],
    session: str,
    seconds: float,
    recordings: Mapping[str, str] = MappingProxyType({}),
) -> Path | None:
    """Write the scores of windows that took ``seconds`` together, and return the file; None without
    windows.

    With ``ALONE``, columns that depend on a reference are left out.  ``recordings``: of the
    reference's windows that were compared, by their digests.  ModelError if positions of a window
    have no score, or windows have different columns; InputError if the file cannot be written
    (nothing is left of it).
    """
    if not scored:
        return None
    ordered = sorted(scored, key=lambda pair: pair[0].index)
    columns = joined([(window, asked_for(scores, tag)) for window, scores in ordered])
    entries = []
    for window, _ in ordered:
        entries.append(Entry(window.digest, window.n_scored, recordings.get(window.digest, "")))
    return write_segment(folder, tag, session, seconds, entries, columns)


def write_segment(
    folder: Path,
    tag: str,
    session: str,
    seconds: float,
    entries: Sequence[Entry],
    columns: Mapping[str, NDArray[Any]],
) -> Path:
    """Write a segment with the columns [N] of the windows of ``entries``, and return the file;
    InputError.
    """
    facts = {
        "version": VERSION,
        "key": folder.name,
        "tag": tag,
        "session": session,
        "seconds": seconds,
        "windows": [[entry.window, entry.n_scored, entry.recording] for entry in entries],
    }
    content = safetensors.save(dict(columns), metadata=storage.facts_line(facts))
    with writing(folder):
        return storage.keep(folder, tag, [content])


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Create the folder, and raise errors of a block that writes into it as InputError."""
    with storage.keeping("the scores", folder):
        folder.mkdir(parents=True, exist_ok=True)
        yield


def joined(scored: Sequence[tuple[Window, TokenScores]]) -> dict[str, NDArray[Any]]:
    """Return the joined columns of windows; ModelError: see ``commit``."""
    given = dict[str, list[NDArray[Any]]]()
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


def committed(
    folder: Path, tag: str, recordings: Mapping[str, str] = MappingProxyType({})
) -> frozenset[str]:
    """Return the digests of windows with all columns of a tag, by the segments' headers; ``load``
    checks the content.

    ``recordings``: of the windows that the reference has now, by the windows' digests.
    """
    windows: set[str] = set()
    for segment in segments_in(folder):
        windows |= segment.windows_for(tag, recordings)
    return frozenset(windows)


def recordings(folder: Path, tag: str, windows: Set[str]) -> dict[str, set[str]]:
    """Return which recordings of the reference these windows were compared with under a tag, by
    their digests.
    """
    by_window = defaultdict[str, set[str]](set)
    for segment in segments_in(folder):
        if segment.tag == tag:
            for entry in segment.windows:
                if entry.window in windows:
                    by_window[entry.window].add(entry.recording)
    return by_window


def segments_in(folder: Path) -> list[Segment]:
    """Return the undamaged segments of a folder's own key, by their file names."""
    segments = []
    for file in segment_files(folder):
        segment = segment_in(file)
        if segment is not None and segment.key == folder.name:
            segments.append(segment)
    return segments


def segment_files(folder: Path) -> list[Path]:
    """Return the files of a folder that have the name of a segment, in the order of their names."""
    return [file for file in storage.files_in(folder) if TAG.fullmatch(storage.what_of(file.name))]


def asked_for(scores: TokenScores, tag: str) -> TokenScores:
    """Return the scores with only the columns of a tag: with ``ALONE``, the first line of
    ``COLUMNS``.
    """
    if tag != ALONE:
        return scores
    columns_of_reference: dict[str, Any] = dict.fromkeys(list(COLUMNS)[4:])
    return replace(scores, **columns_of_reference)


def load(
    folder: Path,
    tag: str,
    windows: Sequence[Window],
    recordings: Mapping[str, str] = MappingProxyType({}),
) -> Loaded:
    """Return the scores of these windows in the folder, all checked.

    ``recordings``: of the windows that the reference has now, by the windows' digests.  Other
    columns are left out.  A partly used segment counts its share of the seconds.  If several
    segments have a window, these have priority, in this order:

    - segments of sessions with a record, which states what ran;
    - segments of the tag with most of the windows, so that few sessions are mixed;
    - segments of ``tag``.
    """
    place: dict[str, int] = {}
    for window in windows:
        place.setdefault(window.digest, window.index)
    damaged: list[Path] = []
    usable: list[tuple[Segment, frozenset[str]]] = []  # with the wanted windows of each segment
    covered = defaultdict[str, set[str]](set)
    for file in segment_files(folder):
        segment = segment_in(file)
        if segment is None:
            if tag in (ALONE, storage.what_of(file.name)):
                damaged.append(file)
        elif segment.key == folder.name:
            wanted = segment.windows_for(tag, recordings) & place.keys()
            if wanted:
                usable.append((segment, wanted))
                covered[segment.tag] |= wanted

    recorded = read_records(folder)[0].keys()

    def priority(pair: tuple[Segment, frozenset[str]]) -> tuple[Any, ...]:
        segment, wanted = pair
        first = min(place[window] for window in wanted)
        is_killed = segment.session not in recorded
        return (
            is_killed,
            -len(covered[segment.tag]),
            segment.tag != tag,
            segment.tag,
            first,
            segment.file.name,
        )

    scores: dict[str, TokenScores] = {}
    sessions = defaultdict[str, float](float)
    used = []
    for segment, wanted in sorted(usable, key=priority):
        new = wanted - scores.keys()
        if not new:
            continue
        columns = columns_in(segment)
        if columns is None:
            damaged.append(segment.file)
            continue
        n_new = 0
        for entry, part in parts_of(segment, columns):
            if entry.window in new:
                scores[entry.window] = asked_for(TokenScores(place[entry.window], **part), tag)
                n_new += entry.n_scored
        n_scored = sum(entry.n_scored for entry in segment.windows)
        sessions[segment.session] += segment.seconds * n_new / n_scored
        used.append(segment.file)
    records, damaged_records = read_records(
        folder
    )  # after the segments, since a record precedes its last segment
    return Loaded(scores, dict(sessions), records, tuple(used), (*damaged_records, *damaged))


def columns_in(segment: Segment) -> dict[str, NDArray[Any]] | None:
    """Return the columns [N] of a segment by name; None if it is damaged."""
    try:
        return safetensors.load_file(segment.file) if storage.is_whole(segment.file) else None
    except Exception:  # safetensors has its own error class
        return None


def parts_of(
    segment: Segment, columns: Mapping[str, NDArray[Any]]
) -> Iterator[tuple[Entry, dict[str, NDArray[Any]]]]:
    """Yield each window of a segment with its part of the columns, by name."""
    begin = 0
    for entry in segment.windows:
        end = begin + entry.n_scored
        yield entry, {name: column[begin:end] for name, column in columns.items()}
        begin = end


def segment_in(file: Path) -> Segment | None:
    """Return a segment from its header; None if the header is damaged or does not match the file's
    name.

    A segment of another version has no key, so that it belongs to no folder.
    """
    version = storage.version_of(file)
    if version is None:
        return read_segment(file)
    return segment_of_version(file, version)


@functools.lru_cache(maxsize=MOST_HEADERS)
def segment_of_version(file: Path, _version: tuple[int, int, int]) -> Segment | None:
    """Return ``read_segment`` of a file; the process keeps it as long as the file has this version."""
    return read_segment(file)


def read_segment(file: Path) -> Segment | None:
    """Read a segment's header from its file; see ``segment_in``."""
    with suppress(ValueError, KeyError, TypeError):
        facts = storage.header_of(file)[0]
        if facts["version"] != VERSION:
            return Segment(file, "", "", "", 0.0, ())
        entries = []
        for window, n_scored, recording in facts["windows"]:
            entries.append(Entry(str(window), int(n_scored), str(recording)))
        segment = Segment(
            file,
            str(facts["key"]),
            str(facts["tag"]),
            str(facts["session"]),
            float(facts["seconds"]),
            tuple(entries),
        )
        if segment.tag == storage.what_of(file.name):
            return segment
    return None


def forget(folder: Path, windows: Collection[str]) -> None:
    """Delete the scores of the windows with these digests, damaged files, and records that no
    segment needs now.

    InputError, without deleting, if the folder is a link.
    """
    rewrite(folder, lambda _, entry: entry.window in windows)


def forget_outdated(
    folder: Path, tag: str, windows: Collection[str], recordings: Mapping[str, str]
) -> None:
    """Delete the scores of a tag of these windows that were compared with other numbers than the
    reference has now.

    They are about to be scored again.  Who reads the folder then finds one recording of each
    window.
    """

    def is_outdated(segment: Segment, entry: Entry) -> bool:
        now = recordings.get(entry.window, entry.recording)
        return segment.tag == tag and entry.window in windows and entry.recording != now

    rewrite(folder, is_outdated)


def rewrite(folder: Path, is_forgotten: Callable[[Segment, Entry], bool]) -> None:
    """Delete the scores of some windows, damaged files, and records that no segment needs now.

    Scores of other windows in the same segments are written again before the segments are deleted.
    Files of another key or version are kept.  InputError, without deleting, if the folder is a
    link.
    """
    if folder.is_symlink():
        raise InputError(f"{folder}: is a link; compare_q deletes nothing through links")
    sessions = set()  # those that still have segments
    # those that had some: a session that has only its record is about to commit its first segment
    forgotten = set()
    for file in segment_files(folder):
        segment = segment_in(file)
        if segment is not None and segment.key != folder.name:
            continue
        columns = columns_in(segment) if segment is not None else None
        if segment is None or columns is None:  # damaged
            storage.delete([file])
            continue
        others = [
            (entry, part)
            for entry, part in parts_of(segment, columns)
            if not is_forgotten(segment, entry)
        ]
        if others:
            sessions.add(segment.session)
        if len(others) < len(segment.windows):
            if others:
                write_part(folder, segment, others)
            storage.delete([file])
            forgotten.add(segment.session)
    own_records, damaged = read_records(folder)
    storage.delete(damaged)
    storage.delete(
        folder / f"record.{session}.json" for session in own_records.keys() & (forgotten - sessions)
    )


def write_part(
    folder: Path, segment: Segment, parts: Sequence[tuple[Entry, Mapping[str, NDArray[Any]]]]
) -> None:
    """Write some windows of a segment into a new segment, with their share of its seconds."""
    entries = [entry for entry, _ in parts]
    names = parts[0][1].keys()
    columns = {name: np.concatenate([part[name] for _, part in parts]) for name in names}
    n_scored = sum(entry.n_scored for entry in entries)
    share = n_scored / sum(entry.n_scored for entry in segment.windows)
    write_segment(folder, segment.tag, segment.session, segment.seconds * share, entries, columns)


def write_record(folder: Path, session: str, record: Mapping[str, Any]) -> None:
    """Write the metadata of a session (JSON types), or replace it; InputError if it cannot be
    written.
    """
    with writing(folder):
        content = storage.dump(
            {"session": session, "key": folder.name, "record": redacted(dict(record))}
        )
        storage.write_whole(folder / f"record.{session}.json", content)
        storage.sweep(folder)  # incomplete files of a killed worker


def read_records(folder: Path) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    """Return (session -> its record, files of records that are damaged or of another session)."""
    records, damaged = {}, []
    for file in storage.files_in(folder):
        if named := RECORD.fullmatch(file.name):
            try:
                content = storage.load(json_files.read_bytes(file))
                if content["session"] != named[1]:
                    raise ValueError("it is another session's")
                if content.get("key") == folder.name:
                    records[named[1]] = dict(content["record"])
            except (InputError, ValueError, KeyError, TypeError):
                damaged.append(file)
    return records, damaged


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return session -> its record, without damaged ones."""
    return read_records(folder)[0]


def foreign(folder: Path) -> int:
    """Return the number of segments in a folder that belong to another key, or are of another
    version.
    """
    segments = [segment_in(file) for file in segment_files(folder)]
    return sum(segment is not None and segment.key != folder.name for segment in segments)


def is_older(folder: Path) -> bool:
    """Return True if the first segment of a folder is of an older version."""
    for file in own_segments(folder):
        with suppress(ValueError, KeyError):
            return bool(storage.header_of(file)[0]["version"] < VERSION)
    return False


def own_segments(folder: Path) -> list[Path]:
    """Return the segments of a folder, also damaged ones and those of older versions; empty if it
    is a link.
    """
    return [file for file in own_files(folder) if not RECORD.fullmatch(file.name)]


def own_files(folder: Path) -> list[Path]:
    """Return the segments and records of a folder, including damaged ones; empty if the folder is a
    link.
    """
    if folder.is_symlink():
        return []
    files = storage.files_in(folder)
    return [file for file in files if RECORD.fullmatch(file.name) or storage.what_of(file.name)]
