"""Lists to paste: they name the modules of a recipe, and no others."""

from __future__ import annotations

import ast
import json
import random
import re
import shlex
from fnmatch import fnmatchcase
from typing import Any

import pytest
import yaml

from compare_q.eval.where import recipe_lists
from compare_q.eval.where.name_patterns import patterns_of
from compare_q.eval.where.results import Module, Recipe

MATRICES = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.down_proj")
ALL = [f"layers.{layer}.{matrix}" for layer in range(12) for matrix in MATRICES] + ["lm_head"]


def lists_of(names: list[str], all_names: list[str] = ALL, **fields: Any) -> dict[str, str]:
    """Return first word of the tool -> text of its list; with the notes under ``notes``."""
    found = Recipe(
        **{"target": "kld=1", "keep_bits": 16, "is_reached": True, "bits": 1.0, **fields},
        parts=("x",),
        modules=tuple(names),
    )
    modules = []
    for name in all_names:
        module = Module(name=name, n_weights=1, weights="int4 g32", bits=4.5, reference_bits=16.0)
        modules.append(module)
    lists, notes = recipe_lists.lists_of(found, modules)
    texts = {each.tool.split(":")[0]: each.text for each in lists}
    return {**texts, "notes": "\n".join(notes)}


def is_in(name: str, patterns: list[str]) -> bool:
    """Return True if a module is matched as compressed-tensors matches it."""
    for pattern in patterns:
        if pattern.startswith("re:") and re.match(pattern.removeprefix("re:"), name):
            return True
        if name == pattern:
            return True
    return False


def is_overridden(tensor: str, keys: list[str]) -> bool:
    """Return True if ExLlamaV3 takes a tensor from the other model: ``*`` is any text."""
    for key in keys:
        pattern = ".*".join(re.escape(piece) for piece in key.split("*"))
        if re.fullmatch(pattern, tensor):
            return True
    return False


KEPT = [
    [name for name in ALL if name.endswith("down_proj")],
    ["layers.1.mlp.down_proj", "layers.10.mlp.down_proj", "layers.11.self_attn.q_proj"],
    ["lm_head"],
    [name for name in ALL if name.startswith("layers.7.")],
]


@pytest.mark.parametrize("kept", KEPT)
def test_the_lists_name_the_modules_and_no_others(kept: list[str]) -> None:
    texts = lists_of(kept)
    ignore = json.loads(texts["llm-compressor"])
    entries = ast.literal_eval(f"[{texts['ModelOpt']}]")
    override = yaml.safe_load(texts["ExLlamaV3"])
    assert [source["id"] for source in override["sources"]] == [1]
    assert {entry["source"] for entry in override["overrides"]} == {1}
    keys = [entry["key"] for entry in override["overrides"]]
    for name in ALL:
        for prefix in ("", "model.", "model.language_model."):
            assert is_in(prefix + name, ignore) == (name in kept)
        quantizer = f"model.{name}.weight_quantizer"
        matched = any(fnmatchcase(quantizer, entry["quantizer_name"]) for entry in entries)
        assert matched == (name in kept)
        assert is_overridden(f"model.{name}.trellis", keys) == (name in kept)
    assert all(entry["enable"] is False for entry in entries)
    gguf = "".join(
        f"blk.{layer}.{kind}.weight\n" for layer in range(12) for kind in ("attn_q", "ffn_down")
    )
    words = shlex.split(texts.get("llama-quantize", ""))
    matched_tensors = set()
    for word in words[1::2]:
        pattern, _, weight_type = word.rpartition("=")
        assert weight_type == "f16"
        matched_tensors |= {name for name in gguf.split() if re.search(pattern, name)}
    expected = set()
    for name in kept:
        layer = name.split(".")[1:2]
        if name.endswith("down_proj"):
            expected.add(f"blk.{layer[0]}.ffn_down.weight")
        if name.endswith("q_proj"):
            expected.add(f"blk.{layer[0]}.attn_q.weight")
    assert matched_tensors == expected


def test_a_run_of_layers_is_one_pattern() -> None:
    texts = lists_of([name for name in ALL if name.endswith("down_proj")])
    assert json.loads(texts["llm-compressor"]) == [r"re:(.*\.)?layers\.\d+\.mlp\.down_proj$"]
    assert texts["llama-quantize"] == "--tensor-type 'blk\\.\\d+\\.ffn_down\\.weight=f16'\n"
    assert ast.literal_eval(texts["ModelOpt"]) == (
        {"quantizer_name": "*layers.*.mlp.down_proj.*", "enable": False},
    )
    texts = lists_of(["layers.2.mlp.down_proj", "layers.10.mlp.down_proj"])
    assert json.loads(texts["llm-compressor"]) == [r"re:(.*\.)?layers\.(2|10)\.mlp\.down_proj$"]


def test_modules_without_a_known_name_in_gguf_are_counted() -> None:
    texts = lists_of(["lm_head", "layers.0.mlp.down_proj"])
    assert "1 module" in texts["notes"]
    assert "ffn_down" in texts["llama-quantize"]
    assert "llama-quantize" not in lists_of(["lm_head"]).keys() - {"notes"}


def test_whole_layers() -> None:
    all_names = [f"layers.{layer}" for layer in range(12)]
    texts = lists_of(["layers.1", "layers.3"], all_names)
    ignore = json.loads(texts["llm-compressor"])
    assert is_in("model.layers.1.mlp.down_proj", ignore)
    assert not is_in("model.layers.11.mlp.down_proj", ignore)
    assert not is_in("model.layers.2.mlp.down_proj", ignore)
    (word,) = shlex.split(texts["llama-quantize"])[1::2]
    pattern = word.removesuffix("=f16")
    assert re.search(pattern, "blk.3.attn_q.weight")
    assert not re.search(pattern, "blk.13.attn_q.weight")


def test_divided_layers_that_vllm_fuses_are_noted() -> None:
    assert "vLLM" in lists_of(["layers.0.self_attn.v_proj"])["notes"]
    whole = [name for name in ALL if ".self_attn." in name]
    assert "vLLM" not in lists_of(whole)["notes"]


def test_eight_bits_have_a_group_with_the_same_scales() -> None:
    texts = lists_of(["layers.0.mlp.down_proj"], keep_bits=8)
    (group,) = json.loads(texts["llm-compressor"]).values()
    assert is_in("model.layers.0.mlp.down_proj", group["targets"])
    assert (group["weights"]["num_bits"], group["weights"]["group_size"]) == (8, 32)
    assert "=q8_0" in texts["llama-quantize"]
    assert "/8/" in yaml.safe_load(texts["ExLlamaV3"])["sources"][0]["model_dir"]
    assert "ModelOpt" not in texts


def test_patterns_match_their_names_only() -> None:
    """Random sets of names with two numbers, as of experts."""
    every = [f"layers.{i}.experts.{j}.up" for i in range(4) for j in range(12)]
    every += ["layers.9.experts.99.up"]
    choose = random.Random(7)
    for _ in range(40):
        names = [name for name in every if choose.random() < choose.choice((0.1, 0.5, 0.95))]
        if names:
            patterns = patterns_of(names, every)
            matched = [name for name in every if any(re.fullmatch(p, name) for p in patterns)]
            assert matched == names
    layers = [name for name in every if name.startswith(("layers.1.", "layers.2."))]
    assert patterns_of(layers, every) == [r"layers\.(1|2)\.experts\.\d+\.up"]
    square = [f"layers.{i}.experts.{j}.up" for i in range(4) for j in range(12)]
    # \d+ at both places would match layer 9 too.
    assert [re.fullmatch(p, "layers.9.experts.99.up") for p in patterns_of(square, every)] == [None]
