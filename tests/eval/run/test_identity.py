"""What a score depends on is in its key: each input is changed, and the key must change with it; no engine runs.

What real engines compute then: ``benchmarks/stale_hits.py``.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compare_q.backends.common import machine
from compare_q.backends.worker import worker
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.run.config import RunConfig
from compare_q.eval.run.plan import plan_models, score_key
from compare_q.eval.specs.reading import parse_model_spec
from tests.support.planned import planned
from tests.support.toy import needs_accelerate

pytestmark = needs_accelerate
DATA: Any = SimpleNamespace(series="s")


@pytest.fixture
def model(toy_model: Path, tmp_path: Path) -> Path:
    """A copy of the toy that a test may change."""
    return Path(shutil.copytree(toy_model, tmp_path / "model"))


def key_of(folder: Path, **options: Any) -> str:
    """The key of a model's scores in Transformers on the CPU; what the engine refuses is an error."""
    config = RunConfig(Cache(Path("nowhere")), Progress(quiet=True))
    keys = {"load_fn": "transformers", "model_dir": str(folder), "engine": options}
    (model,) = plan_models(config, [parse_model_spec(keys, Path("m.json"))], 100)
    return score_key(config, model, DATA)


def replaced(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text((folder / name).read_text().replace(old, new))


def flipped(folder: Path) -> None:
    """One bit of a weight, in place."""
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


CHANGES: dict[str, Callable[[Path], object]] = {
    "config.json": replaced("config.json", '"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'),
    "generation_config.json": replaced("generation_config.json", "{", '{"suppress_tokens": [1],'),
    "weights": flipped,
    "code": lambda folder: (folder / "modeling_toy.py").write_text("1"),
    "weights that another engine may open": lambda folder: (folder / "other.safetensors").write_bytes(bytes(8)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_files(model: Path, change: str) -> None:
    before, content = key_of(model), {file: file.read_bytes() for file in model.iterdir()}
    CHANGES[change](model)
    assert {file: file.read_bytes() for file in model.iterdir()} != content
    assert key_of(model) != before


def test_files_that_change_no_score(model: Path) -> None:
    before = key_of(model)
    (model / "README.md").write_text("1")
    (model / "tokenizer_config.json").write_text("{}")
    assert key_of(model) == before


def test_options_and_the_files_that_they_name(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    seen = {key_of(model), key_of(model, dtype="float32"), key_of(model, attn_implementation=str(file))}
    for content in "ab":
        file.write_text(content)
        seen.add(key_of(model, attn_implementation=str(file)))
    assert len(seen) == 5


def test_a_repository_of_the_hub_in_an_option_is_refused(model: Path) -> None:
    request = planned("toy", "transformers", str(model), 100, {"attn_implementation": "owner/kernels"})
    said = worker.inspect(request).problem
    assert said.startswith("engine.attn_implementation: owner/kernels is no path here")


@pytest.mark.parametrize("package", ["peft", "kernels", "bitsandbytes", "flash_attn", "deep_gemm"])
def test_packages(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    before = key_of(model)
    folder = tmp_path / f"{package}-99.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99\n")
    assert key_of(model) != before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ATEN_CPU_CAPABILITY", "default"), ("ONEDNN_MAX_CPU_ISA", "AVX2"), ("MKL_CBWR", "COMPATIBLE"),
        ("OMP_NUM_THREADS", "1"), ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-AVX2"), ("NVIDIA_TF32_OVERRIDE", "1"),
        ("ONEDNN_DEFAULT_FPMATH_MODE", "BF16"), ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1"),
    ],
)  # fmt: skip
def test_variables(model: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.delenv(name, raising=False)
    before = key_of(model)
    monkeypatch.setenv("COMPARE_Q_NOTHING", "1")
    assert key_of(model) == before
    monkeypatch.setenv(name, value)
    assert key_of(model) != before


@pytest.mark.parametrize(("part", "value"), [("instructions", "avx2"), ("cores", 99), ("cpu", "another")])
def test_processors(model: Path, monkeypatch: pytest.MonkeyPatch, part: str, value: Any) -> None:
    before, processor = key_of(model), machine.processor()
    monkeypatch.setattr(machine, "processor", lambda: {**processor, part: value})
    assert key_of(model) != before
