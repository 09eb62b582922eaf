"""Modules and ``--by`` to parts, by hand."""

from __future__ import annotations

import pytest

from compare_q.backends.base import QuantizedModule
from compare_q.eval.where import parts
from tests.support.toy import refusal


def module(name: str, layer: int | None = 0, n_weights: int = 10) -> QuantizedModule:
    return QuantizedModule(name, layer, n_weights, "int4 g32", 4.5 * n_weights, 16.0 * n_weights)


MODULES = [
    module("layers.0.self_attn.q_proj"),
    module("layers.0.mlp.down_proj", n_weights=30),
    module("layers.1.self_attn.q_proj", 1),
    module("layers.1.mlp.down_proj", 1, 30),
    module("lm_head", None, 50),
]


def names(found: list[parts.Part]) -> dict[str, tuple[str, ...]]:
    return {part.name: part.module_names for part in found}


def test_parts_by_layer_are_the_layers_and_each_module_outside_them() -> None:
    found = parts.parts_of(MODULES, "layer")
    assert names(found) == {
        "layer 0": ("layers.0.self_attn.q_proj", "layers.0.mlp.down_proj"),
        "layer 1": ("layers.1.self_attn.q_proj", "layers.1.mlp.down_proj"),
        "lm_head": ("lm_head",),
    }
    first, _, last = found
    assert (first.layer, first.kind, first.n_weights) == (0, "", 40)
    assert (first.bits, first.reference_bits) == (180.0, 640.0)
    assert (last.layer, last.kind) == (None, "lm_head")


def test_parts_by_kind_go_through_all_layers() -> None:
    found = parts.parts_of(MODULES, "kind")
    assert names(found) == {
        "q": ("layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"),
        "down": ("layers.0.mlp.down_proj", "layers.1.mlp.down_proj"),
        "lm_head": ("lm_head",),
    }
    assert [(part.kind, part.layer) for part in found] == [
        ("q", None),
        ("down", None),
        ("lm_head", None),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("layers.0.self_attn.qkv_proj", "qkv"),
        ("layers.0.mlp.gate_up_proj", "gate_up"),
        ("layers.0.mlp.gate_proj", "gate"),
        ("layers.0.mlp.gate", "router"),
        ("layers.0.mlp.experts", "experts"),
        ("layers.0.mlp.experts.17.down_proj", "experts"),
        ("layers.0.block_sparse_moe.experts.3.w2", "experts"),
        ("layers.0.mlp.shared_expert.down_proj", "shared_expert.down"),
        ("layers.0.mlp.shared_experts.up_proj", "shared_experts.up"),
        ("layers.0.mlp.shared_expert_gate", "shared_expert_gate"),
        ("layers.0.self_attn.kv_b_proj", "kv_b"),
        ("layers.3", "layer"),
        ("lm_head", "lm_head"),
    ],
)
def test_the_kind_of_a_module_is_its_last_name(name: str, kind: str) -> None:
    assert parts.kind_of(module(name)) == kind


def test_parts_by_matrix_are_the_modules() -> None:
    found = parts.parts_of(MODULES, "matrix")
    assert names(found) == {each.name: (each.name,) for each in MODULES}


def test_a_pattern_makes_a_part_of_each_match() -> None:
    found = parts.parts_of(MODULES, r"self_attn|mlp")
    assert list(names(found)) == ["self_attn", "mlp"]
    assert found[1].module_names == ("layers.0.mlp.down_proj", "layers.1.mlp.down_proj")
    assert parts.unmatched(MODULES, found) == 50


def test_groups_of_a_pattern_are_the_name_of_a_part() -> None:
    found = parts.parts_of(MODULES, r"layers\.(\d).*\.(q|down)_|(lm)_head")
    assert list(names(found)) == ["0 q", "0 down", "1 q", "1 down", "lm"]
    assert parts.unmatched(MODULES, found) == 0


@pytest.mark.parametrize("by", ["nothing", "x*"])
def test_a_pattern_that_matches_nothing_names_a_module(by: str) -> None:
    text = refusal(parts.parts_of, MODULES, by)
    assert by in text
    assert "layers.0.self_attn.q_proj" in text


def test_a_wrong_pattern_and_a_word_in_the_plural_are_refused() -> None:
    assert "'layers.(q'" in refusal(parts.check_pattern, "layers.(q")
    assert "'kind'" in refusal(parts.check_pattern, "kinds")
    for word in ("layer", "kind", "matrix", "q_proj"):
        parts.check_pattern(word)


@pytest.mark.parametrize("by", ["kind", "matrix", "layers"])
def test_whole_layers_can_only_be_divided_by_layer(by: str) -> None:
    whole = [module("layers.0"), module("layers.1", 1), module("lm_head", None)]
    assert "--by layer" in refusal(parts.parts_of, whole, by)
    assert list(names(parts.parts_of(whole, "layer"))) == ["layer 0", "layer 1", "lm_head"]
