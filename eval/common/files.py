"""Files in the user's folders that a reader finds old or new, never half-written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backends.common import owned


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path beside the target, which replaces the target when the block ends well and else vanishes.

    What a killed run left beside the target goes first.
    """
    owned.sweep(target.parent)
    with owned.replacing(target) as temporary:
        yield temporary
