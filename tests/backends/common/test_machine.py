"""Versions and hardware without engines."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from compare_q.backends.common import machine
from compare_q.backends.common.machine import Gpu

# Rows of nvidia-smi: index, UUID, name, driver, memory in MiB.
TWO = (
    "0, GPU-11aa22bb-3333, NVIDIA H200, 580.159.04, 143771\n"
    "1, GPU-99ff88ee-7777, NVIDIA H200, 580.159.04, 143771\n"
)
FIRST = Gpu("0", "NVIDIA H200", "580.159.04", 143771.0)
SECOND = Gpu("1", "NVIDIA H200", "580.159.04", 143771.0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine.installed_gpus.cache_clear()
    yield
    machine.installed_gpus.cache_clear()


@pytest.mark.parametrize(
    ("visible", "gold"),
    [
        (None, (FIRST, SECOND)),
        ("", ()),
        ("-1", ()),
        ("1", (SECOND,)),
        ("1,0", (SECOND, FIRST)),
        (" 0 , 1 ", (FIRST, SECOND)),
        # CUDA ignores every device after one that is not valid.
        ("0,-1,1", (FIRST,)),
        # CUDA accepts the beginning of a UUID.
        ("GPU-99", (replace(SECOND, device="GPU-99"),)),
        ("GPU-11aa22bb-3333,1", (replace(FIRST, device="GPU-11aa22bb-3333"), SECOND)),
        ("7", (Gpu("7", "unknown GPU", "580.159.04"),)),
        ("MIG-5,0", (Gpu("MIG-5", "unknown GPU", "580.159.04"), FIRST)),
    ],
)
def test_gpus_that_a_process_may_use(
    monkeypatch: pytest.MonkeyPatch, visible: str | None, gold: tuple[Gpu, ...]
) -> None:
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 0, TWO, "")
    )
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert machine.gpus() == gold


def test_variables_that_change_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith((*machine.SETTINGS, *machine.CPU_SETTINGS)):
            monkeypatch.delenv(name)
    before = machine.processor()
    assert machine.settings() == {}
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    monkeypatch.setenv("TORCH_HOME", "/nowhere")
    monkeypatch.setenv("CUBLASLT_LOG_LEVEL", "5")
    monkeypatch.setenv("DISABLE_ADDMM_CUDA_LT", "1")
    assert machine.settings() == {"DISABLE_ADDMM_CUDA_LT": "1", "NVIDIA_TF32_OVERRIDE": "0"}
    assert machine.processor() == before
    chosen = {"ATEN_CPU_CAPABILITY": "avx2", "ZENDNN_MATMUL_ALGO": "1", "ZENTORCH_LINEAR": "1"}
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    assert machine.processor() == before | chosen


@pytest.mark.parametrize(
    ("flags", "most", "emulated"),
    [
        ("sse2 avx2 avx512f avx512_bf16 amx_tile", "", False),
        ("sse2 avx2 avx512f avx512_bf16 amx_tile", "AVX512_CORE_AMX", False),
        ("sse2 avx2 avx512f avx512_bf16 amx_tile", "AVX512_CORE_VNNI", True),
        ("sse2 avx2 avx512f avx512_bf16", "default", False),
        ("sse2 avx2 avx512f avx512_vnni", "", True),
        ("sse2 avx2 avx512f avx512_bf16", "AVX2_VNNI", True),
        ("sse2 sse4_2 avx", "", True),
        # ARM: every x86-64 processor has sse2.
        ("asimd bf16", "", False),
    ],
)
def test_which_cpu_emulates_bf16(
    flags: str, most: str, emulated: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zen 4 and Sapphire Rapids multiply bf16; Skylake to Ice Lake only have AVX-512."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", most)
    # The model's name is not a flag, even if it contains one.
    (tmp_path / "cpuinfo").write_text(
        f"processor\t: 0\nmodel name\t: avx512_bf16\nflags\t\t: fpu {flags} lm\n"
    )
    for file, gold in (("cpuinfo", emulated), ("missing", False)):
        monkeypatch.setattr(machine, "CPUINFO", tmp_path / file)
        assert machine.emulates_bf16() == gold


@pytest.mark.parametrize(
    ("flags", "gold"), [("sse2 avx2", False), ("sse2 avx2 avx512f", True), ("asimd bf16", True)]
)
def test_which_cpu_lacks_avx512(
    flags: str, gold: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(
        f"processor\t: 0\nmodel name\t: avx512f\nflags\t\t: {flags}\n"
    )
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    assert machine.has_avx512() == gold


def test_kernels_that_were_compiled_for_other_instructions_are_not_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise torch's cache gave 2,048 wrong values of 4,096 on AVX2 after a run with AVX-512."""
    limits = (
        ("NOTHING", ""),
        ("ATEN_CPU_CAPABILITY", "default"),
        ("ONEDNN_MAX_CPU_ISA", "SSE41"),
    )
    folders = set()
    for name, value in limits:
        monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
        monkeypatch.setenv(name, value)
        machine.keep_compiled_kernels_apart()
        folders.add(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert len(folders) == 3


def test_the_users_folder_of_compiled_kernels_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/kernels")
    machine.keep_compiled_kernels_apart()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/kernels"


# 61,000 MiB are 64.0 GB.
APPS = [["7", "other", "61000"], ["8", "/usr/bin/python3", "[N/A]"]]
"""Rows of nvidia-smi: process id, name, used MiB."""


@pytest.mark.parametrize(
    ("used", "apps", "ours", "gold"),
    [
        ("3", APPS, 0, ""),
        ("[N/A]", APPS, 0, ""),
        ("61000", APPS[:1], 0, "other (process 7, 64.0 GB)"),
        ("61000", APPS, 1, "other (process 7, 64.0 GB), /usr/bin/python3 (process 8)"),
        ("61000", APPS[:1], 1, ""),
        ("61000", [], 1, ""),
        ("61000", [], 0, "other processes (64.0 GB)"),
    ],
)
def test_who_uses_a_gpu(
    used: str, apps: list[list[str]], ours: int, gold: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = {
        "--query-gpu=memory.used": [[used]],
        "--query-compute-apps=pid,process_name,used_memory": apps,
    }
    monkeypatch.setattr(machine, "nvidia_smi", lambda ids, query: rows[query])
    assert machine.gpu_users(["0"], ours) == gold
    assert machine.gpu_users([], ours) == ""


@pytest.mark.parametrize(
    ("name", "limits", "gold"),
    [
        # A container sees its own group as that of all processes.
        ("0::/", {"": ("3000000", 1_200_000)}, 2_000_000),
        ("0::/", {"": ("max", 0)}, None),
        # The limits of the groups around it count, too.
        ("0::/jobs/7", {"jobs": ("3000000", 2_500_000), "jobs/7": ("max", 0)}, 700_000),
        ("0::/jobs/7", {"jobs": ("max", 0), "jobs/7": ("1000000", 5_000_000)}, 0),
        # Version 1, or no control groups.
        ("4:memory:/jobs/7", {}, None),
        (None, {}, None),
    ],
)
def test_memory_that_a_control_group_limits(
    name: str | None,
    limits: dict[str, tuple[str, int]],
    gold: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the used bytes, 200,000 are files that were not read lately."""
    groups = tmp_path / "groups"
    for group, (limit, used) in limits.items():
        folder = groups / group
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text("anon 5\ninactive_file 200000\nactive_file 7\n")
    own_name = tmp_path / "cgroup"
    if name is not None:
        own_name.write_text(f"{name}\n")
    monkeypatch.setattr(machine, "CONTROL_GROUPS", groups)
    monkeypatch.setattr(machine, "CONTROL_GROUP", own_name)
    available = machine.available_bytes()
    if gold is None:
        # What the system has; other tests use memory meanwhile.
        assert available > 100_000_000
    else:
        assert available == gold
