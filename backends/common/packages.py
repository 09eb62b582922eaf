"""Which packages are installed, found out without importing them."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from backends.common.errors import InputError


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Distribution name -> version, of the packages that are installed."""
    from importlib import metadata  # with email and zipfile: 0.02 s that --help and --from need not wait

    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def package_folder(module: str) -> Path | None:
    """The folder that ``import module`` would take the top-level package ``module`` from; None if there is none."""
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def check_installed(module: str, install: str) -> None:
    """InputError with the line ``install``, which mends it, unless ``module`` can be imported."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{module} is not installed: {install}")
