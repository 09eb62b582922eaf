"""Installed packages and their builds, without importing them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import InputError

if TYPE_CHECKING:
    from importlib.metadata import Distribution

COMPUTING = (
    "torch",
    "triton",
    "mkl",
    "intel-openmp",
    "nvidia-cublas",
    "nvidia-cublas-cu12",
    "nvidia-cudnn-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-nccl-cu12",
    "nvidia-nccl-cu13",
    "nvidia-cutlass-dsl",
    "tilelang",
    "helion",
    "triton-kernels",
    "conch-triton-kernels",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "flash-linear-attention",
    "fla-core",
    "causal-conv1d",
    "mamba-ssm",
    "natten",
    "xformers",
    "deep-gemm",
    "deep-ep",
    "moonep",
    "nixl-ep",
    "amd-mori",
    "amd-aiter",
    "flydsl",
    "apex",
    "arctic-inference",
    "humming-kernels",
    "quack-kernels",
    "hpc-ops",
    "tokenspeed-mla",
    "b12x",
    "flag-gems",
    "xielu",
    "xlstm",
    "mambapy",
    "zentorch",
    "vllm-xpu-kernels",
    "liger-kernel",
    "kernels",
    "transformers",
    "accelerate",
    "peft",
    "torchao",
    "compressed-tensors",
    "bitsandbytes",
    "amd-quark",
    "aqlm",
    "auto-round",
    "auto-round-lib",
    "autoawq",
    "eetq",
    "fast_hadamard_transform",
    "fbgemm-gpu",
    "fbgemm-gpu-genai",
    "flute-kernel",
    "fouroversix",
    "fp_quant",
    "gptqmodel",
    "hqq",
    "optimum",
    "optimum-quanto",
    "qutlass",
    "sinq",
    "spqr_quant",
    "vptq",
)
"""Distributions that an engine based on torch may import if they are installed."""
TORCH_PLUGIN_GROUPS = ("torch.backends",)
"""Groups of entry points whose code torch imports when it is imported."""


FolderTimes = tuple[tuple[str, int], ...]
"""(folder, time of its last change in nanoseconds) of each folder of packages.

Installing, replacing or removing a wheel changes the time of its folder.
"""


def folder_times() -> FolderTimes:
    """Return the times of the folders in which Python finds packages now."""
    times = []
    for folder in sys.path:
        with suppress(OSError):
            times.append((folder, os.stat(folder or os.curdir).st_mtime_ns))
    return tuple(times)


def forget_versions() -> None:
    """Look up all packages again from now on; called when a run begins.

    ``setup.py develop`` changes a version without changing the time of a folder.
    """
    installed_version.cache_clear()
    packages_of_plugins.cache_clear()


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Distribution name -> version, for the installed packages."""
    times = folder_times()
    versions = {}
    for package in packages:
        version = installed_version(package, times)
        if version is not None:
            versions[package] = version
    return versions


@cache
def installed_version(package: str, times: FolderTimes) -> str | None:
    """Return the version of a distribution; None if it is not installed.

    ``times``: part of the cache's key; when a folder changes, the package is looked up again.
    """
    # Imported late: takes 0.02 s, with email and zipfile.
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def packages_of_plugins(group: str, times: FolderTimes) -> frozenset[str]:
    """Return the distributions that have entry points in a group.

    ``times``: as for ``installed_version``.
    """
    from importlib import metadata

    packages = set()
    for entry_point in metadata.entry_points(group=group):
        if entry_point.dist:
            packages.add(entry_point.dist.name)
    return frozenset(packages)


def torch_related_builds(*more: str, plugins: Iterable[str] = ()) -> dict[str, str]:
    """Return name -> build, for each distribution that may change what torch computes.

    The builds are part of the keys of scores.  ``more``: further distributions; ``plugins``:
    further groups of entry points whose code is imported.
    """
    times = folder_times()
    plugin_packages: set[str] = set()
    for group in (*TORCH_PLUGIN_GROUPS, *plugins):
        plugin_packages |= packages_of_plugins(group, times)
    return builds((*COMPUTING, *more, *sorted(plugin_packages)))


def builds(packages: Iterable[str]) -> dict[str, str]:
    """Return distribution name -> build, for the installed packages.

    A build is the version, and its ``origin`` if that is known.  Keys use this instead of the
    version, because builds of one version may compute other scores.
    """
    from importlib import metadata

    versions = installed_versions(packages)
    return {name: versions[name] + origin(metadata.distribution(name)) for name in versions}


def origin(distribution: Distribution) -> str:
    """Return the identity of a build that is not from an index; "" for a build from an index.

    The identity is the commit or archive and a digest of the files, or the last change of an
    editable checkout.
    """
    try:
        # pip notes the origin of a build that is not from an index.
        source: Any = json.loads(distribution.read_text("direct_url.json") or "{}")
        if source.get("dir_info", {}).get("editable"):
            return f" changed {last_change(Path(source['url'].removeprefix('file://')))}"
        revision = source.get("vcs_info", {}).get("commit_id")
        if not revision:
            revision = source.get("archive_info", {}).get("hash")
        content = ""
        if source:
            content = digest_of_record(distribution.read_text("RECORD") or "")
    except (OSError, ValueError, AttributeError, KeyError):
        return ""
    identity = ""
    if revision:
        identity += f" {revision}"
    if content:
        identity += f" {content}"
    return identity


def last_change(folder: Path) -> int:
    """Return the time of the last change of code in a folder, in nanoseconds; 0 without code."""
    times = []
    for pattern in ("*.py", "*.so"):
        for file in folder.rglob(pattern):
            if file.is_file():
                times.append(file.stat().st_mtime_ns)
    return max(times, default=0)


def digest_of_record(record: str) -> str:
    """Return a digest of the files in a distribution's RECORD and their checksums.

    "" if no file counts.  Files without a checksum (bytecode) do not count, and neither do files
    that differ between environments (scripts, metadata).
    """
    lines = []
    for line in record.splitlines():
        # A line is path,checksum,size.  A damaged line without a comma counts as its own checksum.
        checksum = line.split(",")[-2:][0]
        if checksum and not line.startswith("../") and ".dist-info/" not in line:
            lines.append(line)
    if not lines:
        return ""
    lines.sort()
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def package_folder(module: str) -> Path | None:
    """Return the folder of the top-level package ``module``; None if it is not installed."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    return Path(spec.origin).parent


def check_installed(module: str, install: str) -> None:
    """InputError with the command ``install`` unless ``module`` can be imported."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{module} is not installed: {install}")
