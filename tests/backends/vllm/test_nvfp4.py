"""NVFP4 in vLLM where it has no kernel for it: against the format's definition, and against another implementation."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from backends.base import LoadRequest, Task
from backends.hf.backend import TransformersBackend
from backends.layers.groups import groups_from_json
from backends.vllm import layers, plugin
from backends.worker import scoring
from eval.common import processes
from tests.support import ROOT
from tests.support.nvfp4 import rounded, unpacked
from tests.support.toy import ATOL_LOGPROB, GPU, TOY_CONTEXT, brute_force, toy_windows
from tests.support.vllm_engine import engine, scores_of

CPU_ONLY = pytest.mark.skipif(GPU, reason="on a GPU vLLM has kernels of its own")
WINDOWS = toy_windows(3, 100)


@pytest.fixture(scope="module")
def checkpoints(toy_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Preset -> the toy model quantized to it."""
    from demo.quantize import quantize

    folder = tmp_path_factory.mktemp("nvfp4")

    def made(preset: str) -> Path:
        if not (folder / preset).exists():
            quantize(toy_model, preset, folder / preset)
        return folder / preset

    return made


def reference(toy_model: Path, quantized: Path) -> list[list[float]]:
    """Log-probabilities of WINDOWS by the toy model in float32 with the checkpoint's weights, by the definition, and
    its activations rounded where the checkpoint has scales for them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
    with safe_open(quantized / "model.safetensors", "pt") as file:
        for name, layer in model.named_modules():
            if f"{name}.weight_packed" not in file.keys():  # noqa: SIM118
                continue
            parts = (
                file.get_tensor(f"{name}.{part}") for part in ("weight_packed", "weight_scale", "weight_global_scale")
            )
            layer.weight.data = unpacked(*parts).float()
            if f"{name}.input_global_scale" in file.keys():  # noqa: SIM118
                scale = float(file.get_tensor(f"{name}.input_global_scale"))
                layer.register_forward_pre_hook(lambda _, given, scale=scale: (rounded(given[0], scale),))
    with torch.inference_mode():
        logits = [model(torch.from_numpy(window.token_ids).long()[None]).logits[0] for window in WINDOWS]
    return [brute_force(own, window) for own, window in zip(logits, WINDOWS, strict=True)]


@pytest.fixture(scope="module")
def weight_only(checkpoints: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Scores of the weight-only checkpoint in vLLM, in float32, and the kernels that ran; no plugin is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "none")
        with engine(checkpoints("NVFP4A16"), tmp_path_factory.mktemp("log") / "a16", emulate=True) as backend:
            yield {"scores": scores_of(backend, WINDOWS), "layers": backend.layers()}


@pytest.mark.engine
@CPU_ONLY
def test_weight_only_against_the_definition(weight_only: dict[str, Any], toy_model: Path, checkpoints: Any) -> None:
    gold = reference(toy_model, checkpoints("NVFP4A16"))
    for index, logprobs in enumerate(gold):
        np.testing.assert_allclose(weight_only["scores"][index].logprob, logprobs, atol=ATOL_LOGPROB)
    assert {group.layer.kernel for group in weight_only["layers"]} == {
        "CpuNvFp4W4A16LinearKernel", "UnquantizedEmbeddingMethod",
    }  # fmt: skip


@pytest.mark.engine
@CPU_ONLY
def test_what_ran_was_foretold_without_a_weight(
    weight_only: dict[str, Any], checkpoints: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(processes.ENVIRONMENT)
    told, refused = processes.apart(layers.predicted, "asking", folders=[str(checkpoints("NVFP4A16")), "none"])
    found, ran = (
        [(each.layer.name, each.layer.weights, each.layer.kernel, each.count) for each in groups if each.count > 1]
        for groups in (groups_from_json(told), weight_only["layers"])
    )
    assert len(ran) == 4  # without the head, whose weights have the dtype of the run
    assert found == ran
    assert refused == "none/config.json: missing; model_dir must be a Hugging Face model folder"


def transformers_logprobs(folder: Path, dtype: str) -> np.ndarray[Any, Any]:
    """Log-probabilities of WINDOWS, [windows, 99], by Transformers."""
    backend = TransformersBackend(LoadRequest("x", "transformers", str(folder), TOY_CONTEXT, {"dtype": dtype}))
    backend.load()
    scores = [scores.logprob for scores in scoring.token_scores(backend, WINDOWS, Task())]
    backend.close()
    return np.stack(scores)


@pytest.mark.engine
@CPU_ONLY
def test_weight_only_against_compressed_tensors(weight_only: dict[str, Any], toy_model: Path, checkpoints: Any) -> None:
    """Its own decompression, which Transformers runs in bf16 only: as far off as bf16 makes the unquantized model."""
    rounding = np.abs(transformers_logprobs(toy_model, "bfloat16") - transformers_logprobs(toy_model, "float32"))
    found = np.stack([weight_only["scores"][window.index].logprob for window in WINDOWS])
    off = np.abs(found - transformers_logprobs(checkpoints("NVFP4A16"), "bfloat16"))
    assert off.mean() < 1.5 * rounding.mean()
    assert np.abs(found - transformers_logprobs(toy_model, "float32")).mean() > 5 * rounding.mean()


@pytest.mark.engine
@CPU_ONLY
def test_w4a4_against_the_definition(
    toy_model: Path, checkpoints: Any, weight_only: dict[str, Any], tmp_path: Path
) -> None:
    gold = np.array(reference(toy_model, checkpoints("NVFP4")))
    with engine(checkpoints("NVFP4"), tmp_path / "log") as backend:
        found = scores_of(backend, WINDOWS)
        kernels = {group.layer.kernel for group in backend.layers()}
    logprobs = np.array([found[window.index].logprob for window in WINDOWS])
    without = np.array([weight_only["scores"][window.index].logprob for window in WINDOWS])
    np.testing.assert_allclose(logprobs, gold, atol=ATOL_LOGPROB)
    assert np.abs(logprobs - without).mean() > 0.1
    assert kernels == {"EmulationNvFp4LinearKernel", "UnquantizedEmbeddingMethod"}


@pytest.mark.engine
def test_emulation_against_the_definition() -> None:
    """One layer, inputs over six orders of magnitude, one group of zeros."""
    from vllm.model_executor.kernels.linear.nvfp4.base import NvFp4LinearLayerConfig
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel

    generator = torch.Generator().manual_seed(0)
    device = "cuda" if GPU else "cpu"
    packed = torch.randint(0, 256, (24, 32), generator=generator, dtype=torch.uint8)
    scale = torch.rand(24, 4, generator=generator).mul(448).to(torch.float8_e4m3fn)
    x = torch.randn(16, 64, generator=generator) * 10 ** torch.empty(16, 4).uniform_(
        -6, 0, generator=generator
    ).repeat_interleave(16, 1)
    x[3, :16] = 0
    inputs = 6 * 448 / float(x.abs().max())
    layer = SimpleNamespace(
        weight=packed.to(device),
        weight_scale=scale.to(device),
        weight_global_scale=torch.tensor(1 / 300.0, device=device),
        input_global_scale_inv=torch.tensor(inputs, device=device),
    )
    kernel = EmulationNvFp4LinearKernel(NvFp4LinearLayerConfig())
    kernel.process_weights_after_loading(layer)
    found = kernel.apply_weights(layer, x.to(device)).cpu()
    gold = rounded(x, inputs).double() @ unpacked(packed, scale, torch.tensor(300.0)).T
    np.testing.assert_allclose(found, gold, atol=1e-5 * float(gold.abs().max()))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's kernel tables as it ships them."""
    import vllm.model_executor.kernels.linear as linear
    from vllm.model_executor.kernels.linear.nvfp4.marlin import MarlinNvFp4LinearKernel
    from vllm.platforms import PlatformEnum

    monkeypatch.setenv(plugin.KERNELS, "1")

    shipped = {
        platform: list(them)
        for platform, them in linear._POSSIBLE_NVFP4_KERNELS.items()
        if platform != PlatformEnum.CPU
    }
    monkeypatch.setattr(linear, "_POSSIBLE_NVFP4_KERNELS", shipped)
    monkeypatch.setattr(linear, "MarlinNvFp4LinearKernel", MarlinNvFp4LinearKernel)
    return SimpleNamespace(linear=linear, marlin=MarlinNvFp4LinearKernel, cpu=PlatformEnum.CPU)


@pytest.mark.engine
@CPU_ONLY
def test_registering_twice_is_registering_once(kernels: Any) -> None:
    before = {name: value for name, value in vars(kernels.linear).items() if name.startswith("_POSSIBLE")}
    gpus = dict(kernels.linear._POSSIBLE_NVFP4_KERNELS)
    for _ in range(2):
        plugin.register()
        assert {
            **gpus,
            kernels.cpu: [kernels.linear.EmulationNvFp4LinearKernel],
        } == kernels.linear._POSSIBLE_NVFP4_KERNELS
        for use_a16, name in ((True, "CpuNvFp4W4A16LinearKernel"), (False, "EmulationNvFp4LinearKernel")):
            assert type(kernels.linear.init_nvfp4_linear_kernel(use_a16=use_a16)).__name__ == name
    assert all(getattr(kernels.linear, name) is value for name, value in before.items())


@pytest.mark.engine
def test_other_platforms_keep_their_kernels(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
    shipped = dict(kernels.linear._POSSIBLE_NVFP4_KERNELS)
    plugin.register()
    assert shipped == kernels.linear._POSSIBLE_NVFP4_KERNELS
    assert kernels.linear.MarlinNvFp4LinearKernel is kernels.marlin


WHAT_A_SERVER_LOADS = """
import os, sys

import vllm.model_executor.kernels.linear, vllm.model_executor.layers.fused_moe.oracle.nvfp4
from vllm import LLM, plugins

def everything():
    modules = {name: vars(module) for name, module in sys.modules.items() if name.partition(".")[0] == "vllm"}
    return {
        (name, key): repr(value) if isinstance(value, dict | list) else id(value)
        for name, named in modules.items() if name != "vllm.plugins" for key, value in named.items()
    }

for wanted in sys.argv[1:]:
    os.environ["COMPARE_Q_KERNELS"] = wanted
    before, plugins.plugins_loaded = everything(), False
    plugins.load_general_plugins()
    after = everything()
    print("backends.vllm.plugin" in sys.modules, *sorted({key[1] for key in before if before[key] != after.get(key)}))
"""


@pytest.mark.engine
@CPU_ONLY
def test_installed_the_plugin_replaces_nothing_of_a_vllm_that_compare_q_did_not_start(tmp_path: Path) -> None:
    """In one process of vLLM: first as for `vllm serve`, then as for compare_q's worker."""
    (tmp_path / "own-1.dist-info").mkdir()
    (tmp_path / "own-1.dist-info" / "METADATA").write_text("Name: own\nVersion: 1\n")
    entry = "[vllm.general_plugins]\ncompare_q = backends.vllm.plugin:register\n"
    (tmp_path / "own-1.dist-info" / "entry_points.txt").write_text(entry)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "VLLM_PLUGINS": "compare_q"}
    words = [sys.executable, "-c", WHAT_A_SERVER_LOADS, "", "1"]
    ran = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    alone, ours = ran.stdout.splitlines()
    assert alone == "True", ran.stderr
    replaced = {"MarlinNvFp4LinearKernel", "_POSSIBLE_KERNELS", "_POSSIBLE_NVFP4_KERNELS", "backend_to_kernel_cls"}
    assert replaced < set(ours.split())  # with registers that grow as more of vLLM is imported
