"""The engine ExLlamaV3: refusals, scores with a stand-in for its API, real scores on a GPU."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from compare_q.backends.base import Layer, ScoreRequest
from compare_q.backends.checkpoint.checkpoint_config import CheckpointConfig
from compare_q.backends.common.packages import installed_versions
from compare_q.backends.exllama.exllama_engine import ExLlamaV3Engine
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.backends.logits_engine import LogitsEngine
from compare_q.backends.reference.head import Head, head_logits
from compare_q.backends.reference.store import open_reference, seal
from tests.support import ROOT, exllamav3_stub
from tests.support.exllamav3_stub import HIDDEN, PADDED, Linear, LinearEXL3, Model
from tests.support.processes import users_environment
from tests.support.toy import TOY_VOCAB, brute_force, planned, refusal, save_llama, toy_windows

ATOL_LOGIT = 0.1
"""Tolerance from Transformers in float32, with logits up to 7.6.

Transformers in float16 on a CPU is off by 0.025.
"""
ON_A_GPU = pytest.mark.skipif(
    not (torch.cuda.is_available() and installed_versions(("exllamav3",))),
    reason="no CUDA GPU, or no exllamav3",
)


def check(folder: Path) -> None:
    ExLlamaV3Engine.check(planned("toy", "exllamav3", str(folder), 100))


def with_config(folder: Path, toy_model: Path, **changes: Any) -> Path:
    """Write a folder with the toy model's config, with changed keys."""
    (folder / "config.json").write_text(
        json.dumps({**CheckpointConfig.read(toy_model).raw, **changes})
    )
    return folder


IMPORTED_BY_A_CHECK = """
import sys
from compare_q.backends.checkpoint import contents
from compare_q.backends.checkpoint.folder import HuggingFaceFolder
from compare_q.backends.exllama.exllama_engine import ExLlamaV3Engine
from tests.support.toy import planned

model = planned("toy", "exllamav3", sys.argv[1], 100)
files = ExLlamaV3Engine.files_of(model)
assert isinstance(files, HuggingFaceFolder)
ExLlamaV3Engine.import_engine(verbose=False)
before = set(sys.modules)
contents.checked(files)
print(sorted(set(sys.modules) - before))
"""


@pytest.mark.slow
def test_what_a_check_of_files_needs_is_imported_before_the_fork(
    toy_model: Path, tmp_path: Path
) -> None:
    """Otherwise each model of a table imports Transformers again, in 4 s."""
    exllamav3_stub.install(tmp_path)
    command = [sys.executable, "-c", IMPORTED_BY_A_CHECK, str(toy_model)]
    paths = os.pathsep.join([str(tmp_path), str(ROOT)])
    ran = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env=users_environment(PYTHONPATH=paths),
    )
    assert ran.returncode == 0, ran.stderr
    modules = ast.literal_eval(ran.stdout)
    # The model's own class, and what it imports.
    assert "transformers.models.llama.modeling_llama" in modules
    assert len(modules) < 30, modules


def test_formats_that_the_engine_gets_wrong(toy_model: Path, tmp_path: Path) -> None:
    for method in ("modelopt", "awq", "compressed-tensors", "exl2", "fp8"):
        folder = with_config(tmp_path, toy_model, quantization_config={"quant_method": method})
        assert f"exllamav3 does not read {method} models" in refusal(check, folder)
    check(with_config(tmp_path, toy_model, quantization_config={"quant_method": "exl3"}))
    folder = with_config(tmp_path, toy_model)
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert "does not read modelopt models" in refusal(check, folder)


def test_files_that_the_engine_would_load_as_well(toy_model: Path, tmp_path: Path) -> None:
    """exllamav3 loads every safetensors file; the size and the scores' key would lack this one."""
    folder = tmp_path / "toy"
    shutil.copytree(toy_model, folder)
    other = folder / "down_proj-4.0bpw.safetensors"
    shutil.copy(folder / "model.safetensors", other)
    assert f"{other}: exllamav3 would load it as well" in refusal(check, folder)
    other.rename(folder / "consolidated.safetensors")
    check(folder)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """Install the stand-in as exllamav3, with a GPU."""
    module = types.ModuleType("exllamav3")
    for name in ("Config", "Model"):
        setattr(module, name, getattr(exllamav3_stub, name))
    monkeypatch.setitem(sys.modules, "exllamav3", module)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    return module


def kept_as_reference(engine: LogitsEngine, folder: Path) -> tuple[str, str]:
    """Return ("states" or "logits", the reason for logits) of what a loaded model records."""
    (folder / "store").mkdir()
    windows = toy_windows(1, 20)
    list(engine.score(windows, ScoreRequest(record=folder / "store")))
    seal(folder / "store", {}, [window.digest for window in windows])
    store = open_reference(folder / "store")
    return store.contents, store.reason


def loaded(folder: Path, **options: Any) -> ExLlamaV3Engine:
    engine = ExLlamaV3Engine(planned("toy", "exllamav3", str(folder), 100, options))
    engine.load()
    return engine


def test_logits_are_cut_to_the_vocabulary(stand_in: Any, toy_model: Path) -> None:
    engine = loaded(toy_model)
    windows = toy_windows(2, 30, 3)
    for scores, window in zip(engine.score(windows, ScoreRequest()), windows, strict=True):
        full = Model.last.forward(torch.from_numpy(window.token_ids).long().unsqueeze(0))[0]
        assert full.shape == (30, PADDED)
        np.testing.assert_allclose(
            scores.logprob, brute_force(full[:, :TOY_VOCAB], window), atol=1e-5
        )
    engine.logits(windows[0])
    assert Model.last.params == {"attn_mode": "flash_attn_nc"}


def test_kernels_of_loading_are_not_those_of_scoring(
    stand_in: Any, toy_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading runs the model on a chunk; its kernels must not be reported as those of scoring."""
    monkeypatch.setattr(exllamav3_stub, "LinearFP16", LinearEXL3)
    engine = loaded(toy_model)
    assert {layer.kernel for layer in engine.layers()} == {"LinearEXL3.exl3_gemm"}
    assert engine.provenance()["attention"] == []


def test_states_and_head_give_the_logits(stand_in: Any, toy_model: Path, tmp_path: Path) -> None:
    engine = loaded(toy_model)
    head = engine.head()
    weight, bias, facts = head
    assert (tuple(weight.shape), bias, facts) == (
        (TOY_VOCAB, HIDDEN),
        None,
        Head(TOY_VOCAB, "float16"),
    )
    logits = engine.logits(toy_windows(1, 20)[0])
    torch.testing.assert_close(head_logits(facts, engine.states(), weight, bias), logits)
    assert kept_as_reference(engine, tmp_path) == ("states", "")
    module = engine.model.modules[-1]
    module.softcap = 30.0
    module.post_scale = 0.5
    assert engine.head()[2] == Head(TOY_VOCAB, "float16", 30.0, 0.5)


def test_layers_and_provenance(stand_in: Any, toy_model: Path) -> None:
    engine = loaded(toy_model, reserve_per_device=1.5)
    weight = engine.model.modules[-1].inner.weight
    for layer, (bits, ran) in enumerate([(3, True), (3.5, None), (3, True)]):
        inner = LinearEXL3(weight)
        inner.K = bits
        inner._fused_reconstruct = ran
        engine.model.modules.insert(layer, Linear(f"model.layers.{layer}.mlp.up_proj", inner))

    def fn_triton_attn_nocache() -> None: ...

    engine.model.modules[0].dispatch_cache = {(0, 1): False}
    engine.model.modules[-2].dispatch_cache = {"fn": fn_triton_attn_nocache, (0, 1): False}
    engine.logits(toy_windows(1, 10)[0])
    up = "model.layers.*.mlp.up_proj"
    assert engine.layers() == (
        Layer(up, "exl3 3.0 bpw", "float16", "LinearEXL3.reconstruct_hgemm", count=2),
        Layer(up, "exl3 3.5 bpw", "float16", "LinearEXL3.exl3_gemm"),
        Layer("lm_head", "float16", "float16", "LinearFP16"),
    )
    assert engine.provenance() == {
        "rope": {},
        "model_class": "Model",
        "dtype": "float16",
        "devices": ["cpu"],
        "attention": ["fn_triton_attn_nocache"],
        "batch": "one window at a time",
        "override_tensors": [],
        "options": {"reserve_per_device": 1.5},
        "no_kv_cache": "windows are scored whole, without one",
    }


@pytest.fixture(scope="module")
def fitting_toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose projections are multiples of 128, as exllamav3 requires.

    Its head of 320 is padded to 384.
    """
    keys = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
    }
    return save_llama(tmp_path_factory.mktemp("toy") / "llama-256", **keys, initializer_range=0.1)


@pytest.mark.engine
@ON_A_GPU
def test_logits_of_the_real_engine(fitting_toy: Path) -> None:
    peer = TransformersEngine(
        planned("toy", "transformers", str(fitting_toy), 300, {"dtype": "float32"})
    )
    backend = ExLlamaV3Engine(planned("toy", "exllamav3", str(fitting_toy), 300))
    peer.load()
    backend.load()
    for length in (20, 300):  # fewer than 32 rows use other kernels
        (window,) = toy_windows(1, length)
        logits = backend.logits(window)
        expected = peer.logits(window).to(logits.device)
        assert tuple(logits.shape) == (length, TOY_VOCAB)
        torch.testing.assert_close(logits.float(), expected, atol=ATOL_LOGIT, rtol=0.0)
    assert sum(layer.count for layer in backend.layers()) == 2 * 7 + 1
    assert backend.provenance()["attention"]
    peer.close()
    backend.close()
