"""The reference of a KL divergence on disk: the final hidden states of every scored position, and the head, once.

A store is a folder:

- ``reference.json``, the manifest: the model, text and method that the store is of (``identity``), its contents
  ("states" or "logits"), what the head does, and the size and SHA-256 of each file;
- ``row.000000.safetensors``: window 0's ``states`` [T, H] in the model's dtype, taken where they enter the head; or,
  where the head cannot be recomputed, window 0's ``logits`` [T, V] in the dtype in which the engine made them;
- ``head.000000.safetensors``: the head's ``weight`` [n, H] of vocabulary entries 0 to n, and ``bias`` [n] if it has
  one; one file a tensor-parallel rank, named by its first entry.

For a vocabulary of 128,256 and H = 4,096, 16-bit states take 8,192 bytes a token, 16-bit logits 256,512, and float32
logits, as llama.cpp makes them, 513,024.  Logits come back as the engine made them: product in the model's dtype, bias,
soft cap, scale.  Nothing is rounded: float16 in place of float32 cost up to 3.3e-4 nats a token, and made small
divergences negative.  Several processes may write to one store; ``seal`` makes it one.
This file knows no engine, and does not know what makes two references the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.common.errors import InputError
from backends.common.messages import one_line
from backends.head import Contents, Head

if TYPE_CHECKING:
    import torch

VERSION = 1
"""Version of the layout.  1: one file a window, one or more for the head, and a manifest that names them."""
MANIFEST = "reference.json"
CONTENTS_KEY, WINDOWS_KEY = "kind", "rows"
"""What the manifest calls a store's contents and its number of windows; stores of compare_q 0.1 and 0.2 are read."""


class Writer:
    """One process's share of a store that is being made; thread-safe for distinct windows.

    ``folder`` is there and empty but for the shares of other processes; ``reason`` says why logits are kept and not
    states.
    """

    def __init__(self, folder: Path, contents: Contents, reason: str = "") -> None:
        self.folder = folder
        self.contents = contents
        self.reason = reason
        self.files: dict[str, dict[str, Any]] = {}

    def window(self, index: int, tensor: torch.Tensor) -> None:
        """Write one window's states [T, H] or logits [T, V] bit for bit, in the dtype that the engine gave them."""
        self._write(window_file(index), {self.contents: tensor})

    def head(self, first: int, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Write the head's entries from ``first`` on."""
        self._write(f"head.{first:06d}.safetensors", {"weight": weight} | ({} if bias is None else {"bias": bias}))

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        from safetensors.torch import save

        data = save({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()})
        (self.folder / name).write_bytes(data)
        self.files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def close(self, head: Head) -> None:
        """Say what this process has written."""
        part = {CONTENTS_KEY: self.contents, "reason": self.reason, "head": asdict(head), "files": self.files}
        (self.folder / f"part.{uuid.uuid4().hex}.json").write_text(json.dumps(part), encoding="utf-8")


def seal(building: Path, folder: Path, identity: Mapping[str, Any], n_windows: int) -> None:
    """Make one store, under its final name, of what the writers left in ``building``.

    ValueError if one of the ``n_windows`` windows is missing.
    """
    parts = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(building.glob("part.*.json"))]
    files = {name: entry for part in parts for name, entry in part["files"].items()}
    missing = [index for index in range(n_windows) if window_file(index) not in files]
    if not parts or missing:
        raise ValueError(f"the reference's window {missing[0] if missing else 0} was not kept")
    manifest = {
        "version": VERSION, "identity": dict(identity), CONTENTS_KEY: parts[0][CONTENTS_KEY],
        "reason": parts[0]["reason"], "head": parts[0]["head"], WINDOWS_KEY: n_windows, "files": files,
    }  # fmt: skip
    (building / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    for file in building.glob("part.*.json"):
        file.unlink()
    if not folder.exists():
        os.replace(building, folder)
        return
    remove(folder)  # a store that another run has made meanwhile; a user's own files in the folder stay
    folder.mkdir(exist_ok=True)
    for file in sorted(building.iterdir(), key=lambda file: file.name == MANIFEST):
        os.replace(file, folder / file.name)
    building.rmdir()


def remove(folder: Path) -> None:
    """Delete a store: the files that it says are its own, and the folder if nothing else lies in it."""
    manifest = folder / MANIFEST
    with suppress(OSError, ValueError, AttributeError):  # a damaged manifest names no files
        for name in json.loads(manifest.read_text(encoding="utf-8"))["files"]:
            if Path(name).name == name:
                (folder / name).unlink(missing_ok=True)
    manifest.unlink(missing_ok=True)
    with suppress(OSError):  # a user's own files, or a link to the folder
        folder.rmdir()


def window_file(index: int) -> str:
    """File of a window."""
    return f"row.{index:06d}.safetensors"


class ReferenceStore(ABC):
    """A store to read; InputError names the file that is missing, damaged or of another version."""

    path: Path
    identity: dict[str, Any]
    contents: Contents
    reason: str
    head: Head
    n_windows: int

    @property
    def head_digests(self) -> list[str]:
        """Checksums of the head's files."""
        return []

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes of all windows and the head."""

    @abstractmethod
    def verify(self, advance: Callable[[], None] = lambda: None) -> None:
        """Check every file; calls ``advance`` after each."""

    @abstractmethod
    def window(self, index: int) -> torch.Tensor:
        """Window ``index``'s states [T, H] or logits [T, V], by ``contents``, on the CPU."""

    def weight(self, first: int, last: int, device: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Of a store of states, the head's weight [last - first, H] and bias, on a device."""
        raise TypeError(f"{self.path}: keeps {self.contents}, no head")


class Reader(ReferenceStore):
    """A store that compare_q wrote."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        file = folder / MANIFEST
        try:
            manifest = json.loads(file.read_text(encoding="utf-8"))
            version = manifest["version"]
            if version != VERSION:
                raise InputError(f"{file}: layout {version}, this compare_q reads {VERSION}; delete the store")
            self.identity, self.contents, self.reason = manifest["identity"], manifest[CONTENTS_KEY], manifest["reason"]
            self.head, self.n_windows = Head(**manifest["head"]), manifest[WINDOWS_KEY]
            self.files: dict[str, dict[str, Any]] = manifest["files"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file}: not a reference store: {one_line(error)}; delete it") from None

    @property
    def head_digests(self) -> list[str]:
        return [entry["sha256"] for name, entry in sorted(self.files.items()) if name.startswith("head.")]

    @property
    def stored_bytes(self) -> int:
        return sum(entry["bytes"] for entry in self.files.values())

    def verify(self, advance: Callable[[], None] = lambda: None) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for problem in pool.map(self._problem, self.files):
                if problem:
                    raise InputError(f"{problem}; delete {self.path}, so that it is made again")
                advance()

    def _problem(self, name: str) -> str:
        file = self.path / name
        try:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except FileNotFoundError:
            return f"{file}: missing from the reference"
        except OSError as error:
            return f"{file}: cannot be read: {error.strerror}"
        return "" if digest == self.files[name]["sha256"] else f"{file}: damaged: its checksum is not the manifest's"

    def window(self, index: int) -> torch.Tensor:
        from safetensors import safe_open

        with safe_open(self.path / window_file(index), "pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.contents)
        return tensor

    def head_parts(self, first: int, last: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """(first entry, weight, bias) of the stored pieces of vocabulary entries ``first`` to ``last``, in order."""
        from safetensors import safe_open

        for name in sorted(name for name in self.files if name.startswith("head.")):
            begin = int(name.split(".")[1])
            with safe_open(self.path / name, "pt") as file:
                weight = file.get_slice("weight")
                end = begin + weight.get_shape()[0]
                low, high = min(max(first, begin), end), max(min(last, end), begin)
                if low < high or first == last:  # a rank that holds nothing but padding asks for nothing
                    bias = file.get_tensor("bias")[low - begin : high - begin] if "bias" in file.keys() else None  # noqa: SIM118
                    yield low, weight[low - begin : high - begin], bias

    def weight(self, first: int, last: int, device: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        import torch

        parts = list(self.head_parts(first, last))
        if not parts or sum(len(weight) for _, weight, _ in parts) != last - first:
            raise InputError(f"{self.path}: the reference's head lacks entries between {first} and {last}; delete it")
        # One piece is not copied: 1 GB of a head took longer to copy than to compare.
        weight = parts[0][1] if len(parts) == 1 else torch.cat([weight for _, weight, _ in parts])
        biases = [bias for _, _, bias in parts if bias is not None]
        return weight.to(device), torch.cat(biases).to(device) if biases else None


def recorded(folder: Path) -> frozenset[int]:
    return frozenset()
