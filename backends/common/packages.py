"""Which packages are installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    pass


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Distribution name -> version, of those that are installed; imports none of them."""
    found = {}
    for package in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found
