"""Token scores on disk: one file per group of windows that are committed together.

A killed run loses only the windows that it has not committed.

A folder holds the scores of one model in one engine, alone and compared with any reference, for
windows of any text.  A window is found by its digest (``Window.digest``).  Files are added and
deleted, and never changed (``backends/common/storage.py``):

- segments, ``<tag>.<digest>.safetensors``: the columns of ``TokenScores`` of some windows, joined,
  each float32 [N] or bool [N].  ``tag`` is "alone", or 16 hexadecimal digits of the reference's
  key.  The header has the key (the folder's name), the session that made it, the seconds that its
  windows took, and for each window its digest, its number of scored positions, its recording and,
  if it is not exact, the kind of its KLD;
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
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from ..base import KldKind, TokenScores, Window
from ..common import json_files, storage
from ..common.errors import InputError, ModelError
from ..common.kept_folder import KeptFolder
from ..common.message_text import redacted

SEGMENT_TAG = re.compile("alone|[0-9a-f]{16}")
RECORD = re.compile(r"record\.([0-9A-Za-z_-]{1,64})\.json")
ANY_VERSION = re.compile(".+")
"""Stems of segments of every version: older ones are deleted with the others, but never read."""
ALONE = "alone"
"""Tag of scores without a reference."""
SEGMENT_VERSION = 4
"""Version of the segments: 1 also had the windows in the file name; 2 did not name the key of the
scores; 3 (compare_q 0.3) numbered the windows of one text."""
KINDS_VERSION = 5
"""Version of segments with a KLD that is not exact.  A compare_q that does not know the kinds
ignores them."""
COLUMNS_ALONE = {
    "logprob": np.float32,
    "entropy": np.float32,
    "top1_logprob": np.float32,
    "top1": np.bool_,
}
COLUMNS_OF_REFERENCE = {
    "ref_logprob": np.float32,
    "ref_top1_logprob": np.float32,
    "kld": np.float32,
    "same_top": np.bool_,
}
SCORE_COLUMNS = {**COLUMNS_ALONE, **COLUMNS_OF_REFERENCE}
"""The fields of ``TokenScores`` and their dtypes."""
MOST_HEADERS = 10_000
"""Number of segments whose headers a process keeps, because a run looks up its scores several
times."""


def scores_folder(path: Path) -> KeptFolder:
    """Return the folder of the scores of one model, to write and delete its files."""
    return KeptFolder(path, "the scores", ANY_VERSION, RECORD, has_manifest=False)


def record_name(session: str) -> str:
    """Return the name of the file with a session's record."""
    return f"record.{session}.json"


@dataclass(frozen=True)
class Entry:
    """A window in the header of a segment."""

    window: str  # its digest
    n_scored: int  # number of its scored positions
    recording: str  # of the reference's numbers in the comparison; empty without a reference
    kld_kind: KldKind = "exact"


@dataclass(frozen=True)
class Segment:
    """The header of a segment; the columns have the scores of its windows in their order."""

    file: Path
    key: str
    tag: str
    session: str
    seconds: float
    windows: tuple[Entry, ...]

    @property
    def n_scored(self) -> int:
        """Number of scored positions of all its windows."""
        return sum(entry.n_scored for entry in self.windows)

    def windows_for(self, tag: str, recordings: Mapping[str, str]) -> frozenset[str]:
        """Return the digests of the windows whose scores can be used as scores of a tag.

        ``recordings``: of the windows that the reference has now, by the windows' digests.
        """
        # Segments of every tag have the columns that need no reference.
        if tag == ALONE:
            return frozenset(entry.window for entry in self.windows)
        if tag != self.tag:
            return frozenset()
        windows = set()
        for entry in self.windows:
            # A window that the reference no longer has counts as unchanged.
            if recordings.get(entry.window, entry.recording) == entry.recording:
                windows.add(entry.window)
        return frozenset(windows)


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
    """Write the scores of windows, and return the file; None without windows.

    ``seconds``: that the windows took together.  ``recordings``: of the reference's windows that
    were compared, by their digests.  With ``ALONE``, columns that depend on a reference are left
    out.  ModelError if positions of a window have no score, or windows have different columns;
    InputError if the file cannot be written (nothing is left of it).
    """
    if not scored:
        return None
    ordered = sorted(scored, key=lambda pair: pair[0].index)
    columns = joined([(window, columns_for(tag, scores)) for window, scores in ordered])
    entries = []
    for window, scores in ordered:
        recording = recordings.get(window.digest, "")
        kind = columns_for(tag, scores).kld_kind
        entries.append(Entry(window.digest, window.n_scored, recording, kind))
    return write_segment(folder, tag, session, seconds, entries, columns)


def write_segment(
    folder: Path,
    tag: str,
    session: str,
    seconds: float,
    entries: Sequence[Entry],
    columns: Mapping[str, NDArray[Any]],
) -> Path:
    """Write a segment with the columns [N] of the windows of ``entries``; return the file.

    InputError if it cannot be written.
    """
    version = SEGMENT_VERSION
    windows: list[list[Any]] = []
    for entry in entries:
        in_header: list[Any] = [entry.window, entry.n_scored, entry.recording]
        if entry.kld_kind != "exact":
            version = KINDS_VERSION
            in_header.append(entry.kld_kind)
        windows.append(in_header)
    facts = {
        "version": version,
        "key": folder.name,
        "tag": tag,
        "session": session,
        "seconds": seconds,
        "windows": windows,
    }
    content = safetensors.save(dict(columns), metadata=storage.facts_line(facts))
    kept_folder = scores_folder(folder)
    kept_folder.create()
    return kept_folder.add(tag, [content])


def joined(scored: Sequence[tuple[Window, TokenScores]]) -> dict[str, NDArray[Any]]:
    """Return the joined columns of windows; ModelError: see ``commit``."""
    parts: dict[str, list[NDArray[Any]]] = {}
    for number, (window, scores) in enumerate(scored):
        columns = present_columns(scores)
        if number == 0:
            parts = {name: [] for name in columns}
        elif columns.keys() != parts.keys():
            names = ", ".join(sorted(columns.keys() ^ parts.keys()))
            raise ModelError(f"window {window.index}: some windows have {names} and others do not")
        for name, column in columns.items():
            if column.shape != (window.n_scored,) or column.dtype != SCORE_COLUMNS[name]:
                raise ModelError(
                    f"window {window.index}: {name}: {len(column)} of {window.n_scored} positions "
                    f"were scored, in {column.dtype}"
                )
            parts[name].append(column)
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def present_columns(scores: TokenScores) -> dict[str, NDArray[Any]]:
    """Return the columns of scores by name, without absent ones."""
    columns = {}
    for name in SCORE_COLUMNS:
        column = getattr(scores, name)
        if column is not None:
            columns[name] = column
    return columns


def columns_for(tag: str, scores: TokenScores) -> TokenScores:
    """Return the scores with only the columns of a tag."""
    if tag != ALONE:
        return scores
    absent: dict[str, Any] = dict.fromkeys(COLUMNS_OF_REFERENCE)
    return replace(scores, **absent, kld_kind="exact")


def committed(
    folder: Path, tag: str, recordings: Mapping[str, str] = MappingProxyType({})
) -> frozenset[str]:
    """Return the digests of windows with all columns of a tag, by the segments' headers.

    ``load`` checks the content.  ``recordings``: of the windows that the reference has now, by the
    windows' digests.
    """
    windows: set[str] = set()
    for segment in segments_in(folder):
        windows |= segment.windows_for(tag, recordings)
    return frozenset(windows)


def recordings(folder: Path, tag: str, windows: Set[str]) -> dict[str, set[str]]:
    """Return the recordings of the reference that these windows were compared with under a tag.

    By the windows' digests; a window without scores of this tag is absent.
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
    for file in scores_folder(folder).tensor_files(SEGMENT_TAG):
        segment = segment_in(file)
        if segment is not None and segment.key == folder.name:
            segments.append(segment)
    return segments


class Usable(NamedTuple):
    """A segment, and its windows that are needed and can be used (digests)."""

    segment: Segment
    windows: frozenset[str]


def load(
    folder: Path,
    tag: str,
    windows: Sequence[Window],
    recordings: Mapping[str, str] = MappingProxyType({}),
) -> Loaded:
    """Return the scores of these windows in the folder, all checked.

    The scores have only the columns of ``tag``.  ``recordings``: of the windows that the reference
    has now, by the windows' digests.  A partly used segment counts its share of the seconds.  If
    several segments have a window, these have priority, in this order:

    - segments of sessions with a record, which states what ran;
    - segments of one tag: the tag whose segments have most of the windows, so that few sessions
      are mixed.  With ``ALONE``, segments that were compared with any reference can be used;
    - segments of ``tag`` itself.
    """
    index_of: dict[str, int] = {}
    for window in windows:
        # Of windows that are equal, the first counts.
        index_of.setdefault(window.digest, window.index)
    usable, damaged = usable_segments(folder, tag, index_of.keys(), recordings)
    scores: dict[str, TokenScores] = {}
    sessions = defaultdict[str, float](float)
    used = []
    for segment, needed in by_priority(usable, folder, tag, index_of):
        new = needed - scores.keys()
        if not new:
            continue
        columns = columns_in(segment)
        if columns is None:
            damaged.append(segment.file)
            continue
        n_new = 0
        for entry, part in parts_of(segment, columns):
            if entry.window in new:
                window_scores = TokenScores(index_of[entry.window], **part, kld_kind=entry.kld_kind)
                scores[entry.window] = columns_for(tag, window_scores)
                n_new += entry.n_scored
        sessions[segment.session] += segment.seconds * n_new / segment.n_scored
        used.append(segment.file)
    # After the segments: a record is written before the last segment of its session.
    records, damaged_records = read_records(folder)
    return Loaded(scores, dict(sessions), records, tuple(used), (*damaged_records, *damaged))


def usable_segments(
    folder: Path, tag: str, windows: Set[str], recordings: Mapping[str, str]
) -> tuple[list[Usable], list[Path]]:
    """Return the segments that have some of the ``windows`` (digests), and the damaged files."""
    usable = []
    damaged = []
    for file in scores_folder(folder).tensor_files(SEGMENT_TAG):
        segment = segment_in(file)
        if segment is None:
            # The scores of other references are not needed now, but those of ``tag`` are.
            if tag in (ALONE, storage.stem_of(file.name)):
                damaged.append(file)
        elif segment.key == folder.name:
            needed = segment.windows_for(tag, recordings) & windows
            if needed:
                usable.append(Usable(segment, needed))
    return usable, damaged


def by_priority(
    usable: Sequence[Usable], folder: Path, tag: str, index_of: Mapping[str, int]
) -> list[Usable]:
    """Return the segments in the order of ``load``; ``index_of``: of a window, by its digest."""
    covered = defaultdict[str, set[str]](set)
    for segment, needed in usable:
        covered[segment.tag] |= needed
    recorded_sessions = records(folder).keys()

    def priority(candidate: Usable) -> tuple[Any, ...]:
        segment, needed = candidate
        return (
            # The record of a session names what ran: a segment without a record comes last.
            segment.session not in recorded_sessions,
            # One tag for as many windows as possible, so that few sessions are mixed.
            -len(covered[segment.tag]),
            segment.tag != tag,
            # The rest only makes the order independent of the file system.
            segment.tag,
            min(index_of[window] for window in needed),
            segment.file.name,
        )

    return sorted(usable, key=priority)


def columns_in(segment: Segment) -> dict[str, NDArray[Any]] | None:
    """Return the columns [N] of a segment by name; None if it is damaged."""
    try:
        if not storage.is_whole(segment.file):
            return None
        columns: dict[str, NDArray[Any]] = safetensors.load_file(segment.file)
        return columns
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
    """Return a segment from its header.

    None if the header is damaged or does not match the file's name.  A segment of another version
    has the key "", so that it belongs to no folder.
    """
    state = storage.file_state(file)
    if state is None:
        return read_segment(file)
    return cached_segment(file, state)


@functools.lru_cache(maxsize=MOST_HEADERS)
def cached_segment(file: Path, _state: tuple[int, int, int]) -> Segment | None:
    """Return ``read_segment`` of a file, which is kept as long as the file has this state."""
    return read_segment(file)


def read_segment(file: Path) -> Segment | None:
    """Read a segment's header from its file; see ``segment_in``."""
    with suppress(ValueError, KeyError, TypeError):
        facts, _ = storage.header_of(file)
        if facts["version"] not in (SEGMENT_VERSION, KINDS_VERSION):
            return Segment(file, "", "", "", 0.0, ())
        entries = []
        for window, n_scored, recording, *kinds in facts["windows"]:
            kind = kind_in(kinds)
            entries.append(Entry(str(window), int(n_scored), str(recording), kind))
        segment = Segment(
            file,
            str(facts["key"]),
            str(facts["tag"]),
            str(facts["session"]),
            float(facts["seconds"]),
            tuple(entries),
        )
        if segment.tag == storage.stem_of(file.name):
            return segment
    return None


def kind_in(words: Sequence[str]) -> KldKind:
    """Return the kind of a window's KLD in a header, which has no word for an exact one.

    ValueError for an unknown word.
    """
    if not words:
        return "exact"
    (word,) = words
    known: tuple[KldKind, ...] = get_args(KldKind)
    for kind in known:
        if word == kind:
            return kind
    raise ValueError(f"{word!r} is not a kind of KLD")


def forget(folder: Path, windows: Collection[str]) -> None:
    """Delete the scores of the windows with these digests.

    Damaged files, and records that no segment needs now, are deleted too.  InputError, without
    deleting, if the folder is a link.
    """

    def is_forgotten(_: Segment, entry: Entry) -> bool:
        return entry.window in windows

    rewrite(folder, is_forgotten)


def forget_outdated(
    folder: Path, tag: str, windows: Collection[str], recordings: Mapping[str, str]
) -> None:
    """Delete a tag's scores of windows that the reference has recorded again.

    These scores were compared with other numbers than ``recordings`` (of the windows that the
    reference has now, by their digests) and are about to be made again.  Readers of the folder then
    find one recording of each window.
    """

    def is_outdated(segment: Segment, entry: Entry) -> bool:
        current = recordings.get(entry.window, entry.recording)
        return segment.tag == tag and entry.window in windows and entry.recording != current

    rewrite(folder, is_outdated)


def rewrite(folder: Path, is_forgotten: Callable[[Segment, Entry], bool]) -> None:
    """Delete the scores of some windows, damaged files, and records that no segment needs now.

    Files of another key or version are kept.  InputError, without deleting, if the folder is a
    link.
    """
    if folder.is_symlink():
        raise InputError(f"{folder}: is a link; compare_q deletes nothing through links")
    kept_folder = scores_folder(folder)
    remaining_sessions = set()
    # Sessions that lost a segment: one that has only its record is about to commit its first.
    cut_sessions = set()
    for file in kept_folder.tensor_files(SEGMENT_TAG):
        segment = segment_in(file)
        if segment is not None and segment.key != folder.name:
            continue
        columns = None
        if segment is not None:
            columns = columns_in(segment)
        if segment is None or columns is None:  # damaged
            storage.delete([file])
            continue
        others = []
        for entry, part in parts_of(segment, columns):
            if not is_forgotten(segment, entry):
                others.append((entry, part))
        if others:
            remaining_sessions.add(segment.session)
        if len(others) < len(segment.windows):
            # Written before the deletion: a kill between the two loses no scores.
            if others:
                write_part(folder, segment, others)
            storage.delete([file])
            cut_sessions.add(segment.session)
    session_records, damaged = read_records(folder)
    storage.delete(damaged)
    unneeded = session_records.keys() & (cut_sessions - remaining_sessions)
    kept_folder.delete(record_name(session) for session in unneeded)


def write_part(
    folder: Path, segment: Segment, parts: Sequence[tuple[Entry, Mapping[str, NDArray[Any]]]]
) -> None:
    """Write some windows of a segment into a new segment, with their share of its seconds."""
    entries = [entry for entry, _ in parts]
    columns = {}
    for name in parts[0][1]:
        columns[name] = np.concatenate([part[name] for _, part in parts])
    share = sum(entry.n_scored for entry in entries) / segment.n_scored
    write_segment(folder, segment.tag, segment.session, segment.seconds * share, entries, columns)


def write_record(folder: Path, session: str, record: Mapping[str, Any]) -> None:
    """Write or replace the metadata of a session (JSON types); InputError if that fails."""
    kept_folder = scores_folder(folder)
    kept_folder.create()
    content = {"session": session, "key": folder.name, "record": redacted(dict(record))}
    with storage.keeping(kept_folder.title, folder):
        kept_folder.write_document(record_name(session), content)
    kept_folder.sweep()


def read_records(folder: Path) -> tuple[dict[str, dict[str, Any]], list[Path]]:
    """Return (session -> its record, files of records that are damaged or of another session)."""
    by_session = {}
    damaged = []
    for file in storage.files_in(folder):
        match = RECORD.fullmatch(file.name)
        if match is None:
            continue
        session = match[1]
        try:
            content = storage.load(json_files.read_bytes(file))
            if content["session"] != session:
                raise ValueError("it is another session's")
            if content.get("key") == folder.name:
                by_session[session] = dict(content["record"])
        except (InputError, ValueError, KeyError, TypeError):
            damaged.append(file)
    return by_session, damaged


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Return session -> its record, without damaged ones."""
    return read_records(folder)[0]


def n_foreign_segments(folder: Path) -> int:
    """Return the number of segments in a folder that have another key or are of another version.

    Damaged segments do not count.
    """
    count = 0
    for file in scores_folder(folder).tensor_files(SEGMENT_TAG):
        segment = segment_in(file)
        # The key of another version is "".
        if segment is not None and segment.key != folder.name:
            count += 1
    return count


def is_older(folder: Path) -> bool:
    """Return True if the first segment of a folder is of an older version."""
    for file in scores_folder(folder).own_tensor_files():
        with suppress(ValueError, KeyError):
            facts, _ = storage.header_of(file)
            return bool(facts["version"] < SEGMENT_VERSION)
    return False
