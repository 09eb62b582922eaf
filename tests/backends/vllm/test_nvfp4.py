"""NVFP4 in vLLM where it has no kernel for it: against the format's definition, and against another implementation."""

from __future__ import annotations

import json
import shutil
import tomllib
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
from backends.vllm import backend as vllm_score
from backends.vllm import install
from backends.vllm.backend import VllmScoreBackend
from eval.run import scoring
from tests.backends.vllm.test_backend import engine, request_for, scores_of
from tests.support import ROOT
from tests.support.toy import ATOL_LOGPROB, GPU, TOY_CONTEXT, brute_force, refusal, toy_windows

CPU_ONLY = pytest.mark.skipif(GPU, reason="on a GPU vLLM has kernels of its own")
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EVEN_FIRST = np.array([*E2M1[::2], *E2M1[1::2]])
"""The values that win ties come first: those whose last bit is 0."""
WINDOWS = toy_windows(3, 100)


def unpacked(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Weights [out, in] in float64 of packed ones, uint8 [out, in / 2], the low four bits first: sign, E2M1."""
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1).long()
    values = torch.tensor(E2M1, dtype=torch.float64)[codes & 7] * (1 - 2 * (codes >> 3))
    groups = values.unflatten(1, (-1, 16)) * scale.double()[:, :, None] / global_scale.double()
    return groups.flatten(1)


def rounded(x: torch.Tensor, global_scale: float) -> torch.Tensor:
    """Activations [n, in] rounded to NVFP4: FP8 scales of groups of 16 under the global one, then the nearest E2M1."""
    groups = x.double().unflatten(-1, (-1, 16))
    scale = groups.abs().amax(-1, keepdim=True) / 6 * global_scale
    scale = scale.clamp(max=448).to(torch.float8_e4m3fn).double() / global_scale
    ratios = torch.where(scale > 0, groups / scale, 0).numpy()
    nearest = EVEN_FIRST[np.abs(np.abs(ratios)[..., None] - EVEN_FIRST).argmin(-1)]
    return (torch.from_numpy(nearest * np.sign(ratios)) * scale).flatten(-2).to(x.dtype)


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
    return [brute_force(rows, window) for rows, window in zip(logits, WINDOWS, strict=True)]


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
    for row, logprobs in enumerate(gold):
        np.testing.assert_allclose(weight_only["scores"][row].logprob, logprobs, atol=ATOL_LOGPROB)
    assert {group.layer.kernel for group in weight_only["layers"]} == {
        "CpuNvFp4W4A16LinearKernel", "UnquantizedEmbeddingMethod",
    }  # fmt: skip


def transformers_logprobs(folder: Path, dtype: str) -> np.ndarray[Any, Any]:
    """Log-probabilities of WINDOWS, [rows, 99], by Transformers."""
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
    logprobs = np.array([found[row].logprob for row in range(len(WINDOWS))])
    without = np.array([weight_only["scores"][row].logprob for row in range(len(WINDOWS))])
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

    from backends.vllm import plugin  # registers: what it did is undone here, and again after the test

    shipped = {
        platform: list(them)
        for platform, them in linear._POSSIBLE_NVFP4_KERNELS.items()
        if platform != PlatformEnum.CPU
    }
    monkeypatch.setattr(linear, "_POSSIBLE_NVFP4_KERNELS", shipped)
    monkeypatch.setattr(linear, "MarlinNvFp4LinearKernel", MarlinNvFp4LinearKernel)
    return SimpleNamespace(plugin=plugin, linear=linear, marlin=MarlinNvFp4LinearKernel, cpu=PlatformEnum.CPU)


@pytest.mark.engine
@CPU_ONLY
def test_registering_twice_is_registering_once(kernels: Any) -> None:
    before = {name: value for name, value in vars(kernels.linear).items() if name.startswith("_POSSIBLE")}
    gpus = dict(kernels.linear._POSSIBLE_NVFP4_KERNELS)
    for _ in range(2):
        kernels.plugin.register()
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
    kernels.plugin.register()
    assert shipped == kernels.linear._POSSIBLE_NVFP4_KERNELS
    assert kernels.linear.MarlinNvFp4LinearKernel is kernels.marlin


def test_unequal_scales_end_the_run_before_it_starts(
    checkpoints: Any, write_specs: Any, compare_q: Any, monkeypatch: pytest.MonkeyPatch, toy_model: Path, tmp_path: Path
) -> None:
    from demo import quantize

    monkeypatch.setattr(quantize, "FUSED", ())
    quantize.quantize(toy_model, "NVFP4A16", tmp_path / "unequal")
    data, models = write_specs([{"load_fn": "vllm_score", "label": "x", "model_dir": str(tmp_path / "unequal")}])
    ran = compare_q("-d", data, "-m", models, "--check")
    assert ran.status == 2
    assert (
        "x: model_dir: model.layers.0.mlp: gate_proj and up_proj have unequal weight_global_scale ("
        in ran.err + ran.out
    )


def with_scales(folder: Path, *names: str) -> Path:
    """A checkpoint of one-byte NVFP4 layers, each with the scales that are named."""
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "compressed-tensors"}}))
    tensors = {f"{name.rpartition('.')[0]}.weight_packed": torch.zeros(1, dtype=torch.uint8) for name in names}
    save_file(tensors | {name: torch.ones(1) for name in names}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("names", "arguments"),
    [
        (("o_proj.weight_global_scale",), {}),
        (("o_proj.weight_global_scale", "o_proj.input_global_scale"), {"linear_backend": "emulation"}),
        (
            ("mlp.experts.0.w2.weight_global_scale", "mlp.experts.0.w2.input_global_scale"),
            {"linear_backend": "emulation", "moe_backend": "emulation"},
        ),
        (
            ("o_proj.weight_global_scale", "o_proj.input_global_scale", "mlp.experts.0.w2.weight_global_scale"),
            {"linear_backend": "emulation"},
        ),
    ],
)
def test_what_is_emulated(names: tuple[str, ...], arguments: dict[str, str], tmp_path: Path) -> None:
    """Activations that are to be rounded; a weight-only layer is what its scheme says anyway."""
    folder = with_scales(tmp_path / "x", *names)
    VllmScoreBackend.check(request_for(folder, emulate=True))
    assert vllm_score.emulation_arguments(vllm_score.nvfp4_scales.nvfp4_layers(folder)) == arguments
    for name in arguments:
        said = refusal(VllmScoreBackend.check, request_for(folder, emulate=True, **{name: "marlin"}))
        assert said == f"engine.{name}: chosen by engine.emulate; give one of the two"


def test_emulate_is_not_an_argument_of_vllm(toy_model: Path) -> None:
    assert "emulate" not in install.arguments()
    assert "emulate" not in vllm_score.engine_arguments(request_for(toy_model, emulate=True), {}, cpu=False)


def test_nothing_to_emulate(toy_model: Path, tmp_path: Path) -> None:
    VllmScoreBackend.check(request_for(toy_model, emulate=False))
    assert "engine.emulate: nothing to emulate: no layer of" in refusal(
        VllmScoreBackend.check, request_for(toy_model, emulate=True)
    )
    assert "engine.emulate: must be true or false (got 'yes')" in refusal(
        VllmScoreBackend.check, request_for(toy_model, emulate="yes")
    )


def test_a_vllm_without_emulation_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    folder = with_scales(tmp_path / "x", "o_proj.weight_global_scale", "o_proj.input_global_scale")
    monkeypatch.setattr(install, "arguments", lambda: frozenset({"enforce_eager", "dtype"}))
    said = refusal(VllmScoreBackend.check, request_for(folder, emulate=True))
    assert "engine.linear_backend: the installed vLLM has no such argument" in said


def test_installed_it_is_a_plugin_of_vllm() -> None:
    """What `vllm serve` loads where compare_q is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (entry,) = project["entry-points"]["vllm.general_plugins"].values()
    module, _, name = entry.partition(":")
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    assert f"def {name}() -> None:" in source


@pytest.mark.parametrize(
    ("options", "quantized", "how"),
    [
        ({}, False, ""),
        ({"quantization": "fp8"}, False, "quantization"),
        ({"quantization": "compressed-tensors"}, True, ""),
        ({"quantization": "x", "quantization_config": {"a": 1}}, True, "quantization_config"),
        ({"hf_overrides": {"quantization_config": {}}}, False, "quantization_config"),
        ({"hf_overrides": {"rope_theta": 1}}, False, ""),
        ({"load_format": "bitsandbytes"}, False, "load_format"),
    ],
)
def test_what_quantizes_while_loading(options: dict[str, Any], quantized: bool, how: str) -> None:
    """Then the checkpoint's headers do not say what is stored, and the size is n/a."""
    assert vllm_score.quantized_on_load(options, quantized=quantized) == how


def test_files_and_options_that_vllm_takes_otherwise(toy_model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "toy"
    shutil.copytree(toy_model, folder)
    said = refusal(VllmScoreBackend.check, request_for(folder, quantization_config={"linear": {"weight": "fp8"}}))
    assert said == "engine.quantization_config: vLLM ignores it without engine.quantization; give both"
    shutil.copy(folder / "model.safetensors", folder / "other.safetensors")
    assert "other.safetensors: vLLM would load it as well" in refusal(VllmScoreBackend.check, request_for(folder))
