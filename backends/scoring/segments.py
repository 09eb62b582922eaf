"""Token scores on disk: one file per group of windows committed together, so that a killed run loses little.

A folder holds the scores of one model, text and engine, alone and compared with any reference.  Its files are never
changed, only added (``backends/common/storage.py``):

- segments, ``<tag>.<digest>.safetensors``: the columns of ``TokenScores`` of some windows, joined, each float32 [N] or
  bool [N].  ``tag`` is "alone", or 16 hexadecimal digits of the reference's key.  The header has the key (the folder's
  name), the windows, with a digest of each window's tokens, the session that made it, and the seconds that these
  windows took;
- records, ``record.<session>.json``: metadata of one session, and the key.

Files that name another key, or do not name a key, are misplaced or older.  They are ignored and kept.

This module needs numpy and safetensors, but not torch.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from compare_q.backends.base import TokenScores, Window
from compare_q.backends.common import json_files, storage
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.messages import redacted

TAG = re.compile("alone|[0-9a-f]{16}")
RECORD = re.compile(r"record\.([0-9A-Za-z_-]{1,64})\.json")
ALONE = "alone"
"""Tag of scores without a reference."""
VERSION = 3
"""Version of the segments: 1 also had the windows in the file name; 2 did not name the key of the scores."""
COLUMNS = {
    "logprob": np.float32, "entropy": np.float32, "top1_logprob": np.float32, "top1": np.bool_,
    "ref_logprob": np.float32, "ref_top1_logprob": np.float32, "kld": np.float32, "same_top": np.bool_,
}  # fmt: skip
"""The fields of ``TokenScores`` and their dtypes."""


@dataclass(frozen=True)
class Segment:
    """The header of a segment."""

    file: Path
    key: str
    tag: str
    session: str
    seconds: float
    windows: tuple[tuple[int, int, str], ...]  # (index, number of scored positions, digest of the tokens), in order

    @property
    def indices(self) -> frozenset[int]:
        """Indices of the windows."""
        return frozenset(index for index, _, _ in self.windows)


@dataclass(frozen=True)
class Loaded:
    """The scores in a folder."""

    scores: dict[int, TokenScores]  # by window
    sessions: dict[str, float]  # seconds that each session took for these scores
    records: dict[str, dict[str, Any]]  # metadata of each session
    damaged: tuple[Path, ...] = ()  # files whose windows count as missing


def commit(
    folder: Path, tag: str, scored: Sequence[tuple[Window, TokenScores]], session: str, seconds: float
) -> Path | None:
    """Write the scores of windows that took ``seconds`` together, and return the file; None without windows.

    With ``ALONE``, columns that depend on a reference are left out.  ModelError if positions of a window have no score,
    or windows have different columns; InputError if the file cannot be written (nothing is left of it).
    """
    if not scored:
        return None
    ordered = sorted(scored, key=lambda pair: pair[0].index)
    columns = joined([(window, asked_for(scores, tag)) for window, scores in ordered])
    facts = {
        "version": VERSION, "key": folder.name, "tag": tag, "session": session, "seconds": seconds,
        "windows": [[window.index, window.n_scored, digest_of(window)] for window, _ in ordered],
    }  # fmt: skip
    with writing(folder):
        return storage.keep(folder, tag, [safetensors.save(columns, metadata=storage.facts_line(facts))])


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


def digest_of(window: Window) -> str:
    """Return a digest of a window's tokens and scored positions."""
    tokens = window.token_ids.astype("<i4").tobytes()
    return hashlib.sha256(f"{window.what_is_scored} ".encode() + tokens).hexdigest()[:32]


def committed(folder: Path, tag: str) -> frozenset[int]:
    """Return the windows with all columns of a tag, by the segments' headers; only ``load`` checks the content."""
    return frozenset().union(*(segment.indices for _, segment in segments_for(folder, tag) if segment is not None))


def segments_for(folder: Path, tag: str) -> Iterator[tuple[Path, Segment | None]]:
    """Yield each file of a segment that has the columns of a tag, by its name, and the segment (``segment_in``)."""
    for file in storage.files_in(folder):
        what = storage.what_of(file.name)
        if TAG.fullmatch(what) and tag in (ALONE, what):
            segment = segment_in(file)
            if segment is None or segment.key == folder.name:
                yield file, segment


def asked_for(scores: TokenScores, tag: str) -> TokenScores:
    """Return the scores with only the columns of a tag: with ``ALONE``, the first line of ``COLUMNS``."""
    if tag != ALONE:
        return scores
    columns_of_reference: dict[str, Any] = dict.fromkeys(list(COLUMNS)[4:])
    return replace(scores, **columns_of_reference)


def load(folder: Path, tag: str, windows: Sequence[Window]) -> Loaded:
    """Return the scores of these windows in the folder, all checked.

    If segments of several tags have the windows, the tag with most of the windows has priority, so that few sessions
    are mixed, then ``tag`` itself.  Other columns are left out.  A partly used segment counts its share of the seconds.
    """
    wanted = {window.index: window for window in windows}
    found = list(segments_for(folder, tag))
    damaged = [file for file, segment in found if segment is None]
    segments = [segment for _, segment in found if segment is not None]
    covered = defaultdict[str, set[int]](set)
    for segment in segments:
        covered[segment.tag] |= segment.indices & wanted.keys()
    segments.sort(key=lambda each: (-len(covered[each.tag]), each.tag != tag, each.tag, each.windows, each.file.name))
    scores: dict[int, TokenScores] = {}
    sessions = defaultdict[str, float](float)
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
            n_scored = sum(count for _, count, _ in segment.windows)
            sessions[segment.session] += segment.seconds * sum(len(each.logprob) for each in new.values()) / n_scored
    records, damaged_records = read_records(folder)  # after the segments, since a record precedes its last segment
    return Loaded(scores, dict(sessions), records, (*damaged_records, *damaged))


def columns_in(segment: Segment) -> dict[str, NDArray[Any]] | None:
    """Return the columns [N] of a segment by name; None if it is damaged."""
    try:
        return safetensors.load_file(segment.file) if storage.is_whole(segment.file) else None
    except Exception:  # safetensors has its own error class
        return None


def windows_of(
    segment: Segment, columns: Mapping[str, NDArray[Any]], wanted: Mapping[int, Window]
) -> Iterator[tuple[int, TokenScores]]:
    """Yield the wanted windows of a segment, if it was made of the same tokens."""
    begin = 0
    for index, count, digest in segment.windows:
        window = wanted.get(index)
        if window is not None and window.n_scored == count and digest_of(window) == digest:
            yield index, TokenScores(index, **{name: column[begin : begin + count] for name, column in columns.items()})
        begin += count


def segment_in(file: Path) -> Segment | None:
    """Return a segment from its header; None if the header is damaged or does not match the file's name."""
    with suppress(ValueError, KeyError, TypeError):
        facts = storage.header_of(file)[0]
        windows = tuple((int(index), int(count), str(digest)) for index, count, digest in facts["windows"])
        segment = Segment(
            file, str(facts.get("key", "")), str(facts["tag"]), str(facts["session"]), float(facts["seconds"]), windows
        )
        if facts["version"] in (2, VERSION) and segment.tag == storage.what_of(file.name):
            return segment
    return None


def write_record(folder: Path, session: str, record: Mapping[str, Any]) -> None:
    """Write the metadata of a session (JSON types), or replace it; InputError if it cannot be written."""
    with writing(folder):
        content = storage.dump({"session": session, "key": folder.name, "record": redacted(dict(record))})
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
    """Return the number of segments in a folder that belong to another key, or do not name one."""
    found = [segment_in(file) for file in storage.files_in(folder) if TAG.fullmatch(storage.what_of(file.name))]
    return sum(segment is not None and segment.key != folder.name for segment in found)


def own_files(folder: Path) -> list[Path]:
    """Return the segments and records of a folder, including damaged ones; empty if the folder is a link."""
    files = [] if folder.is_symlink() else storage.files_in(folder)
    return [file for file in files if RECORD.fullmatch(file.name) or storage.what_of(file.name)]
