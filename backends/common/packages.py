"""Installed packages and their builds, without importing them."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Iterable
from contextlib import suppress
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
PLUGINS = ("torch.backends",)
"""Groups of entry points whose code torch imports when it is imported."""


def installed_versions(packages: Iterable[str]) -> dict[str, str]:
    """Distribution name -> version, for the installed packages."""
    from importlib import metadata  # imported late: takes 0.02 s, with email and zipfile

    found = {}
    for package in packages:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def computing(*more: str, plugins: Iterable[str] = ()) -> dict[str, str]:
    """Distribution name -> build, for each package that may change what torch computes; part of the
    keys of scores.

    ``more``: further distributions; ``plugins``: further groups of entry points whose code is
    imported.
    """
    from importlib import metadata

    loaded = {
        each.dist.name
        for group in (*PLUGINS, *plugins)
        for each in metadata.entry_points(group=group)
        if each.dist
    }
    return builds((*COMPUTING, *more, *sorted(loaded - {"compare-q"})))


def builds(packages: Iterable[str]) -> dict[str, str]:
    """Distribution name -> build, for the installed packages: the version, and its ``origin`` if
    that is known.

    Keys use this instead of the version, because builds of one version may compute other scores.
    """
    from importlib import metadata

    found = installed_versions(packages)
    return {name: version + origin(metadata.distribution(name)) for name, version in found.items()}


def origin(distribution: Distribution) -> str:
    """Return the identity of a build that is not from an index; "" for a build from an index.

    The identity is the commit or archive and a digest of the files, or the last change of an
    editable checkout.
    """
    try:
        noted: Any = json.loads(distribution.read_text("direct_url.json") or "{}")
        if noted.get("dir_info", {}).get("editable"):
            folder = Path(noted["url"].removeprefix("file://"))
            files = [
                file
                for pattern in ("*.py", "*.so")
                for file in folder.rglob(pattern)
                if file.is_file()
            ]
            return f" changed {max((file.stat().st_mtime_ns for file in files), default=0)}"
        known = noted.get("vcs_info", {}).get("commit_id") or noted.get("archive_info", {}).get(
            "hash"
        )
        # Skip files without a digest (bytecode), and files that differ between environments
        # (scripts, metadata).
        lines = sorted(
            line
            for line in ((distribution.read_text("RECORD") if noted else "") or "").splitlines()
            if line.split(",")[-2:][0] and not line.startswith("../") and ".dist-info/" not in line
        )
    except (OSError, ValueError, AttributeError, KeyError):
        return ""
    content = hashlib.sha256("\n".join(lines).encode()).hexdigest() if lines else ""
    return "".join(f" {each}" for each in (known, content) if each)


def package_folder(module: str) -> Path | None:
    """The folder of the top-level package ``module``; None if it is not installed."""
    spec = importlib.util.find_spec(module)
    return Path(spec.origin).parent if spec is not None and spec.origin is not None else None


def check_installed(module: str, install: str) -> None:
    """InputError with the command ``install`` unless ``module`` can be imported."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{module} is not installed: {install}")
