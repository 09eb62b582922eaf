"""What a model gets, and what its scores depend on: GPUs by its weights, and every byte of these if one asks for it."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compare_q import backends
from compare_q.backends.base import Decode, Engine, EngineInfo, ModelFacts, ModelFiles, PlannedModel, Storage
from compare_q.backends.common import machine
from compare_q.backends.common.machine import Gpu
from compare_q.backends.layers import noise
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.run.devices import Devices
from compare_q.eval.run.hosts import Hosts, Job, Session
from compare_q.eval.run.jobs import emulated_dtypes, identity, plan, wanted_gpus
from compare_q.eval.specs.reading import parse_model_spec
from tests.support.fake_engine import FakeEngine
from tests.support.planned import planned

MIB = 1024**2
GPU_MIB, ROOM_MIB = 1000.0, 700
REQUEST = planned("m", "fake", "none", 100)


def devices(count: int, mib: float = GPU_MIB) -> Devices:
    return Devices([Gpu(str(index), "NVIDIA H200", "580.1", mib) for index in range(count)])


def job(needs: int | None, weights: float | None = None, *, remote: bool = False, **keys: Any) -> Job:
    """A model of an engine that needs so many GPUs, with weights of so many bytes."""

    class Files(ModelFiles):
        @property
        def is_remote(self) -> bool:
            return remote

        def storage(self) -> Storage:
            assert not remote
            return Storage(vram_bits=None if weights is None else weights * 8)

    class Needing(FakeEngine):
        files = Files

        @classmethod
        def gpus(cls, request: PlannedModel) -> int | None:
            return needs

    spec = parse_model_spec({"load_fn": "fake", "model_dir": "none", **keys}, Path("m.json"))
    return Job(spec, "fake", Needing, REQUEST)


@pytest.mark.parametrize(
    ("weights", "gold"),
    [
        (1, 1),
        (ROOM_MIB * MIB, 1),  # 70 % of the GPU
        (ROOM_MIB * MIB + 1, 2),
        (3 * ROOM_MIB * MIB, 3),
        (100 * ROOM_MIB * MIB, 4),  # more than the run has: it gets all
        (None, 0),
    ],
)
def test_weights_say_how_many(weights: float | None, gold: int) -> None:
    assert wanted_gpus(job(None, weights), devices(4)) == gold


def test_what_cannot_be_told_gets_all() -> None:
    """A model that still has to be fetched, and GPUs that do not say how large they are."""
    assert wanted_gpus(job(None, remote=True), devices(4)) == 0
    assert wanted_gpus(job(None, MIB), devices(4, mib=0.0)) == 0


@pytest.mark.parametrize(("needs", "spec", "gold"), [(1, None, 1), (4, None, 4), (1, 3, 3), (None, 2, 2), (4, 0, 0)])
def test_the_spec_and_then_the_engine_say_how_many(needs: int | None, spec: int | None, gold: int) -> None:
    keys = {} if spec is None else {"gpus": spec}
    assert wanted_gpus(job(needs, MIB, **keys), devices(4)) == gold


def test_without_gpus_nothing_is_measured() -> None:
    assert wanted_gpus(job(None, remote=True), Devices()) == 0


@pytest.mark.parametrize(
    ("load_fn", "options", "gold"),
    [
        ("vllm_score", {}, 1),
        ("vllm_score", {"tensor_parallel_size": 2, "pipeline_parallel_size": 3}, 6),
        ("transformers", {}, 1),
        ("transformers", {"device_map": "auto"}, 0),
        ("transformers_auto", {}, None),
        ("exllamav3", {}, None),
        ("exllamav3", {"device": "cuda:1"}, 0),
        ("exllamav2", {"gpu_split": [10.0, 20.0]}, 0),
        ("llamacpp", {}, None),
        ("llamacpp", {"tensor_split": [0.5, 0.5]}, 0),
    ],
)
def test_what_engines_need(load_fn: str, options: dict[str, Any], gold: int | None) -> None:
    """0: all, since the options name GPUs by their places among all."""
    engine_class: type[Engine] = backends.resolve(load_fn, None)[1]
    assert engine_class.gpus(planned("m", load_fn, "none", 100, options)) == gold


def test_every_byte_counts_where_weights_are_verified(toy_model: Path, tmp_path: Path) -> None:
    """A byte that changes without the file's time, and that no sample need hold, is seen; a file is hashed once."""
    folder = tmp_path / "model"
    shutil.copytree(toy_model, folder)
    file = folder / "model.safetensors"
    spec = parse_model_spec({"load_fn": "transformers", "model_dir": str(folder)}, Path("m.json"))
    engine, engine_class = backends.resolve("transformers", None)
    request = planned("m", "transformers", str(folder), 100)
    session = Session(Cache(tmp_path / "cache"), Progress(quiet=True), verify_weights=True)

    def weights() -> list[str]:
        return list(identity(Job(spec, engine, engine_class, request), SimpleNamespace(series="s"), session)["weights"])

    before, stat, data = weights(), file.stat(), bytearray(file.read_bytes())
    assert before == [hashlib.sha256(data).hexdigest()]
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert weights() == before  # the same run does not hash the file again
    session.digests.clear()
    assert weights() == [hashlib.sha256(data).hexdigest()]


def test_a_noise_floor_is_measured_again_where_its_noise_has_changed(
    toy_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no other row is."""
    spec = parse_model_spec({"load_fn": "transformers", "model_dir": str(toy_model)}, Path("m.json"))
    engine, engine_class = backends.resolve("transformers", None)
    session = Session(Cache(tmp_path / "cache"), Progress(quiet=True))

    def keys() -> list[dict[str, Any]]:
        requests = [planned("m", "transformers", str(toy_model), 100, each) for each in ({"noise": "bf16"}, {})]
        jobs = [Job(spec, engine, engine_class, request) for request in requests]
        return [identity(job, SimpleNamespace(series="s"), session) for job in jobs]

    before = keys()
    monkeypatch.setattr(noise, "VERSION", noise.VERSION + 1)
    assert [a == b for a, b in zip(before, keys(), strict=True)] == [False, True]


@pytest.mark.parametrize(
    ("emulates", "dtype", "said"),
    [(True, "bfloat16", True), (True, "float16", True), (True, "float32", False), (False, "bfloat16", False)],
)
def test_a_line_says_what_float32_would_gain(
    emulates: bool, dtype: str, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "emulates_bf16", lambda: emulates)
    monkeypatch.setattr(FakeEngine, "capabilities", replace(FakeEngine.capabilities, torch=True))
    monkeypatch.setattr(ModelFiles, "facts", lambda _: ModelFacts(dtype=dtype))
    on_gpu = replace(job(1), gpus=(Gpu("0", "NVIDIA H200", "580.1", GPU_MIB),))
    for_cpus = replace(on_gpu, described=EngineInfo(installed=("fake", ""), cpu_only=True))
    line = emulated_dtypes([job(0), job(0, remote=True), on_gpu, for_cpus])
    assert (line is not None) is said
    if line is not None:
        assert line.startswith("m, m: 16-bit products are emulated on this CPU")


@pytest.mark.parametrize(
    ("load_fn", "options", "gold"),
    [("vllm_score", {}, "bfloat16"), ("vllm_score", {"dtype": "float32"}, "float32"), ("transformers", {}, "float16"),
     ("transformers", {"dtype": "auto"}, "bfloat16"), ("transformers_auto_bf16", {"dtype": "float32"}, "float32")],
)  # fmt: skip
def test_the_dtype_of_products(load_fn: str, options: dict[str, Any], gold: str, toy_model: Path) -> None:
    request = planned("m", load_fn, str(toy_model), 100, options)
    assert backends.resolve(load_fn, None)[1].files(request).facts().dtype == gold


@pytest.mark.parametrize("edge", [None, 100])
def test_rotary_factors_of_long_contexts_are_other_scores(
    tmp_path: Path, edge: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """llama.cpp takes them by its context, which is as long as the run's longest window: ``-r`` may leave that out."""
    monkeypatch.setattr(ModelFiles, "facts", lambda _: ModelFacts(rope_changes_above=edge))
    session, made = Session(Cache(tmp_path), Progress(quiet=True)), replace(job(0), engine_class=FakeEngine)
    jobs = [replace(made, request=REQUEST.updated(max_tokens=longest)) for longest in (99, 100, 101, 102)]
    short, at_edge, above, long = (identity(each, SimpleNamespace(series="s"), session) for each in jobs)
    assert short == at_edge
    assert above == long
    assert (short != long) == ("long_rope" in short) == (edge is not None)


@pytest.mark.parametrize(
    ("keys", "gold"),
    [({}, None), ({"phase": "prefill"}, None), ({"phase": "decode"}, Decode(1, 32)),
     ({"phase": "decode", "step": 4, "batch": 512}, Decode(4, 512)),
     ({"phase": "decode", "unscored": "prefill"}, Decode(1, 32, behind_prompts=True))],
)  # fmt: skip
def test_the_steps_of_decode(keys: dict[str, Any], gold: Decode | None, tmp_path: Path) -> None:
    """They are part of the key of scores, and prefill's keys are what they were before there was decode."""
    spec = parse_model_spec({"load_fn": "fake", "model_dir": "none", **keys}, Path("m.json"))
    (planned,), problems = plan([spec], 100, Hosts())
    assert (planned.request.decode, problems) == (gold, [])
    session = Session(Cache(tmp_path), Progress(quiet=True))
    found = identity(planned, SimpleNamespace(series="s"), session)
    assert found.get("decode") == (None if gold is None else asdict(gold))
    assert found.keys() - {"decode"} == {
        "version", "series", "model", "engine", "load_fn", "options", "versions", "hardware"
    }  # fmt: skip


@pytest.mark.parametrize("load_fn", ["vllm_score", "exllamav3", "exllamav2"])
def test_engines_that_compute_all_tokens_in_steps(load_fn: str) -> None:
    keys = {"load_fn": load_fn, "label": "m", "model_dir": "none", "phase": "decode", "unscored": "prefill"}
    reason = f"m: unscored: {load_fn!r} computes all tokens of a window in steps; leave it out"
    assert plan([parse_model_spec(keys, Path("m.json"))], 100, Hosts()) == ([], [reason])


@pytest.mark.parametrize(
    ("load_fn", "batch", "reason"),
    [
        ("vllm_server", 1, "phase: 'vllm_server' cannot be scored in decode steps; leave it out"),
        ("transformers", 2, "batch: 'transformers' decodes one window at a time; give no more"),
        ("llamacpp", 2, "batch: 'llamacpp' decodes one window at a time; give no more"),
        ("vllm_score", 513, "batch: 'vllm_score' decodes 512 windows at a time; give no more"),
    ],
)
def test_an_engine_that_cannot_decode_so(load_fn: str, batch: int, reason: str) -> None:
    keys = {"load_fn": load_fn, "label": "m", "model_dir": "none", "phase": "decode", "batch": batch}
    assert plan([parse_model_spec(keys, Path("m.json"))], 100, Hosts()) == ([], [f"m: {reason}"])
