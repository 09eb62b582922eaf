"""4-bit kernels that vLLM lacks, compared with the formats' definitions, another implementation, and vLLM's kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open

from compare_q.backends.base import Layer, ScoreRequest
from compare_q.backends.hf.engine import TransformersEngine
from compare_q.backends.layers.groups import KVCache, deviations
from tests.support import ROOT
from tests.support.toy import ATOL_LOGPROB, GPU, TOY_CONTEXT, brute_force, planned, toy_windows
from tests.support.vllm_engine import engine, scores_of

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EVEN_FIRST = np.array([*E2M1[::2], *E2M1[1::2]])
"""E2M1 values; those that win ties, whose last bit is 0, come first."""


def unpacked(packed: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> torch.Tensor:
    """Unpack weights uint8 [out, in / 2], low four bits first (sign, E2M1), into float64 [out, in]."""
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


pytestmark = [pytest.mark.engine, pytest.mark.skipif(GPU, reason="on a GPU vLLM has its own kernels")]
WINDOWS = toy_windows(3, 100)


def reference(toy_model: Path, quantized: Path) -> list[list[float]]:
    """Log-probabilities of WINDOWS by the toy model in float32, with the checkpoint's dequantized weights, and with
    rounded activations if the checkpoint has scales for them."""
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
def weight_only(quantized: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Scores of the weight-only checkpoint in vLLM, in float32, and the kernels that ran; no plugin is loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "none")
        with engine(quantized("NVFP4A16"), tmp_path_factory.mktemp("log") / "a16") as backend:
            yield {"scores": scores_of(backend, WINDOWS), "layers": backend.layers()}


def test_weight_only_against_the_definition(weight_only: dict[str, Any], toy_model: Path, quantized: Any) -> None:
    gold = reference(toy_model, quantized("NVFP4A16"))
    for index, logprobs in enumerate(gold):
        np.testing.assert_allclose(weight_only["scores"][index].logprob, logprobs, atol=ATOL_LOGPROB)
    assert {group.kernel for group in weight_only["layers"]} == {
        "CompareQNvFp4W4A16LinearKernel", "UnquantizedEmbeddingMethod",
    }  # fmt: skip


def test_w4a4_against_the_definition(
    toy_model: Path, quantized: Any, weight_only: dict[str, Any], tmp_path: Path
) -> None:
    gold = np.array(reference(toy_model, quantized("NVFP4")))
    with engine(quantized("NVFP4"), tmp_path / "log") as backend:
        found = scores_of(backend, WINDOWS)
        kernels = {group.kernel for group in backend.layers()}
    logprobs = np.array([found[window.index].logprob for window in WINDOWS])
    without = np.array([weight_only["scores"][window.index].logprob for window in WINDOWS])
    np.testing.assert_allclose(logprobs, gold, atol=ATOL_LOGPROB)
    assert np.abs(logprobs - without).mean() > 0.1
    assert kernels == {"EmulationNvFp4LinearKernel", "UnquantizedEmbeddingMethod"}


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
    changed = {key[1] for key in before if before[key] != after.get(key)}
    print("compare_q.backends.vllm.plugin" in sys.modules, *sorted(changed))
"""


def test_installed_the_plugin_replaces_nothing_of_a_vllm_that_compare_q_did_not_start(tmp_path: Path) -> None:
    """One process loads vLLM's plugins first as `vllm serve` does, then as compare_q's worker does."""
    (tmp_path / "own-1.dist-info").mkdir()
    (tmp_path / "own-1.dist-info" / "METADATA").write_text("Name: own\nVersion: 1\n")
    entry = "[vllm.general_plugins]\ncompare_q = compare_q.backends.vllm.plugin:register\n"
    (tmp_path / "own-1.dist-info" / "entry_points.txt").write_text(entry)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "VLLM_PLUGINS": "compare_q"}
    words = [sys.executable, "-c", WHAT_A_SERVER_LOADS, "", "1"]
    ran = subprocess.run(words, env=environment, cwd=tmp_path, capture_output=True, text=True)
    alone, ours = ran.stdout.splitlines()
    assert alone == "True", ran.stderr
    replaced = {"MarlinNvFp4LinearKernel", "_POSSIBLE_KERNELS", "_POSSIBLE_NVFP4_KERNELS", "backend_to_kernel_cls"}
    assert replaced < set(ours.split())  # and registers that grow as more of vLLM is imported


EXPERTS, HIDDEN, INNER, CHOSEN, TOKENS = 4, 32, 48, 2, 20


def random_packed(generator: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random packed weights and scales of [experts, out, in]."""
    codes = torch.randint(0, 256, (*shape[:2], shape[2] // 2), generator=generator, dtype=torch.uint8)
    return codes, torch.rand(*shape[:2], shape[2] // 16, generator=generator).mul(448).to(torch.float8_e4m3fn)


def by_definition(given: torch.Tensor, inputs: Any, made: dict[str, Any], route: tuple[Any, Any]) -> torch.Tensor:
    """Return the experts' output for ``given`` in float64, token by token; ``inputs``: global scales of both inputs."""
    out = torch.zeros(given.shape, dtype=torch.float64)
    taken = rounded(given, inputs[0]) if inputs else given
    for token, (experts, weights) in enumerate(zip(*route, strict=True)):
        for expert, weight in zip(experts.tolist(), weights.tolist(), strict=True):
            wide = made["w13"][expert] @ taken[token].double()
            middle = torch.nn.functional.silu(wide[:INNER]) * wide[INNER:]
            middle = rounded(middle.float()[None], inputs[1])[0].double() if inputs else middle
            out[token] += weight * (made["w2"][expert] @ middle)
    return out


@pytest.mark.parametrize("name", ["CompareQNvFp4W4A16Experts", "CompareQNvFp4EmulationExperts"])
def test_experts_against_the_definition(name: str) -> None:
    """Each expert has its own global scale for the weights; all experts share the global scales of the inputs."""
    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation

    from compare_q.backends.vllm import cpu_kernels as classes

    generator = torch.Generator().manual_seed(0)
    worth = torch.rand(2, EXPERTS, generator=generator) / 300 + 1e-4
    (w13, s13), (w2, s2) = (
        random_packed(generator, EXPERTS, 2 * INNER, HIDDEN),
        random_packed(generator, EXPERTS, HIDDEN, INNER),
    )
    made = {
        key: [unpacked(weights[each], scales[each], 1 / worth[row, each]) for each in range(EXPERTS)]
        for row, (key, weights, scales) in enumerate((("w13", w13, s13), ("w2", w2, s2)))
    }
    given = torch.randn(TOKENS, HIDDEN, generator=generator)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(TOKENS)])
    weights = torch.rand(TOKENS, CHOSEN, generator=generator)
    inputs = [torch.tensor(6 * 448 / 8.0), torch.tensor(6 * 448 / 4e4)]
    experts = object.__new__(getattr(classes, name))
    experts.moe_config = SimpleNamespace(in_dtype=torch.float32)
    experts.activation_config = ApplyMoEActivationConfig()
    experts.quant_config = SimpleNamespace(
        g1_alphas=worth[0], g2_alphas=worth[1], a1_gscale=inputs[0], a2_gscale=inputs[1]
    )
    layer = torch.nn.Module()
    for key, tensor in {"w13_weight": w13, "w13_weight_scale": s13, "w2_weight": w2, "w2_weight_scale": s2}.items():
        layer.register_parameter(key, torch.nn.Parameter(tensor, requires_grad=False))
    experts.process_weights_after_loading(layer)
    assert layer.w13_weight.shape == (EXPERTS, 2 * INNER, HIDDEN)
    output, rest = torch.full_like(given, torch.nan), dict.fromkeys(("a1q_scale", "a2_scale", "workspace13"))
    rest |= dict.fromkeys(("workspace2", "expert_tokens_meta", "expert_map"))
    experts.apply(
        output, given, layer.w13_weight, layer.w2_weight, weights, ids, MoEActivation.SILU, EXPERTS,
        apply_router_weight_on_input=False, **rest,
    )  # fmt: skip
    rounds = [float(each) for each in inputs] if "Emulation" in name else None
    gold = by_definition(given, rounds, made, (ids, weights))
    np.testing.assert_allclose(output, gold, atol=2e-5 * float(gold.abs().max()))


def test_a_mixture_in_vllm(tmp_path: Path) -> None:
    """Weight-only in float32, compared with Transformers on the dequantized weights."""
    pytest.importorskip("compressed_tensors", reason="compressed_tensors is not installed")
    from tests.support.toy_moe_files import nvfp4_weight_only

    nvfp4, dequantized = nvfp4_weight_only(tmp_path)
    plain = planned("x", "transformers", str(dequantized), TOY_CONTEXT, {"dtype": "float32"})
    reference = TransformersEngine(plain)
    reference.load()
    gold = [scores.logprob for scores in reference.score(WINDOWS[:2], ScoreRequest())]
    reference.close()
    with engine(nvfp4, tmp_path / "log", alone=True) as backend:
        found = scores_of(backend, WINDOWS[:2])
        ran, said = backend.layers(), backend.provenance()
    for window, logprobs in zip(WINDOWS[:2], gold, strict=True):
        np.testing.assert_allclose(found[window.index].logprob, logprobs, atol=ATOL_LOGPROB)
    name, kernel = "model.layers.*.mlp.experts.routed_experts", "CompareQNvFp4W4A16Experts"
    assert Layer(name, "nvfp4 g16", "float32", kernel, count=2) in ran
    assert not any(group.asked for group in ran)
    assert len(deviations(ran)) == 2  # both kernels are compare_q's
    assert said["kv_cache"] == "float32"
    cache = KVCache("model.layers.*.self_attn.attn", 2, "float32", "", "", "CPUAttentionBackendImpl", "", 1024.0)
    assert said["kv_cache_layers"] == [asdict(replace(cache, backend="CPU_ATTN"))]  # 2 heads of 64 keys and values


OUT, IN = 64, 96


def nibbles(numbers: np.ndarray[Any, Any], axis: int) -> torch.Tensor:
    """int4 numbers, eight of them along ``axis`` in one int32, the first one in its lowest bits."""
    moved = np.moveaxis(numbers.astype(np.uint32), axis, -1)
    words = moved.reshape(*moved.shape[:-1], -1, 8)
    packed = np.bitwise_or.reduce(words << (4 * np.arange(8, dtype=np.uint32)), axis=-1)
    return torch.from_numpy(np.moveaxis(packed, -1, axis).copy().view(np.int32))


def parameter(values: torch.Tensor, **dims: int) -> torch.nn.Parameter:
    """A parameter with attributes that name its dimensions, as vLLM's parameters have."""
    found = torch.nn.Parameter(values, requires_grad=False)
    vars(found).update(dims)
    return found


@pytest.mark.parametrize("outputs_first", [True, False])
@pytest.mark.parametrize("zero_points", [True, False])
@pytest.mark.parametrize("group", [32, IN])
def test_int4_against_the_definition(group: int, zero_points: bool, outputs_first: bool) -> None:
    """In the layout of compressed-tensors (``outputs_first``), or of GPTQ."""
    from vllm.model_executor.kernels.linear import MPLinearLayerConfig
    from vllm.scalar_type import scalar_types

    from compare_q.backends.vllm.cpu_kernels import CompareQInt4W4A16LinearKernel

    random = np.random.default_rng(0)
    numbers, groups = random.integers(0, 16, (OUT, IN)), IN // group
    scales = torch.from_numpy(random.uniform(0.01, 0.1, (OUT, groups))).float()
    zeros = random.integers(0, 16, (OUT, groups)) if zero_points else np.full((OUT, groups), 8)
    centered = numbers.reshape(OUT, groups, group) - zeros[..., None]
    gold = (centered * scales.double().numpy()[..., None]).reshape(OUT, IN)
    output_dim, input_dim = (0, 1) if outputs_first else (1, 0)

    def laid(values: Any) -> Any:
        return values if outputs_first else values.T

    layer = torch.nn.Module()
    where = {"output_dim": output_dim, "input_dim": input_dim}
    layer.q = parameter(nibbles(laid(numbers), input_dim), **where, packed_dim=input_dim)
    layer.s = parameter(laid(scales).contiguous(), **where)
    layer.z = parameter(nibbles(laid(zeros), output_dim), **where, packed_dim=output_dim) if zero_points else None
    layer.bias = None
    kind = scalar_types.uint4 if zero_points else scalar_types.uint4b8
    config = MPLinearLayerConfig((IN, OUT), (IN, OUT), kind, torch.float32, group, zero_points)
    kernel = CompareQInt4W4A16LinearKernel(config, "q", "s", "z")
    kernel.process_weights_after_loading(layer)
    x = torch.randn(5, IN, generator=torch.Generator().manual_seed(0))
    bias = torch.arange(OUT, dtype=torch.float32)
    expected = x.double().numpy() @ gold.T + np.arange(OUT)
    np.testing.assert_allclose(kernel.apply_weights(layer, x, bias), expected, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "has_product", "chosen"),
    [
        (torch.bfloat16, True, "CPUWNA16LinearKernel"),
        (torch.float32, True, "CompareQInt4W4A16LinearKernel"),
        (torch.bfloat16, False, "CompareQInt4W4A16LinearKernel"),
    ],
)
def test_ours_is_taken_where_vllm_would_fail(
    dtype: torch.dtype, has_product: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum
    from vllm.scalar_type import scalar_types

    from compare_q.backends.vllm import cpu_kernels

    for _ in range(2):
        cpu_kernels.add_kernels()
    assert linear._POSSIBLE_KERNELS[PlatformEnum.CPU].count(cpu_kernels.CompareQInt4W4A16LinearKernel) == 1
    assert linear._POSSIBLE_NVFP4_KERNELS[PlatformEnum.CPU] == [linear.EmulationNvFp4LinearKernel]
    ops = SimpleNamespace(_C=SimpleNamespace(**({"cpu_gemm_wna16": None} if has_product else {})))
    monkeypatch.setattr(cpu_kernels, "torch", SimpleNamespace(ops=ops, float32=torch.float32))
    config = linear.MPLinearLayerConfig((IN, OUT), (IN, OUT), scalar_types.uint4b8, dtype, 32, False)
    assert linear.choose_mp_linear_kernel(config).__name__ == chosen
