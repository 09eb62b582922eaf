"""The reference of a KL divergence on disk: the final hidden states of every scored position, and the head, once.

A store is a folder:

- ``reference.json``, the manifest (``backends/reference/manifest.py``): the model, text and method that the store is of
  (``identity``), its contents ("states" or "logits"), what the head does, the size and SHA-256 of each file, and the
  SHA-256 of all this;
- ``row.000000.safetensors``: window 0's ``states`` [T, H] in the model's dtype, taken where they enter the head; or,
  where the head cannot be recomputed, window 0's ``logits`` [T, V] in the dtype in which the engine made them;
- ``head.000000.safetensors``: the head's ``weight`` [n, H] of vocabulary entries 0 to n, and ``bias`` [n] if it has
  one; one file a tensor-parallel rank, named by its first entry.

For a vocabulary of 128,256 and H = 4,096, 16-bit states take 8,192 bytes a token, 16-bit logits 256,512, and float32
logits, as llama.cpp makes them, 513,024.  Logits come back as the engine made them: product in the model's dtype, bias,
soft cap, scale.  Nothing is rounded: float16 in place of float32 cost up to 3.3e-4 nats a token, and made small
divergences negative.  Several processes may write to one store (``backends/reference/journal.py``); ``seal`` makes it
one, or adds to it.
This file knows no engine, and does not know what makes two references the same.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from backends.common import owned
from backends.common.errors import InputError
from backends.common.head import Contents, Head
from backends.common.messages import one_line
from backends.reference import journal, manifest
from backends.reference.journal import Writer, recorded
from backends.reference.manifest import MANIFEST, VERSION, window_file
from backends.reference.sealing import building_of, discard, own_files, remove, seal, tidy

if TYPE_CHECKING:
    import torch

__all__ = [
    "MANIFEST", "VERSION", "Reader", "ReferenceStore", "Writer", "building_of", "discard", "own_files", "recorded",
    "remove", "seal", "tidy", "window_file",
]  # fmt: skip
"""All that is done with stores, in one place."""


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
    """A store that compare_q wrote; ``n_windows``: windows 0 to n - 1 are there."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.manifest = found = manifest.read(folder)
        self.identity, self.contents, self.reason, self.head = found.identity, found.contents, found.reason, found.head
        self.files = found.files
        self.n_windows = manifest.unbroken(found.windows)

    @property
    def head_digests(self) -> list[str]:
        return [entry.sha256 for entry in self.manifest.heads.values()]

    @property
    def stored_bytes(self) -> int:
        return sum(entry.bytes for entry in self.files.values())

    def verify(self, advance: Callable[[], None] = lambda: None) -> None:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for problem in pool.map(self._problem, self.files):
                if problem:
                    raise InputError(f"{problem}; delete {self.path}, so that it is made again")
                advance()

    def _problem(self, name: str) -> str:
        file = self.path / name
        if not os.path.lexists(file):
            return f"{file}: missing from the reference"
        if not owned.is_regular(file):
            return f"{file}: is no file"
        try:
            digest = journal.digest_of(file)
        except OSError as error:
            return f"{file}: cannot be read: {error.strerror}"
        return "" if digest == self.files[name].sha256 else f"{file}: damaged: its checksum is not the manifest's"

    def window(self, index: int) -> torch.Tensor:
        from safetensors import safe_open

        file = self.path / window_file(index)
        try:
            with safe_open(file, "pt") as opened:
                tensor: torch.Tensor = opened.get_tensor(self.contents)
        except Exception as error:  # safetensors raises its own for missing and for damaged files
            raise InputError(f"{file}: window {index} of the reference cannot be read: {one_line(error)}") from None
        return tensor

    def head_parts(self, first: int, last: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """(first entry, weight, bias) of the stored pieces of vocabulary entries ``first`` to ``last``, in order."""
        from safetensors import safe_open

        for name in self.manifest.heads:
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
