"""Scores on disk, a file for the windows that finished together, so that a killed run loses only what was under way.

A folder holds the scores of one model, text and engine, with whatever it was compared with.  It knows two files:

- a segment, ``<tag>.<windows>.<digest>.safetensors``: the scores of some windows, the columns of ``TokenScores`` one
  window after the other, each float32 [N] or bool [N].  ``tag`` is "alone", or 16 hexadecimal digits of the key of the
  reference that the windows were compared with, and ``MORE`` if the divergences that have to be asked for are there;
  ``windows`` reads ``0-3,7``; ``digest`` is of the whole file (SHA-256, its first 40 digits).  The metadata repeats tag
  and windows, with the digest of each window's tokens, so that no segment serves another window, and has the session
  that made it and the seconds that these windows took;
- a record, ``record.<session>.json``: what is known of one session, with its checksum (``backends/common/checked.py``).

Nothing is changed in place: segments are only added.  This file needs numpy and safetensors, and no torch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import numpy as safetensors

from backends.base import TokenScores, Window
from backends.common import checked, json_files, owned
from backends.common.errors import InputError, ModelError

MORE = "-more"
"""At the end of the tag of segments that hold the divergences that have to be asked for."""
SEGMENT = re.compile(rf"(alone|[0-9a-f]{{16}}(?:{MORE})?)\.([0-9,-]+)\.([0-9a-f]{{40}})\.safetensors")
RECORD = re.compile(r"record\.([0-9A-Za-z_-]{1,64})\.json")
LONGEST, MOST = 160, 100_000
"""Most letters of ``windows`` in a name, which may have 255 bytes, and most windows that a name is believed to list."""
ALONE = "alone"
"""The tag of scores that were compared with nothing."""
VERSION = 1
"""Version of the segments.  1: columns of several windows, and their digests in the metadata."""
COLUMNS = {
    "logprob": np.float32, "entropy": np.float32, "top1_logprob": np.float32, "top1": np.bool_,
    "ref_logprob": np.float32, "ref_top1_logprob": np.float32, "kld": np.float32, "same_top": np.bool_,
    "reverse_kld": np.float32, "js": np.float32, "tv": np.float32, "top5": np.float32,
}  # fmt: skip
"""The fields of ``TokenScores`` and their dtypes."""


@dataclass(frozen=True)
class Named:
    """A segment by its name."""

    file: Path
    tag: str
    windows: frozenset[int]
    digest: str


def spelled(windows: Sequence[int]) -> str:
    """Sorted numbers of windows in a name, e.g. ``0-3,7``."""
    runs: list[list[int]] = []
    for index in windows:
        if runs and index == runs[-1][-1] + 1:
            runs[-1][1:] = [index]
        else:
            runs.append([index])
    return ",".join("-".join(map(str, run)) for run in runs)


def listed(text: str) -> frozenset[int]:
    """The windows of a name; none if ``spelled`` writes it otherwise, so that no name makes a list without end."""
    runs = [run.split("-") for run in text.split(",")]
    with suppress(ValueError):
        limits = [(int(run[0]), int(run[-1])) for run in runs]
        if sum(max(last - first, 0) for first, last in limits) < MOST:
            found = [index for first, last in limits for index in range(first, last + 1)]
            if spelled(found) == text and found == sorted(set(found)):
                return frozenset(found)
    return frozenset()


def named(folder: Path) -> Iterator[Named]:
    """The segments of a folder by their names, in the order of these; no link, folder or pipe is one."""
    for file in files_of(folder):
        match = SEGMENT.fullmatch(file.name)
        if match is not None and owned.is_regular(file):
            yield Named(file, match[1], listed(match[2]), match[3])


def files_of(folder: Path) -> list[Path]:
    """What lies in a folder, in the order of names; nothing if the folder is not there."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def is_ours(file: Path) -> bool:
    """Whether a file, which is no link, has the name of a segment or a record."""
    return bool(SEGMENT.fullmatch(file.name) or RECORD.fullmatch(file.name)) and owned.is_regular(file)


@dataclass(frozen=True)
class Loaded:
    """What a folder has of the wanted windows: ``scores`` by window, ``sessions`` with the seconds that these took.

    ``damaged``: files of ours that are not what they were, whose windows count as missing (``discard`` removes them);
    ``strange``: what else lies there, which is never touched.
    """

    scores: dict[int, TokenScores]
    sessions: dict[str, float]
    damaged: tuple[Path, ...] = ()
    strange: tuple[Path, ...] = ()


@dataclass(frozen=True)
class Segment:
    """A segment that is whole: ``windows`` is (index, T, digest of its tokens), ``columns`` [N] by name."""

    session: str
    seconds: float
    windows: list[tuple[int, int, str]]
    columns: dict[str, NDArray[Any]]


def commit(
    folder: Path, tag: str, scored: Sequence[tuple[Window, TokenScores]], session: str, seconds: float
) -> tuple[Path, ...]:
    """Keep the scores of some windows, which took ``seconds`` together: one file, or more if their list is long.

    With ``ALONE`` what depends on a reference is left out.  ModelError if a window is not scored throughout, or lacks a
    column that another one has; InputError if the file cannot be written, and then nothing of it is there.
    """
    if not scored:
        return ()
    ordered = sorted(scored, key=lambda pair: pair[0].index)
    name = spelled([window.index for window, _ in ordered])
    if len(name) > LONGEST:
        half = len(ordered) // 2
        parts, share = (ordered[:half], ordered[half:]), n_scored(ordered[:half]) / n_scored(ordered)
        return tuple(
            file
            for part, took in zip(parts, (seconds * share, seconds * (1 - share)), strict=True)
            for file in commit(folder, tag, part, session, took)
        )
    columns = joined([(window, asked_for(scores, tag)) for window, scores in ordered])
    metadata = {
        "version": VERSION, "tag": tag, "session": session, "seconds": seconds,
        "windows": [[window.index, window.n_scored, digest_of(window)] for window, _ in ordered],
    }  # fmt: skip
    data = safetensors.save(columns, metadata={"segment": json.dumps(metadata)})
    file = folder / f"{tag}.{name}.{hashlib.sha256(data).hexdigest()[:40]}.safetensors"
    keep(file, data)
    return (file,)


def n_scored(scored: Iterable[tuple[Window, TokenScores]]) -> int:
    """Scored positions of these windows."""
    return sum(window.n_scored for window, _ in scored)


def joined(scored: Sequence[tuple[Window, TokenScores]]) -> dict[str, NDArray[Any]]:
    """The columns of some windows, one window after the other; ModelError as ``commit`` says it."""
    given: dict[str, list[NDArray[Any]]] = {}
    for number, (window, scores) in enumerate(scored):
        there = {name: column for name in COLUMNS if (column := getattr(scores, name)) is not None}
        if number and there.keys() != given.keys():
            differ = ", ".join(sorted(there.keys() ^ given.keys()))
            raise ModelError(f"window {window.index}: some windows have {differ} and others do not")
        for name, column in there.items():
            if column.shape != (window.n_scored,):
                what = "" if name == "logprob" else f"{name}: "
                raise ModelError(
                    f"window {window.index}: {what}{len(column)} of {window.n_scored} positions were scored"
                )
            if column.dtype != COLUMNS[name]:
                raise ModelError(f"window {window.index}: {name} is {column.dtype}, not {np.dtype(COLUMNS[name]).name}")
            given.setdefault(name, []).append(column)
    return {name: np.concatenate(parts) for name, parts in given.items()}


def keep(file: Path, data: bytes) -> None:
    """Write a file whole; InputError in one line if that fails."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        owned.write_whole(file, data)
    except OSError as error:
        raise InputError(f"{file.parent}: the scores cannot be kept: {error.strerror}") from None


def digest_of(window: Window) -> str:
    """Digest of what a window scores: its tokens, and which of them."""
    tokens = window.token_ids.astype("<i4").tobytes()
    return hashlib.sha256(f"{window.what_is_scored} ".encode() + tokens).hexdigest()[:32]


def committed(folder: Path, tag: str) -> frozenset[int]:
    """Windows that have a segment, by the names of files alone; ``load`` says whether these are whole.

    Segments of another tag count if they hold what is asked for (``serves``).
    """
    return frozenset().union(*(segment.windows for segment in named(folder) if serves(segment.tag, tag)))


def serves(there: str, tag: str) -> bool:
    """Whether segments of the tag ``there`` hold all that is asked for under ``tag``.

    What does not depend on a reference is in all of them, and with ``MORE`` there is all that is there without it.
    """
    return tag in (ALONE, there, there.removesuffix(MORE))


def asked_for(scores: TokenScores, tag: str) -> TokenScores:
    """Of some scores those that belong under a tag."""
    if tag == ALONE:
        return scores.alone()
    return scores if tag.endswith(MORE) else scores.without_divergences()


def load(folder: Path, tag: str, windows: Sequence[Window]) -> Loaded:
    """The scores of these windows that the folder has, every one of them checked.

    Where segments of several tags serve, those of the tag that has most of the windows come first, so that few sessions
    are mixed, and of equals those of the tag itself; what was not asked for is left out.  Of a segment that is used in
    part its share of the seconds counts.
    """
    wanted = {window.index: window for window in windows}
    candidates = [each for each in named(folder) if serves(each.tag, tag) and each.windows & set(wanted)]
    covered = {
        each: frozenset().union(*(segment.windows for segment in candidates if segment.tag == each)) & set(wanted)
        for each in {segment.tag for segment in candidates}
    }
    candidates.sort(key=lambda each: (-len(covered[each.tag]), each.tag != tag, each.tag, each.file.name))
    scores: dict[int, TokenScores] = {}
    sessions: dict[str, float] = {}
    damaged, strange = unreadable(folder)
    for candidate in candidates:
        if not candidate.windows & (wanted.keys() - scores.keys()):
            continue
        segment = read(candidate)
        if segment is None:
            damaged.append(candidate.file)
            continue
        used = 0
        for index, found in windows_of(segment, wanted):
            if index not in scores:
                scores[index] = asked_for(found, tag)
                used += len(found.logprob)
        if used:
            share = used / len(segment.columns["logprob"])
            sessions[segment.session] = sessions.get(segment.session, 0.0) + segment.seconds * share
    return Loaded(scores, sessions, tuple(damaged), tuple(strange))


def unreadable(folder: Path) -> tuple[list[Path], list[Path]]:
    """(records and segments of ours that are damaged by their looks, what is not ours)."""
    damaged, strange = [], []
    for file in files_of(folder):
        segment, record = SEGMENT.fullmatch(file.name), RECORD.fullmatch(file.name)
        if not (segment or record) or not owned.is_regular(file):
            strange += [] if owned.TEMPORARY.fullmatch(file.name) else [file]
        elif (record and record_in(file) is None) or (segment and not listed(segment[2])):
            damaged.append(file)
    return damaged, strange


def windows_of(segment: Segment, wanted: Mapping[int, Window]) -> Iterator[tuple[int, TokenScores]]:
    """The wanted windows of a segment that are the windows that it was made of."""
    begin = 0
    for index, count, digest in segment.windows:
        window = wanted.get(index)
        if window is not None and window.n_scored == count and digest_of(window) == digest:
            columns = {name: column[begin : begin + count] for name, column in segment.columns.items()}
            yield index, TokenScores(index, **columns)
        begin += count


def read(candidate: Named) -> Segment | None:
    """A segment; None if it is damaged, or is not what its name says."""
    try:
        data = candidate.file.read_bytes()
        if hashlib.sha256(data).hexdigest()[:40] != candidate.digest:
            return None
        header = checked.parse(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = checked.parse(header["__metadata__"]["segment"].encode())
        windows = [(int(index), int(count), str(digest)) for index, count, digest in metadata["windows"]]
        segment = Segment(str(metadata["session"]), float(metadata["seconds"]), windows, safetensors.load(data))
        return segment if fits(candidate, metadata, segment) else None
    except Exception:  # safetensors raises its own; with the right digest none of it can be chance
        return None


def fits(candidate: Named, metadata: Mapping[str, Any], segment: Segment) -> bool:
    """Whether a segment is what its name says, and has every position of every window in every column."""
    total = sum(count for _, count, _ in segment.windows)
    return (
        metadata["version"] == VERSION
        and metadata["tag"] == candidate.tag
        and sorted(candidate.windows) == [index for index, _, _ in segment.windows]
        and all(count > 0 for _, count, _ in segment.windows)
        and "logprob" in segment.columns
        and all(column.shape == (total,) and column.dtype == COLUMNS[name] for name, column in segment.columns.items())
    )


def write_record(folder: Path, session: str, record: Mapping[str, Any]) -> None:
    """Keep what is known of a session (JSON types), in the place of what was kept of it before.

    InputError if it cannot be written.
    """
    keep(folder / f"record.{session}.json", checked.dump({"session": session, "record": dict(record)}))


def record_in(file: Path) -> tuple[str, dict[str, Any]] | None:
    """(session, its record); None if the file is damaged, or is another session's."""
    with suppress(InputError, ValueError, KeyError, TypeError):
        found = checked.load(json_files.read_bytes(file))
        session, record = found["session"], found["record"]
        if file.name == f"record.{session}.json" and isinstance(record, dict):
            return session, record
    return None


def records(folder: Path) -> dict[str, dict[str, Any]]:
    """Session -> its record; damaged ones are left out, and are among those that ``load`` calls damaged."""
    files = [file for file in files_of(folder) if RECORD.fullmatch(file.name) and owned.is_regular(file)]
    return dict(found for file in files if (found := record_in(file)) is not None)


def own_files(folder: Path) -> list[Path]:
    """The segments and records of a folder that is no link, whole or not."""
    return [] if folder.is_symlink() else [file for file in files_of(folder) if is_ours(file)]


def discard(folder: Path, files: Iterable[Path]) -> None:
    """Delete these files as far as they are segments and records in the folder; links and what else there is stay."""
    for file in files:
        if file.parent == folder and is_ours(file):
            with suppress(OSError):
                file.unlink()


def sweep(folder: Path) -> None:
    """Delete what writers that are gone left half-written."""
    owned.sweep(folder)
