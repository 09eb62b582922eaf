"""Reference stores made by hand, or by an engine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from compare_q.backends.base import Engine, ScoreRequest, Window
from compare_q.backends.common import storage
from compare_q.backends.common.message_text import dtype_name
from compare_q.backends.reference.head import Head
from compare_q.backends.reference.recorder import Recorder, pieces
from compare_q.backends.reference.store import (
    Reader,
    begin,
    key_of,
    read_manifest,
    seal,
    write_manifest,
)

HEAD = Head(300, "float32")
IDENTITY = {"model": "abc", "label": "bf16"}
KEY = key_of(IDENTITY)


def digest(window: int) -> str:
    """The digest of a window of a store made by hand: its number in 32 hexadecimal digits."""
    return f"{window:032x}"


def digests(windows: Iterable[int]) -> dict[int, str]:
    """Return the digests of windows by their numbers."""
    return {window: digest(window) for window in windows}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


WEIGHT = numbers(300, 4, seed=100)
"""The weight of the head of a store of states."""


def record(
    folder: Path,
    windows: Iterable[int],
    *,
    weight: torch.Tensor = WEIGHT,
    bias: torch.Tensor | None = None,
    head: Head | None = None,
    closed: bool = True,
    seed: int = 0,
    identity: Mapping[str, Any] = IDENTITY,
) -> None:
    """Record the windows of one process: states [3, H] from ``numbers``, and this head.

    The seed of a window's states is ``seed`` and the window's number.
    """
    begin(folder, identity)
    by_number = digests(windows)
    recorder = Recorder(folder, key_of(identity), by_number, "states")
    for window in by_number:
        recorder.write(window, numbers(3, weight.shape[1], seed=seed + window, dtype=weight.dtype))
    if head is None:
        head = Head(len(weight), dtype_name(weight.dtype))
    if closed:
        recorder.write_head((weight, bias, head))


def store_of(
    folder: Path,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    windows: int = 2,
    head: Head | None = None,
    identity: Mapping[str, Any] = IDENTITY,
) -> Reader:
    """Return a sealed store of windows and a head from ``record``."""
    record(folder, range(windows), weight=weight, bias=bias, head=head, identity=identity)
    seal(folder, identity, list(map(digest, range(windows))))
    return Reader(folder)


def state_store(folder: Path, windows: int = 2) -> Reader:
    """Return a store with states [3, 4] for each window, and a head of 300 entries."""
    return store_of(folder, WEIGHT, windows=windows)


def recorded(engine: Engine, windows: list[Window], folder: Path) -> Path:
    """Record a loaded engine's states or logits in ``folder / "store"``; return this path."""
    store = folder / "store"
    store.mkdir()
    list(engine.score(windows, ScoreRequest(record=store)))
    seal(store, {}, [window.digest for window in windows])
    return store


def replace_window(
    folder: Path, window: str, tensors: Mapping[str, torch.Tensor], metadata: Any
) -> None:
    """Replace the numbers of a window in a store by others, in a file that has its right name."""
    manifest = read_manifest(folder)
    old = manifest.windows[window]
    new = storage.keep(folder, f"row.{window}", pieces(tensors, metadata))
    if new.name != old:
        (folder / old).unlink()
    files = {}
    for name, size in manifest.files.items():
        if name == old:
            files[new.name] = new.stat().st_size
        else:
            files[name] = size
    write_manifest(folder, manifest.model_copy(update={"files": files}))


def window_of(folder: Path, window: str) -> Path:
    """Return the only file of the window with this digest."""
    (file,) = folder.glob(f"row.{window}.*")
    return file
