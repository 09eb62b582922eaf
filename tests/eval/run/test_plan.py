"""The plan of a model, and the key of its scores."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from compare_q import backends
from compare_q.backends.base import Decode, Engine, ModelFacts, ModelFiles, Storage
from compare_q.backends.common import machine
from compare_q.backends.common.machine import Gpu
from compare_q.backends.layers import noise
from compare_q.backends.worker import worker
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.run.gpu_pool import GpuPool
from compare_q.eval.run.model_hardware import emulated_dtypes
from compare_q.eval.run.model_identity import identity
from compare_q.eval.run.plan import plan_models
from compare_q.eval.run.run_config import RunConfig
from compare_q.eval.run.run_model import RunModel
from compare_q.eval.run.workers import Workers
from compare_q.eval.specs.spec_files import parse_model_spec
from tests.support.fake_engine import FakeEngine
from tests.support.run_models import run_model
from tests.support.toy import needs_accelerate, planned, refusal

MIB = 1024**2
GPU_MIB = 1000.0
ROOM_MIB = 700


def config_of(count: int = 0, mib: float = GPU_MIB, **keys: Any) -> RunConfig:
    pool = GpuPool([Gpu(str(index), "NVIDIA H200", "580.1", mib) for index in range(count)])
    return RunConfig(Cache(Path("nowhere")), Progress(quiet=True), Workers(gpus=pool), pool, **keys)


def model_of(config: RunConfig, max_tokens: int = 100, **keys: Any) -> RunModel:
    spec = parse_model_spec(
        {"load_fn": "fake", "model_dir": "none", "label": "m", **keys}, Path("m.json")
    )
    (model,) = plan_models(config, [spec], max_tokens)
    return model


@pytest.fixture
def needs(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that sets the fake engine's number of GPUs and bytes of weights."""

    # With the CPU build of torch that tests may run in, a model's hardware would be the processor.
    monkeypatch.setattr(machine, "cpu_build_of_torch", lambda: False)

    def engine(gpus: int | None, weights: float | None = None, *, remote: bool = False) -> None:
        monkeypatch.setattr(FakeEngine, "gpus", classmethod(lambda cls, model: gpus))
        monkeypatch.setattr(ModelFiles, "is_remote", remote)
        size = Storage(vram_bits=None if weights is None else weights * 8)
        monkeypatch.setattr(ModelFiles, "storage", lambda self: size)

    return engine


@pytest.mark.parametrize(
    ("weights", "gold", "remote", "mib"),
    [
        (1, 1, False, GPU_MIB),
        (ROOM_MIB * MIB, 1, False, GPU_MIB),  # 70 % of the GPU
        (ROOM_MIB * MIB + 1, 2, False, GPU_MIB),
        (100 * ROOM_MIB * MIB, 4, False, GPU_MIB),  # more than the run has: all
        (None, 4, False, GPU_MIB),
        (MIB, 4, True, GPU_MIB),  # a model that must be downloaded
        (MIB, 4, False, 0.0),  # GPUs of unknown size
    ],
)
def test_weights_say_how_many_gpus(
    weights: float | None, gold: int, remote: bool, mib: float, needs: Any
) -> None:
    needs(None, weights, remote=remote)
    assert model_of(config_of(4, mib)).n_gpus == gold


@pytest.mark.parametrize(
    ("engine", "keys", "gold"),
    [
        (1, {}, 1),
        (4, {}, 4),
        (1, {"gpus": 3}, 3),
        (None, {"gpus": 2}, 2),
        # 0 means all GPUs, in a spec and from an engine.
        (4, {"gpus": 0}, 4),
        (0, {}, 4),
    ],
)
def test_the_spec_and_then_the_engine_say_how_many(
    engine: int | None, keys: dict[str, int], gold: int, needs: Any
) -> None:
    needs(engine, MIB)
    model = model_of(config_of(4), **keys)
    assert (model.n_gpus, model.hardware["gpus"]) == (gold, ["NVIDIA H200"] * gold)
    assert model_of(config_of(0), **keys).n_gpus == 0
    if keys.get("gpus", 0) > 2:
        assert (
            refusal(model_of, config_of(2), **keys)
            == "m: gpus: the model needs 3 GPUs, the run has 2"
        )


def test_ray_does_not_place_what_an_engine_spreads_over_machines(
    needs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine would wait for GPUs that the run has already reserved for it."""
    needs(0)
    monkeypatch.setattr(FakeEngine, "spread_by", classmethod(lambda cls, model: "executor"))
    config = config_of(4)
    assert model_of(config).n_gpus == 4
    monkeypatch.setattr(config.workers, "is_local", False)
    assert "engine.executor" in refusal(model_of, config)


@pytest.mark.parametrize(
    ("load_fn", "options", "gold"),
    [
        ("vllm_score", {}, 1),
        ("vllm_score", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ("transformers", {"device_map": "auto"}, 0),
        ("transformers_auto", {}, None),
        ("exllamav3", {"device": "cuda:1"}, 0),
        ("llamacpp", {}, None),
        ("llamacpp", {"tensor_split": [0.5, 0.5]}, 0),
    ],
)
def test_what_engines_need(load_fn: str, options: dict[str, Any], gold: int | None) -> None:
    """0 means all GPUs, because the options name GPUs by their index among all."""
    engine_class: type[Engine] = backends.resolve(load_fn, None)[1]
    assert engine_class.gpus(planned("m", load_fn, "none", 100, options)) == gold


def flip_last_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_every_byte_counts_where_weights_are_verified(model: Path) -> None:
    """A changed byte outside of all samples is noticed, even with an unchanged file time.

    A file is hashed once.
    """
    file = model / "model.safetensors"
    config = config_of(verify_weights=True)
    planned_model = run_model(planned("m", "transformers", str(model), 100))
    before = identity(config, planned_model)["weights"]
    stat = file.stat()
    assert before == [hashlib.sha256(file.read_bytes()).hexdigest()]
    flip_last_bit(file)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    # The same run does not hash the file again.
    assert identity(config, planned_model)["weights"] == before
    again = config_of(verify_weights=True)
    assert identity(again, planned_model)["weights"] == [
        hashlib.sha256(file.read_bytes()).hexdigest()
    ]


def test_a_noise_floor_is_measured_again_where_its_noise_has_changed(
    toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = [
        run_model(planned("m", "transformers", str(toy_model), 100, options))
        for options in ({"noise": "bf16"}, {})
    ]
    before = [identity(config_of(), model) for model in models]
    monkeypatch.setattr(noise, "NOISE_VERSION", noise.NOISE_VERSION + 1)
    after = [identity(config_of(), model) for model in models]
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True]


@pytest.mark.parametrize(
    ("emulates", "dtype", "said"),
    [
        (True, "bfloat16", True),
        (True, "float16", True),
        (True, "float32", False),
        (False, "bfloat16", False),
    ],
)
def test_a_line_says_what_float32_would_gain(
    emulates: bool, dtype: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "emulates_bf16", lambda: emulates)
    monkeypatch.setattr(machine, "cpu_build_of_torch", lambda: False)
    monkeypatch.setattr(FakeEngine, "capabilities", replace(FakeEngine.capabilities, torch=True))
    monkeypatch.setattr(ModelFiles, "facts", lambda _: ModelFacts(dtype=dtype))
    on_cpu = model_of(config_of())
    on_gpu = model_of(config_of(1)).with_planned(label="on a GPU")
    cpu_build = on_gpu.info.model_copy(update={"cpu_only": True})
    of_cpus = replace(on_gpu, info=cpu_build).with_planned(label="of a CPU build")
    line = emulated_dtypes(config_of(), [on_cpu, on_gpu, of_cpus])
    assert (line is not None) is said
    assert line is None or line.startswith("m, of a CPU build: ")


@pytest.mark.parametrize(
    ("load_fn", "options", "gold"),
    [
        ("vllm_score", {}, "bfloat16"),
        ("vllm_score", {"dtype": "float32"}, "float32"),
        ("transformers", {}, "float16"),
        ("transformers", {"dtype": "auto"}, "bfloat16"),
        ("transformers_auto_bf16", {"dtype": "float32"}, "float32"),
    ],
)
def test_the_dtype_of_products(
    load_fn: str, options: dict[str, Any], gold: str, toy_model: Path
) -> None:
    assert (
        backends.files_of(planned("m", load_fn, str(toy_model), 100, options)).facts().dtype == gold
    )


@pytest.mark.parametrize("edge", [None, 100])
def test_rotary_factors_of_long_contexts_are_other_scores(
    edge: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp chooses them by its context: the run's longest window, which ``-r`` may omit."""
    monkeypatch.setattr(ModelFiles, "facts", lambda _: ModelFacts(rope_changes_above=edge))
    models = [run_model(planned("m", "fake", "none", longest)) for longest in (99, 100, 101, 102)]
    short, at_edge, above, long = (identity(config_of(), model) for model in models)
    # A window as long as the edge still has the factors of short contexts.
    assert short == at_edge
    assert above == long
    assert (short != long) == ("long_rope" in short) == (edge is not None)


@pytest.mark.parametrize(
    ("keys", "gold"),
    [
        ({}, None),
        ({"phase": "prefill"}, None),
        ({"phase": "decode"}, Decode(1, 32)),
        ({"phase": "decode", "step": 4, "batch": 512}, Decode(4, 512)),
    ],
)
def test_the_steps_of_decode(keys: dict[str, Any], gold: Decode | None) -> None:
    """The steps are part of the key of scores.

    Keys of prefill are the same as before decode existed.
    """
    model = model_of(config_of(), **keys)
    facts = identity(config_of(), model)
    assert model.planned.decode == gold
    assert facts.get("decode") == (None if gold is None else asdict(gold))
    assert facts.keys() - {"decode"} == {
        "version",
        "model",
        "engine",
        "load_fn",
        "options",
        "versions",
        "hardware",
    }


@pytest.mark.parametrize(
    ("load_fn", "keys", "reason"),
    [
        ("vllm_server", {"batch": 1}, "phase: 'vllm_server' cannot be scored in decode steps"),
        ("transformers", {}, "phase: 'transformers' cannot be scored in decode steps"),
        ("llamacpp", {}, "phase: 'llamacpp' cannot be scored in decode steps"),
        ("exllamav3", {}, "phase: 'exllamav3' cannot be scored in decode steps"),
        ("vllm_score", {"batch": 513}, "batch: 'vllm_score' decodes 512 windows"),
    ],
)
def test_an_engine_that_cannot_decode_so(load_fn: str, keys: dict[str, Any], reason: str) -> None:
    message = refusal(model_of, config_of(), load_fn=load_fn, phase="decode", **keys)
    assert message.startswith(f"m: {reason}")


def key_of(folder: Path, **options: Any) -> str:
    """Return the key of a model's scores in Transformers on the CPU.

    A refusal by the engine is an error.
    """
    model = model_of(config_of(), load_fn="transformers", model_dir=str(folder), engine=options)
    return Cache.key("scores", identity(config_of(), model))


@pytest.fixture
def model(toy_model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(toy_model, tmp_path / "model"))


def replaced(file: Path, old: bytes, new: bytes) -> None:
    assert old in file.read_bytes()
    file.write_bytes(file.read_bytes().replace(old, new))


def install(folder: Path, package: str, patch: pytest.MonkeyPatch) -> None:
    """Install a package of this name next to the model."""
    patch.setattr(sys, "path", [str(folder.parent), *sys.path])
    metadata = folder.parent / f"{package}-99.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 99\n")


def other_processor(patch: pytest.MonkeyPatch, part: str, value: Any) -> None:
    """Change one property of this machine's processor."""
    processor = {**machine.processor(), part: value}
    patch.setattr(machine, "processor", lambda: processor)


# Each of these makes a library choose other kernels, another precision or other threads.
VARIABLES = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2",
    "NVIDIA_TF32_OVERRIDE": "1",
    "ONEDNN_DEFAULT_FPMATH_MODE": "BF16",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "OMP_WAIT_POLICY": "ACTIVE",
}
CHANGES: dict[str, Callable[[Path, pytest.MonkeyPatch], object]] = {
    "config.json": lambda f, _: replaced(
        f / "config.json", b'"rms_norm_eps": 1e-06', b'"rms_norm_eps": 1e-05'
    ),
    "generation": lambda f, _: replaced(
        f / "generation_config.json", b"{", b'{"suppress_tokens": [1],'
    ),
    "one bit of a weight": lambda f, _: flip_last_bit(f / "model.safetensors"),
    "code": lambda f, _: (f / "modeling_toy.py").write_text("1"),
    "weights that another engine may open": lambda f, _: (f / "other.safetensors").write_bytes(
        bytes(8)
    ),
    **{
        package: partial(lambda name, f, patch: install(f, name, patch), package)
        for package in ("peft", "kernels", "bitsandbytes", "flash_attn", "deep_gemm")
    },
    **{
        name: partial(lambda name, _, patch: patch.setenv(name, VARIABLES[name]), name)
        for name in VARIABLES
    },
    "instructions": lambda _, patch: other_processor(patch, "instructions", "avx2"),
    "cores": lambda _, patch: other_processor(patch, "cores", 99),
    "another processor": lambda _, patch: other_processor(patch, "cpu", "another"),
}
"""Changes that change the key of scores; ``benchmarks/stale_hits.py`` shows what real engines then
compute."""


@needs_accelerate
@pytest.mark.parametrize("change", CHANGES)
def test_what_a_score_depends_on_is_in_its_key(
    model: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    # The environment of the tests may have it.
    monkeypatch.delenv(change, raising=False)
    before = key_of(model)
    # Scores depend on token ids, whatever files come with the weights.
    (model / "README.md").write_text("1")
    (model / "tokenizer_config.json").write_text("{}")
    # PASSIVE is what a worker sets itself; the other two do not change numbers.
    defaults = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_DUPLICATE_LIB_OK": "True",
        "TORCH_HUB_TOKEN": "x",
    }
    for name, value in {"COMPARE_Q_NOTHING": "1", **defaults}.items():
        monkeypatch.setenv(name, value)
    assert key_of(model) == before
    CHANGES[change](model, monkeypatch)
    assert key_of(model) != before


@needs_accelerate
def test_options_and_the_files_that_they_name(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "some.json"
    keys = {
        key_of(model),
        key_of(model, dtype="float32"),
        key_of(model, attn_implementation=str(file)),
    }
    for content in "ab":
        file.write_text(content)
        keys.add(key_of(model, attn_implementation=str(file)))
    # No option, another dtype, a path without a file, and a file with two contents.
    assert len(keys) == 5
    request = planned(
        "toy", "transformers", str(model), 100, {"attn_implementation": "owner/kernels"}
    )
    problem = worker.inspect(request).problem
    assert problem.startswith("engine.attn_implementation: owner/kernels is no path here")
