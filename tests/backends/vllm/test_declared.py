"""The scheme of each layer, read by us and by the config classes of the installed vLLM from the same configs."""

from __future__ import annotations

from typing import Any

import pytest

from backends.layers.schemes import ALGORITHMS, declared
from tests.support.downloads import DOWNLOADS

pytestmark = pytest.mark.engine
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
PREFIX = "model.layers.0"


@pytest.fixture(scope="module")
def quantization() -> Any:
    """vLLM's package of quantization configs."""
    return pytest.importorskip("vllm.model_executor.layers.quantization", reason="vLLM is not installed")


def test_modelopt_mixed(quantization: Any) -> None:
    """Fused layers and experts in the engine's names; both say no more of a layer that is not listed."""
    layers = {
        f"{PREFIX}.self_attn.{name}": {"quant_algo": "FP8"} for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    } | {f"{PREFIX}.mlp.experts.{number}.up_proj": {"quant_algo": "NVFP4", "group_size": 16} for number in range(3)}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    theirs = quantization.get_quantization_config("modelopt_mixed").from_config(dict(config))
    theirs.packed_modules_mapping = FUSED
    ours = declared(config)
    for layer in ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.experts", "mlp.experts.1.up_proj", "mlp.down_proj"):
        assert ours.of(f"{PREFIX}.{layer}") == ALGORITHMS.get(str(theirs._resolve_quant_algo(f"{PREFIX}.{layer}")))


def test_quark(quantization: Any) -> None:
    """Weights and activations, by the keys of vLLM's kernels in our words."""
    from vllm.model_executor.layers.linear import LinearBase

    from backends.vllm.layers import key_text

    for name in ("Quark MXFP4, FP8 by layer", "Quark MXFP6", "Quark int4"):
        download = DOWNLOADS[name]
        export: dict[str, Any] = {"kv_cache_group": [], "pack_method": "reorder"}
        config = {"layer_type_quant_config": {}, **download.quantization, "export": export, "exclude": []}
        theirs, ours = quantization.get_quantization_config("quark").from_config(config), declared(config)
        for layer in download.layers:
            weights, activations, _ = theirs.get_scheme_cls(LinearBase, layer)
            asked = ours.of(layer)
            assert asked is not None
            assert (activations is None) == (asked.activations == "")
            if activations is not None and "mx" not in asked.activations:
                assert key_text(activations, "token") == asked.activations
            if weights.scale.group_shape.col > 0 and asked.weights.startswith("mxfp4"):
                assert key_text(weights, "channel") == asked.weights


def test_auto_round(quantization: Any) -> None:
    """Bits and groups of layers that are named or matched, and of the others."""
    extra = {f"{PREFIX}.self_attn.o_proj": {"bits": 8}, r".*layers\.[1-3]\..*down_proj": {"bits": 2, "group_size": 32}}
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True, "extra_config": extra}
    theirs, ours = quantization.get_quantization_config("inc").from_config(dict(config)), declared(config)
    theirs.packed_modules_mapping = FUSED
    for layer in (f"{PREFIX}.self_attn.o_proj", "model.layers.2.mlp.down_proj", "model.layers.2.mlp.gate_up_proj"):
        bits, group, _ = theirs.config_parser.get_layer_config(object(), layer)
        asked = ours.of(layer)
        assert asked is not None
        assert asked.weights == f"int{bits} g{group}"
