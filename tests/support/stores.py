"""Reference stores made by hand, ours and upstream's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from compare_q.backends.base import ScoreRequest
from compare_q.backends.common.head import Head
from compare_q.backends.common.messages import dtype_name
from compare_q.backends.logits_engine import LogitsEngine
from compare_q.backends.reference.reading import open_reference
from compare_q.backends.reference.recorder import Recorder
from compare_q.backends.reference.store import Reader, begin, seal
from tests.support.toy import toy_windows

HEAD = Head(300, "float32")
IDENTITY = {"windows": "abc", "label": "bf16"}


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Standard normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


WEIGHT = numbers(300, 4, seed=100)
"""The weight of the head of a store of states."""


def record(
    folder: Path, windows: Iterable[int], *, weight: torch.Tensor = WEIGHT, bias: torch.Tensor | None = None,
    head: Head | None = None, closed: bool = True, seed: int = 0, identity: Mapping[str, Any] = IDENTITY,
) -> None:  # fmt: skip
    """One process's share: windows of states [3, H], those of ``numbers`` with the window as seed, and this head."""
    begin(folder, identity)
    recorder = Recorder(folder, "states")
    for window in windows:
        recorder.write(window, numbers(3, weight.shape[1], seed=seed + window, dtype=weight.dtype))
    if closed:
        recorder.write_head((weight, bias, head or Head(len(weight), dtype_name(weight.dtype))))


def store_of(
    folder: Path, weight: torch.Tensor, bias: torch.Tensor | None = None, *, windows: int = 2, head: Head | None = None,
    identity: Mapping[str, Any] = IDENTITY,
) -> Reader:  # fmt: skip
    """A store of windows and a head, as ``record`` makes them."""
    record(folder, range(windows), weight=weight, bias=bias, head=head, identity=identity)
    seal(folder, identity, windows)
    return Reader(folder)


def state_store(folder: Path, windows: int = 2) -> Reader:
    """A store of states [3, 4] a window, and a head of 300 entries."""
    return store_of(folder, WEIGHT, windows=windows)


def window_of(folder: Path, window: int) -> Path:
    """The one file of a window."""
    (file,) = folder.glob(f"row.{window:06d}.*")
    return file


def contents_of(folder: Path) -> dict[str, bytes]:
    """Every file of a folder."""
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def kept_as_reference(engine: LogitsEngine, folder: Path) -> tuple[str, str]:
    """Whether a loaded model keeps its states or its logits in ``folder / "store"``, and why not its states."""
    (folder / "store").mkdir()
    list(engine.score(toy_windows(1, 20), ScoreRequest(record=folder / "store")))
    seal(folder / "store", {}, 1)
    store = open_reference(folder / "store")
    return store.contents, store.reason


UPSTREAM = [numbers(1, 5, 8, seed=window) * 4 for window in range(3)]
"""Logits [1, L, V] of three windows."""
LAYOUTS = ["folder", "rows beside the name", "single with one tensor", "single with a tensor a window"]
"""The layouts of upstream's stores; the first two have one file a window."""


def upstream_store(folder: Path, layout: str) -> Path:
    """The path that a user would give for a store of UPSTREAM."""
    path = folder / "logits.safetensors"
    if layout == "single with one tensor":
        save_file({"tensor": torch.cat(UPSTREAM)}, path)
    elif layout == "single with a tensor a window":
        save_file({f"tensor.{window}": tensor for window, tensor in enumerate(UPSTREAM)}, path)
    else:
        path = path if layout == "rows beside the name" else folder / "kept"
        files = path.with_name(f"{path.name}.rows") if layout == "rows beside the name" else path
        files.mkdir()
        for window, tensor in enumerate(UPSTREAM):
            save_file({"tensor": tensor}, files / f"row_{window:06d}.safetensors")
        (files / "row_000003.safetensors.tmp").write_bytes(b"half")  # as an interrupted run leaves it
    return path
