"""A reference store that exllamav3's compare_q left behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.head import Head
from compare_q.backends.common.messages import one_line
from compare_q.backends.reference.store import MANIFEST, ReferenceStore

if TYPE_CHECKING:
    import torch


class UpstreamReader(ReferenceStore):
    """The logits that exllamav3's compare_q kept: float32 [1, L, V] a window, of the last L positions of each window.

    The layouts: one file a window (``row_000000.safetensors`` in the folder, or in ``<name>.rows`` beside the name that
    was given), or the older single file with the tensors ``tensor.0``, ``tensor.1``, ...  A store of upstream says
    neither which text and tokenizer it was made with nor of which model.  Shapes are read without torch.
    """

    contents = "logits"
    reason = "kept by upstream's compare_q"

    def __init__(self, path: Path) -> None:
        self.path, self.identity = path, {}
        folder = path if path.is_dir() else path.with_name(f"{path.name}.rows")
        found = sorted(folder.glob("row_*.safetensors")) if folder.is_dir() else []
        self.files = [file for file in found if file.is_file()]  # a pipe would be waited for
        if not self.files and not path.is_file():
            raise InputError(f"{path}: holds no reference: neither {MANIFEST} nor windows of upstream's compare_q")
        self.n_windows = len(self.files) or self._count()
        self.head = Head(int(self._shape(0)[-1]), "float32")

    @cached_property
    def _keys(self) -> list[str]:
        from safetensors import safe_open

        try:
            with safe_open(self.path, "np") as file:
                return list(file.keys())
        except Exception as error:  # safetensors raises its own for files that are something else or damaged
            raise InputError(f"{self.path}: no store of reference logits: {one_line(error)}") from None

    def _count(self) -> int:
        from safetensors import safe_open

        if "tensor" in self._keys:
            with safe_open(self.path, "np") as file:
                return int(file.get_slice("tensor").get_shape()[0])
        return sum(re.fullmatch(r"tensor\.\d+", key) is not None for key in self._keys)

    def _slice(self, index: int, use: Callable[[Any, Any], Any], framework: str = "np") -> Any:
        """``use(tensor, part)``: the opened tensor that holds a window, and the slice of it that is the window."""
        from safetensors import safe_open

        single = not self.files
        file = self.path if single else self.files[index].with_name(f"row_{index:06d}.safetensors")
        name = f"tensor.{index}" if single and "tensor" not in self._keys else "tensor"
        try:
            with safe_open(file, framework) as opened:
                whole = single and name == "tensor"
                return use(opened.get_slice(name), slice(index, index + 1) if whole else slice(0, 1))
        except Exception as error:  # safetensors raises its own for missing and for damaged files
            raise InputError(f"{file}: window {index} of the reference cannot be read: {one_line(error)}") from None

    def _shape(self, index: int) -> list[int]:
        shape: list[int] = self._slice(index, lambda opened, _: opened.get_shape())
        return shape

    @property
    def stored_bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files or [self.path])

    def verify(self, advance: Callable[[], None] = lambda: None) -> None:
        for index in range(self.n_windows):  # headers only: upstream keeps no checksums
            self._shape(index)
            advance()

    def window_bytes(self, index: int) -> int:
        return self.files[index].stat().st_size if self.files else self.stored_bytes // max(self.n_windows, 1)

    def n_rows(self, index: int) -> int:
        return self._shape(index)[-2] - 1  # the last position predicts a token beyond the window

    def window(self, index: int, begin: int = 0, end: int | None = None) -> torch.Tensor:
        last = self.n_rows(index) if end is None else min(end, self.n_rows(index))

        def rows(opened: Any, part: slice) -> Any:
            found = opened[part, begin:last] if len(opened.get_shape()) == 3 else opened[begin:last]
            return found.reshape(-1, found.shape[-1])

        tensor: torch.Tensor = self._slice(index, rows, "pt")
        return tensor
