"""What is known of the installed ggml: which types it multiplies, against its own tables; its builds and its log."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from pathlib import Path
from types import SimpleNamespace

import gguf
import pytest
import torch

from compare_q.backends.layers.schemes import UNKNOWN
from compare_q.backends.llamacpp import ggml
from tests.support.llama_cpp import needs_llama_cpp


class CpuTraits(ctypes.Structure):
    """``ggml_type_traits_cpu``."""

    _fields_ = [("from_float", ctypes.c_void_p), ("vec_dot", ctypes.c_void_p), ("vec_dot_type", ctypes.c_int),
                ("nrows", ctypes.c_int64)]  # fmt: skip


@needs_llama_cpp
def test_cpu_activations_are_those_of_the_librarys_own_table() -> None:
    import llama_cpp

    (file,) = (Path(llama_cpp.__file__).parent / "lib").glob("libggml-cpu.so")
    traits = ctypes.CDLL(str(file)).ggml_get_type_traits_cpu
    traits.restype = ctypes.POINTER(CpuTraits)
    types = {kind.name.lower().replace("_k", "_K"): traits(int(kind)).contents for kind in gguf.GGMLQuantizationType}
    multiplied = {
        name: found.vec_dot_type for name, found in types.items() if found.vec_dot and not name.startswith("q8_1")
    }
    assert len(multiplied) > 25
    for name, kind in multiplied.items():
        assert ggml.cpu_activations(name).lower() == gguf.GGMLQuantizationType(kind).name.lower(), name


@pytest.mark.parametrize(
    ("capability", "weights", "expected"),
    [
        ((9, 0), "q4_K", "q8_1"), ((9, 0), "bf16", "bf16"), ((9, 0), "iq1_m", "f16"), ((9, 0), "mxfp4", "q8_1"),
        ((12, 0), "mxfp4", UNKNOWN), ((12, 0), "q4_K", "q8_1"), ((7, 5), "q4_K", UNKNOWN),
    ],
)  # fmt: skip
def test_cuda_activations(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], weights: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(ggml, "libraries", lambda: {"libggml-base.so": "", "libggml-cpu.so": "", "libggml-cuda.so": ""})
    assert ggml.activations(weights, "cuda") == expected


def test_what_a_second_backend_may_take_over_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml, "libraries", lambda: {"libggml-base.so.0": "", "libggml-cpu.so": ""})
    assert ggml.activations("q4_1", "cpu") == "q8_1"
    assert ggml.activations("ggml type 99", "cpu") == UNKNOWN
    for other in ("libggml-cuda.so", "libggml-blas.so"):
        monkeypatch.setattr(ggml, "libraries", lambda name=other: {"libggml-cpu.so": "", name: ""})
        assert ggml.activations("q4_1", "cpu") == UNKNOWN
    assert ggml.activations("q4_1", "metal") == UNKNOWN


def test_environment_that_changes_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_CUDA_MMQ_PREC", "q8")
    monkeypatch.setenv("LLAMA_CACHE", "/somewhere")
    monkeypatch.setenv("GGML_SCHED_DEBUG", "2")
    assert ggml.environment() == {"GGML_CUDA_MMQ_PREC": "q8"}


def test_log(capfd: pytest.CaptureFixture[str]) -> None:
    """Debugging is not printed, but tells the devices; a line's first word is a function's name."""
    log = ggml.Log()
    log.hear(1, b"load_tensors: layer   3 assigned to device CUDA0, is_swa = 0\n", None)
    log.hear(2, b"load_tensors: fine\n", None)
    log.hear(3, b"load: strange\n", None)
    log.hear(4, b"model_load: error: no such thing\n", None)
    log.hear(4, b"model_load: error: no such thing\n", None)
    log.hear(5, b".", None)
    assert (log.devices, log.warnings, log.reason()) == ({3: "CUDA0"}, ["strange"], "error: no such thing")
    assert capfd.readouterr().err == log.text
    assert log.text.startswith("load_tensors: fine\n")
    assert ggml.Log().reason() == "no reason given"


def test_build_is_what_the_folder_of_libraries_holds(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also of a build copied over an installed one, and of the folder that llama-cpp-python is told to load from."""
    for folder in ("lib", "mine"):
        (tmp_path / folder).mkdir()
        for name in ("libggml-cpu.so", "libggml-base.so", "libllama.so"):
            (tmp_path / folder / name).write_bytes(b"1")
    monkeypatch.delenv("LLAMA_CPP_LIB_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: SimpleNamespace(origin=str(tmp_path / "__init__.py")))
    builds = [ggml.build()]
    (tmp_path / "lib" / "libllama.so").write_bytes(b"22")
    builds.append(ggml.build())
    os.utime(tmp_path / "lib" / "libllama.so", (0, 0))
    builds.append(ggml.build())
    (tmp_path / "lib" / "libggml-cuda.so").touch()
    assert ggml.installed_backends() == {"cpu", "cuda"}
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "mine"))
    assert ggml.installed_backends() == {"cpu"}
    builds.append(ggml.build())
    assert len(set(builds)) == 4
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", str(tmp_path / "nowhere"))
    assert ggml.libraries() == {}
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)  # nothing is installed
    assert ggml.libraries() == {}


@needs_llama_cpp
def test_libraries_are_those_that_llama_cpp_python_loads() -> None:
    import llama_cpp

    (file,) = (Path(llama_cpp.__file__).parent / "lib").glob("libllama.so")
    stat = file.stat()
    assert ggml.libraries()["libllama.so"] == f"{stat.st_size} {stat.st_mtime_ns}"
    assert "cpu" in ggml.installed_backends()
