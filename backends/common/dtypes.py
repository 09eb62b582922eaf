"""What dtypes are called."""

from __future__ import annotations

from typing import Any


def dtype_name(dtype: Any) -> str:
    """A torch dtype's name without torch's prefix: ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
