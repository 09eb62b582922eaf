"""NVFP4 experts on a CPU: vLLM's own objects against the format's definition, and a mixture in a real vLLM."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from backends.base import Layer, LayerGroup, LoadRequest, Task
from backends.hf.backend import TransformersBackend
from backends.layers.groups import KVCache
from backends.worker import scoring
from tests.support.nvfp4 import rounded, unpacked
from tests.support.toy import ATOL_LOGPROB, GPU, TOY_CONTEXT, toy_windows
from tests.support.vllm_engine import engine, scores_of

pytestmark = [pytest.mark.engine, pytest.mark.skipif(GPU, reason="on a GPU vLLM has kernels of its own")]
EXPERTS, HIDDEN, INNER, CHOSEN, TOKENS = 4, 32, 48, 2, 20
WINDOWS = toy_windows(2, 100)


def packed(generator: torch.Generator, *shape: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random packed weights and scales of [experts, out, in]."""
    codes = torch.randint(0, 256, (*shape[:2], shape[2] // 2), generator=generator, dtype=torch.uint8)
    return codes, torch.rand(*shape[:2], shape[2] // 16, generator=generator).mul(448).to(torch.float8_e4m3fn)


def by_definition(given: torch.Tensor, inputs: Any, made: dict[str, Any], route: tuple[Any, Any]) -> torch.Tensor:
    """What the experts make of ``given``, token by token, in float64; ``inputs``: global scales of both inputs."""
    out = torch.zeros(given.shape, dtype=torch.float64)
    taken = rounded(given, inputs[0]) if inputs else given
    for token, (experts, weights) in enumerate(zip(*route, strict=True)):
        for expert, weight in zip(experts.tolist(), weights.tolist(), strict=True):
            wide = made["w13"][expert] @ taken[token].double()
            middle = torch.nn.functional.silu(wide[:INNER]) * wide[INNER:]
            middle = rounded(middle.float()[None], inputs[1])[0].double() if inputs else middle
            out[token] += weight * (made["w2"][expert] @ middle)
    return out


@pytest.mark.parametrize("name", ["CpuNvFp4W4A16Experts", "CpuNvFp4EmulationExperts"])
def test_experts_against_the_definition(name: str) -> None:
    """Every expert has a global scale of its own for its weights, and shares those of the inputs."""
    from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, MoEActivation

    from backends.vllm import cpu_kernels as classes

    generator = torch.Generator().manual_seed(0)
    worth = torch.rand(2, EXPERTS, generator=generator) / 300 + 1e-4
    (w13, s13), (w2, s2) = packed(generator, EXPERTS, 2 * INNER, HIDDEN), packed(generator, EXPERTS, HIDDEN, INNER)
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
    """Weight-only in float32: as Transformers has it with the dequantized weights."""
    pytest.importorskip("compressed_tensors", reason="compressed_tensors is not installed")
    from benchmarks.toy_moe_files import MoeShape, make

    shape = MoeShape(hidden=128, heads=2, experts=4, intermediate=128)
    folders = make(tmp_path, shape, ("nvfp4-w4a16",))
    plain = LoadRequest("x", "transformers", str(folders["nvfp4-dequantized"]), TOY_CONTEXT, {"dtype": "float32"})
    reference = TransformersBackend(plain)
    reference.load()
    gold = [scores.logprob for scores in scoring.token_scores(reference, WINDOWS, Task())]
    reference.close()
    with engine(folders["nvfp4-w4a16"], tmp_path / "log", alone=True) as backend:
        found = scores_of(backend, WINDOWS)
        ran, said = backend.layers(), backend.provenance()
    for window, logprobs in zip(WINDOWS, gold, strict=True):
        np.testing.assert_allclose(found[window.index].logprob, logprobs, atol=ATOL_LOGPROB)
    experts = Layer("model.layers.*.mlp.experts.routed_experts", "nvfp4 g16", "float32", "CpuNvFp4W4A16Experts")
    assert LayerGroup(experts, 2) in ran
    assert not any(group.layer.asked for group in ran)
    assert said["kv_cache"] == "float32"
    assert said["kv_cache_layers"] == [
        asdict(KVCache("model.layers.*.self_attn.attn", 2, "float32", "", "", "CPUAttentionBackendImpl", ""))
    ]
