"""Names of layers and tensors: module and part, head or layer, which layers engines fuse, prefixes.

Bits per weight, the doctor and the schemes of layers share this one table of names.  Nothing here
reads a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, TypeVar

Role = Literal["layer", "head", "embedding", ""]
"""The part of the model whose size includes a module's bits; "" for modules outside the text
model's weights."""
T = TypeVar("T")

EXPERTS = re.compile(r"(gate_up_proj|gate_proj|up_proj|down_proj|w[123])(?:_(.+))?")
"""Tensors with all experts of a layer: ``experts.down_proj``, ``experts.down_proj_scale_inv``, ...
"""
EXPERT_PARTS = {
    None: "weight",
    "blocks": "weight_packed",
    "scales": "weight_scale",
    "scale": "weight_scale",
    "scale_inv": "weight_scale_inv",
}
EMBEDDINGS = {
    "embed_tokens",
    "wte",
    "word_embeddings",
    "word_embedding",
    "tok_embeddings",
    "token_embedding",
    "token_embeddings",
    "tokens_embed",
    "embed_in",
    "embeddings",
    "embedding",
}
OTHER_EMBEDDINGS = {"wpe", "embed_positions", "position_embeddings", "embed_tokens_per_layer"}
HEADS = {"lm_head", "text_lm_head", "embed_out", "output_layer", "output_projection"}
"""Names of heads, or of modules that enclose one, as in Phi."""
OUTER_HEADS, OUTER_EMBEDDINGS = {"output", "head", "ff_out"}, {"embed"}
"""Names that mean head and embedding if all preceding steps of the name are in ``OUTER``."""
OUTER = {"model", "transformer", "language_model", "text_model", "llm"}
CLASSIFIER = "score"
ROUTERS = {"gate", "router", "shared_expert_gate"}
OTHER_TOWERS = re.compile(
    r"visual\w*|vision\w*|audio\w*|\w*projector|embed_vision|embed_audio|mlp1|vpm|apm|resampler|patch_merger|connector|"
    r"embed_tokens_extend|talker|token2wav|code2wav|tts|sound_encoder|sound_projection|sam_model|qwen2_model|aligner|"
    r"vit_downsampler2?|vte|gen_vision_model|gen_aligner|gen_head|gen_embed|whisper_encoder"
)
"""Steps in the names of modules outside the text model that its root may contain."""
LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
IN_LAYER = re.compile(r"(?:^|[._])(?:layers?|h|blocks?)\.\d{1,9}\.")
"""Names inside a decoder layer; these are never heads: OLMo calls its head and a matrix of each
block ff_out."""
FUSED_AS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_wqa_wkv": ("wq_a", "wkv"),
}
"""Names that engines give to fused layers -> the names that checkpoints have for their parts."""
FUSED = (
    *(parts for name, parts in FUSED_AS.items() if name != "fused_wqa_wkv"),
    ("w1", "w3"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("c_fc_0", "c_fc_1"),
)
"""Layers with the same input that are fused, from packed_modules_mapping of vLLM's language models,
0.26 to 0.33."""
QUANTIZER = re.compile(r"(weight|bias|input|output)_quantizer")
"""Modules with the numbers that ModelOpt used while it quantized a layer."""
OWNERS = re.compile(r"^(?:(?:model|language_model|backbone)\.)+")
"""Prefixes of engines and checkpoints before a language model's layers."""
PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")
EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.)\d+$")
"""The numbers in a layer's name."""


def module_and_part(name: str) -> tuple[str, str]:
    """(module, part) of a tensor's name; the part is "weight", "scales", "weight.absmax", ..."""
    module, below, part = name.partition(".weight.")
    if below:  # bitsandbytes
        return module, f"weight.{part}"
    module, _, part = name.rpartition(".")
    if module.endswith("experts") and (expert := EXPERTS.fullmatch(part)):
        return f"{module}.{expert[1]}", EXPERT_PARTS.get(expert[2], expert[2])
    return module, part


def kind_of(name: str) -> str:
    """Return a name with ``*`` for each number: ``model.layers.*.mlp.up_proj``."""
    return NUMBER.sub("*", name)


def by_module(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Module -> its parts; ``tensors``: by their names."""
    modules: dict[str, dict[str, T]] = {}
    for name, tensor in tensors.items():
        module, part = module_and_part(name)
        modules.setdefault(module, {})[part] = tensor
    return modules


def role_of(module: str, hidden_layers: int | None) -> Role:
    """The role of a module by its name; ``hidden_layers``: the config's number of decoder layers,
    if known.

    Modules for multi-token prediction are named ``mtp*``, or have a number beyond the last layer's.
    """
    steps, number = module.split("."), LAYER_NUMBER.search(f"{module}.")
    drafts = hidden_layers is not None and number is not None and int(number[1]) >= hidden_layers
    routes = ROUTERS & set(steps[-2:]) and steps[-2:] != [
        "attention",
        "gate",
    ]  # RWKV's gate is a layer
    if (
        drafts
        or routes
        or is_outside(module)
        or module == CLASSIFIER
        or steps[-1] in OTHER_EMBEDDINGS
    ):
        return ""
    if steps[-1] in EMBEDDINGS or (steps[-1] in OUTER_EMBEDDINGS and OUTER.issuperset(steps[:-1])):
        return "embedding"
    is_head = HEADS & set(steps[-2:]) or (steps[-1] in OUTER_HEADS and OUTER.issuperset(steps[:-1]))
    return "head" if is_head and not IN_LAYER.search(module) else "layer"


def is_outside(module: str) -> bool:
    """True if a name is one of another modality's modules or of multi-token prediction."""
    return any(OTHER_TOWERS.fullmatch(step) or step.startswith("mtp") for step in module.split("."))


def is_left_by_quantizer(module: str) -> bool:
    """True for the name of a quantizer below a layer:
    ``model.layers.0.mlp.up_proj.weight_quantizer``.
    """
    return bool(QUANTIZER.fullmatch(module.rpartition(".")[2]))


def outside_text_model(sizes: Mapping[str, int], hidden_layers: int | None) -> set[str]:
    """The modules outside the text model, except heads; empty if the text model is not found.

    The root of the text model is the longest prefix of the largest embedding's name that has
    numbered blocks below it.  The model's blocks are the blocks with the fewest steps below the
    root: in Kimi-Audio ``model.layers``, not ``model.encoder.layers``.  ``sizes``: module -> its
    bytes.
    """
    roles = {name: role_of(name, hidden_layers) for name in sizes}
    embeddings = [name for name, role in roles.items() if role == "embedding"]
    before = max(embeddings, key=sizes.__getitem__).split(".")[:-1] if embeddings else [""]
    above = {
        name: match.string[: match.end()].split(".")[:-3]
        for name, role in roles.items()
        if role == "layer" and (match := IN_LAYER.search(f"{name}."))
    }
    roots = (before[:count] for count in range(len(before), 0, -1)) if before else [before]
    root = next(
        (steps for steps in roots if any(path[: len(steps)] == steps for path in above.values())),
        None,
    )
    if root is None:
        return set()
    depths = {
        name: len(set(steps) - OUTER) for name, steps in above.items() if steps[: len(root)] == root
    }
    depth = min(depths.values())
    outside = {
        name
        for name, role in roles.items()
        if role != "head"
        and (name.split(".")[: len(root)] != root or depths.get(name, depth) > depth)
    }
    kept, every = (sum(sizes[name] for name in names) for names in (above.keys() - outside, above))
    return (
        outside if 4 * kept >= every else set()
    )  # BLT has its embedding in the small byte encoder


def bare(layer: str) -> str:
    """A layer's name without prefixes of engines and checkpoints, and without vLLM's inner module
    of experts.
    """
    return OWNERS.sub("", layer).removesuffix(".routed_experts")


def spellings(layer: str) -> list[str]:
    """Possible spellings of a bare name in configs; for a layer with all experts, the names of the
    first expert.
    """
    inside = [f"{layer}.0.{part}" for part in EXPERT_LAYERS] if layer.endswith("experts") else []
    return [prefix + name for name in (layer, *inside) for prefix in PREFIXES]


def parts_of(path: str) -> list[str]:
    """The checkpoint's paths of an engine's layer: the paths of its parts if it is fused, else its
    own path.
    """
    parent, _, name = path.rpartition(".")
    return [f"{parent}.{part}" for part in FUSED_AS.get(name, (name,))] if parent else [path]


def fused_layers(paths: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Groups of ``paths`` (``model.layers.0.mlp.up_proj``) that are fused into one matrix, in the
    order of FUSED.
    """
    for path in paths:
        parent = path.rpartition(".")[0]
        for names in FUSED:
            members = tuple(member for name in names if (member := f"{parent}.{name}") in paths)
            if len(members) > 1 and path == members[0]:
                yield members
