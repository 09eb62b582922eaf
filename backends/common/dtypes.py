"""The name of a torch dtype, as results, stores and messages write it."""

from __future__ import annotations

from typing import Any


def dtype_name(dtype: Any) -> str:
    """``bfloat16`` for ``torch.bfloat16``; a word that is a name already comes back as it is."""
    return str(dtype).removeprefix("torch.")
