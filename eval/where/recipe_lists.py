"""The modules of a recipe as quantizers take them: llm-compressor, ModelOpt, llama-quantize,
ExLlamaV3.

Names of checkpoints may begin before ``layers.`` in several ways ("model.", "language_model."), so
that patterns match any beginning, except those for llama-quantize.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from ...backends.common.message_text import amount
from ...backends.layers.module_names import FUSED_LAYERS
from . import recipe
from .name_patterns import patterns_of
from .parts import EXPERTS, WHOLE_LAYER
from .recipe import FULL_BITS
from .results import Module, PasteList, Recipe

ANY_PREFIX = r"re:(.*\.)?"
"""Beginning of a regular expression for compressed-tensors, which matches from the first
character on."""
GGUF_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Name of a matrix in a decoder layer -> its name in a GGUF file."""
GGUF_TYPES = {FULL_BITS: "f16", recipe.FEWER_BITS: "q8_0"}
WHOLE_BLOCK = re.compile(r"blk\\\.[^.]+")
"""An expression for whole decoder layers in GGUF."""
IN_LAYER = re.compile(r"layers\.(\d+)\.(.+)")
GROUP = re.compile(r"\bg(\d+)\b")
"""The number of weights that share a scale, in the name of a format: "int4 g128"."""


def lists_of(found: Recipe, modules: Sequence[Module]) -> tuple[list[PasteList], list[str]]:
    """Return the lists of a recipe with modules, and notes on them; ``modules``: all modules."""
    notes = []
    if found.keep_bits == FULL_BITS:
        lists = [ignore_list(found, modules), model_opt_list(found, modules)]
    else:
        lists = [groups_list(found, modules)]
    gguf, n_unknown = gguf_list(found, modules)
    if gguf is not None:
        lists.append(gguf)
    if n_unknown:
        notes.append(
            f"llama-quantize: {amount(n_unknown, 'module')} left out, whose names in GGUF are not "
            "known"
        )
    lists.append(exllamav3_list(found, modules))
    divided = divided_layers(found.modules, [module.name for module in modules])
    if divided:
        notes.append(
            f"vLLM fuses {divided}, and refuses checkpoints that quantize only some of them; a "
            "regular expression for --by can put them into one part"
        )
    return lists, notes


def compressed_patterns(names: Sequence[str], modules: Sequence[Module]) -> list[str]:
    """Return the names as compressed-tensors takes them: names, or patterns with ``re:``."""
    patterns = []
    for pattern in patterns_of(names, [module.name for module in modules]):
        patterns.append(ANY_PREFIX + pattern + end_of(pattern))
    return patterns


def end_of(pattern: str) -> str:
    """Return the end of an expression for a module: modules inside it match as well, or not."""
    last_name = pattern.split(".")[-1]
    # A whole layer, or all experts of one, whose matrices have their own names in checkpoints.
    if last_name == EXPERTS or last_name.endswith(("d+", ")")) or last_name.isdigit():
        return r"(\.|$)"
    return "$"


def ignore_list(found: Recipe, modules: Sequence[Module]) -> PasteList:
    """Return what llm-compressor leaves unquantized, in addition to what it leaves already."""
    patterns = compressed_patterns(found.modules, modules)
    return PasteList(
        tool='llm-compressor: add to "ignore"', text=json.dumps(patterns, indent=2) + "\n"
    )


def groups_list(found: Recipe, modules: Sequence[Module]) -> PasteList:
    """Return the groups of llm-compressor's scheme with 8 bits per weight.

    The targets must not be in other groups.
    """
    names_of_format: dict[str, list[str]] = {}
    formats = {module.name: module.weights for module in modules}
    for name in found.modules:
        names_of_format.setdefault(formats[name], []).append(name)
    groups: dict[str, Any] = {}
    for number, (weights, names) in enumerate(names_of_format.items()):
        targets = compressed_patterns(names, modules)
        groups[f"group_8_bits_{number}"] = {"targets": targets, "weights": arguments_of(weights)}
    return PasteList(
        tool='llm-compressor: add to "config_groups"', text=json.dumps(groups, indent=2) + "\n"
    )


def arguments_of(weights: str) -> Mapping[str, Any]:
    """Return the arguments of compressed-tensors for 8-bit weights with the scales of a format."""
    arguments: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
    if recipe.is_float(weights):
        arguments["type"] = "float"
    group = GROUP.search(weights)
    if group is None:
        return {**arguments, "strategy": "channel"}
    return {**arguments, "strategy": "group", "group_size": int(group[1])}


def model_opt_list(found: Recipe, modules: Sequence[Module]) -> PasteList:
    """Return entries of ModelOpt's ``quant_cfg``, whose wildcards are those of ``fnmatch``.

    A quantizer has the name of its module with ``.weight_quantizer`` or the like.
    """
    all_names = [module.name for module in modules]
    lines = []
    for name in wildcards_of(found.modules, all_names):
        entry = {"quantizer_name": f"*{name}.*", "enable": False}
        # Python, which ModelOpt's configurations are written in.
        lines.append(f"{entry!r},\n")
    return PasteList(tool='ModelOpt: append to "quant_cfg"', text="".join(lines))


def exllamav3_list(found: Recipe, modules: Sequence[Module]) -> PasteList:
    """Return the YAML of ``util/recompile.py --override``, which copies tensors of another model.

    Its only wildcard is ``*``.  A tensor has the name of its module with ``.trellis`` or the like
    (``VariantSafetensorsCollection`` of exllamav3 1.6).
    """
    all_names = [module.name for module in modules]
    lines = [
        "sources:\n",
        "  - id: 1\n",
        f'    model_dir: "/path/to/the/model/in/{found.keep_bits}/bits"\n',
        "overrides:\n",
    ]
    for name in wildcards_of(found.modules, all_names):
        lines += [f'  - key: "*{name}.*"\n', "    source: 1\n"]
    return PasteList(tool="ExLlamaV3: a file for util/recompile.py --override", text="".join(lines))


def wildcards_of(names: Sequence[str], all_names: Sequence[str]) -> list[str]:
    """Return ``fnmatch`` patterns of names: one with ``*`` for all layers, or else each name."""
    wildcards: list[str] = []
    for pattern in patterns_of(names, all_names):
        members = [name for name in names if re.fullmatch(pattern, name)]
        wildcard = pattern.replace(r"\d+", "*").replace("\\", "")
        matches = {name for name in all_names if fnmatchcase(name, wildcard)}
        # A choice of numbers is not a wildcard, and * also matches names with further dots.
        if matches == set(members):
            wildcards.append(wildcard)
        else:
            wildcards += members
    return wildcards


def gguf_list(found: Recipe, modules: Sequence[Module]) -> tuple[PasteList | None, int]:
    """Return the flags of llama-quantize, and how many modules have no known name in GGUF.

    None without a known name.
    """
    names = gguf_names(found.modules)
    all_names = gguf_names([module.name for module in modules])
    flags = []
    for pattern in patterns_of(names, all_names):
        end = r"\.weight"
        if WHOLE_BLOCK.fullmatch(pattern):
            end = r"\."
        # Quotes for a shell.
        flags.append(f"--tensor-type '{pattern}{end}={GGUF_TYPES[found.keep_bits]}'")
    n_unknown = len(found.modules) - len(names)
    if not flags:
        return None, n_unknown
    return PasteList(tool="llama-quantize", text=" \\\n".join(flags) + "\n"), n_unknown


def gguf_names(names: Sequence[str]) -> list[str]:
    """Return the names in GGUF of the modules that have a known one: "blk.7.ffn_down"."""
    known = []
    for name in names:
        if WHOLE_LAYER.fullmatch(name):
            known.append(name.replace("layers.", "blk."))
        match = IN_LAYER.fullmatch(name)
        if match is not None and match[2] in GGUF_NAMES:
            known.append(f"blk.{match[1]}.{GGUF_NAMES[match[2]]}")
    return known


def divided_layers(names: Collection[str], all_names: Sequence[str]) -> str:
    """Return the matrices that vLLM fuses, of which only some are among ``names``; "" if none."""
    kept = set(names)
    every = set(all_names)
    divided: dict[str, None] = {}
    for name in all_names:
        parent, _, leaf = name.rpartition(".")
        for fused in FUSED_LAYERS:
            members = {f"{parent}.{member}" for member in fused} & every
            if leaf in fused and 0 < len(members & kept) < len(members):
                divided[", ".join(fused)] = None
    return " and ".join(divided)
