"""Give the memory of a closed model back."""

from __future__ import annotations

import gc


def release() -> None:
    """Collect what nothing refers to any more, and return torch's cached GPU memory to the driver."""
    gc.collect()
    import torch

    if torch.cuda.is_available():
        torch.cuda.empty_cache()
