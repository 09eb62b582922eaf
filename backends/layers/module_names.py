"""Names of layers and tensors: module and part, head or layer, which layers engines fuse, prefixes.

Bits per weight, the doctor and the schemes of layers share this one table of names.  Nothing here
reads a file.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Literal, TypeVar

Role = Literal["layer", "head", "embedding", ""]
"""The part of the model whose size includes a module's bits.

It is "" for modules outside the text model's weights.
"""
T = TypeVar("T")

EXPERT_TENSOR = re.compile(r"(gate_up_proj|gate_proj|up_proj|down_proj|w[123])(?:_(.+))?")
"""Tensors with all experts of a layer: ``experts.down_proj``, ``experts.down_proj_scale_inv``."""
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
OUTER_HEADS = {"output", "head", "ff_out"}
"""Names that mean a head if all preceding steps of the name are in ``OUTER``."""
OUTER_EMBEDDINGS = {"embed"}
"""Names that mean an embedding if all preceding steps of the name are in ``OUTER``."""
OUTER = {"model", "transformer", "language_model", "text_model", "llm"}
CLASSIFIER = "score"
ROUTERS = {"gate", "router", "shared_expert_gate"}
OTHER_TOWERS = re.compile(
    r"visual\w*|vision\w*|audio\w*|\w*projector|embed_vision|embed_audio|mlp1|vpm|apm|resampler|"
    r"patch_merger|connector|embed_tokens_extend|talker|token2wav|code2wav|tts|sound_encoder|"
    r"sound_projection|sam_model|qwen2_model|aligner|vit_downsampler2?|vte|gen_vision_model|"
    r"gen_aligner|gen_head|gen_embed|whisper_encoder"
)
"""Steps in the names of modules outside the text model that its root may contain."""
LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
IN_LAYER = re.compile(r"(?:^|[._])(?:layers?|h|blocks?)\.\d{1,9}\.")
"""Names inside a decoder layer.

They are never heads: OLMo calls its head and a matrix of each block ff_out.
"""
FUSED_AS = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "fused_wqa_wkv": ("wq_a", "wkv"),
}
"""Names that engines give to fused layers -> the names that checkpoints have for their parts."""
FUSED_LAYERS = (
    *(parts for name, parts in FUSED_AS.items() if name != "fused_wqa_wkv"),
    ("w1", "w3"),
    ("wq", "wk", "wv"),
    ("query", "key", "value"),
    ("c_fc_0", "c_fc_1"),
)
"""Layers with the same input that are fused.

They are from packed_modules_mapping of vLLM's language models, 0.26 to 0.33.
"""
QUANTIZER = re.compile(r"(weight|bias|input|output)_quantizer")
"""Modules with the numbers that ModelOpt used while it quantized a layer."""
OWNERS = re.compile(r"^(?:(?:model|language_model|backbone)\.)+")
"""Prefixes of engines and checkpoints before a language model's layers."""
MODEL_PREFIXES = ("", "model.", "model.language_model.", "language_model.model.", "backbone.")
EXPERT_LAYERS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
NUMBER = re.compile(r"(?<=\.)\d+(?=\.)|(?<=\.)\d+$")
"""The numbers in a layer's name."""


def module_and_part(name: str) -> tuple[str, str]:
    """Return (module, part) of a tensor's name.

    The part is "weight", "scales", "weight.absmax", ...
    """
    # bitsandbytes puts the name of a part after the matrix's own name: "up_proj.weight.absmax".
    module, separator, part = name.partition(".weight.")
    if separator:
        return module, f"weight.{part}"
    module, _, part = name.rpartition(".")
    if module.endswith("experts"):
        expert = EXPERT_TENSOR.fullmatch(part)
        if expert is not None:
            return f"{module}.{expert[1]}", EXPERT_PARTS.get(expert[2], expert[2])
    return module, part


def kind_of(name: str) -> str:
    """Return a name with ``*`` for each number: ``model.layers.*.mlp.up_proj``."""
    return NUMBER.sub("*", name)


def by_module(tensors: Mapping[str, T]) -> dict[str, dict[str, T]]:
    """Return module -> its parts; ``tensors``: by their names."""
    modules: dict[str, dict[str, T]] = {}
    for name, tensor in tensors.items():
        module, part = module_and_part(name)
        modules.setdefault(module, {})[part] = tensor
    return modules


def role_of(module: str, hidden_layers: int | None) -> Role:
    """Return the role of a module by its name.

    ``hidden_layers``: the config's number of decoder layers, None if unknown.
    """
    steps = module.split(".")
    if module == CLASSIFIER or steps[-1] in OTHER_EMBEDDINGS or is_router(steps):
        return ""
    if is_outside(module) or is_draft(module, hidden_layers):
        return ""
    is_outermost = OUTER.issuperset(steps[:-1])
    if steps[-1] in EMBEDDINGS or (steps[-1] in OUTER_EMBEDDINGS and is_outermost):
        return "embedding"
    is_head = bool(HEADS & set(steps[-2:])) or (steps[-1] in OUTER_HEADS and is_outermost)
    if is_head and not IN_LAYER.search(module):
        return "head"
    return "layer"


def is_router(steps: list[str]) -> bool:
    """True if the steps of a name are those of a module that chooses experts."""
    # The gate of RWKV's attention is a layer.
    is_gate_of_rwkv = steps[-2:] == ["attention", "gate"]
    return not ROUTERS.isdisjoint(steps[-2:]) and not is_gate_of_rwkv


def is_draft(module: str, hidden_layers: int | None) -> bool:
    """True for multi-token prediction that is stored as layers after the model's last one."""
    if hidden_layers is None:
        return False
    number = LAYER_NUMBER.search(f"{module}.")
    return number is not None and int(number[1]) >= hidden_layers


def is_outside(module: str) -> bool:
    """True if a name is one of another modality's modules or of multi-token prediction."""
    return any(OTHER_TOWERS.fullmatch(step) or step.startswith("mtp") for step in module.split("."))


def is_left_by_quantizer(module: str) -> bool:
    """True for a quantizer below a layer: ``model.layers.0.mlp.up_proj.weight_quantizer``."""
    return bool(QUANTIZER.fullmatch(module.rpartition(".")[2]))


def outside_text_model(sizes: Mapping[str, int], hidden_layers: int | None) -> set[str]:
    """Return the modules outside the text model, except heads; empty if its root is not found.

    The root of the text model is the longest prefix of the largest embedding's name that has
    numbered blocks below it.  The model's blocks are the blocks with the fewest steps below the
    root: in Kimi-Audio ``model.layers``, not ``model.encoder.layers``.  ``sizes``: module -> its
    bytes.
    """
    roles = {name: role_of(name, hidden_layers) for name in sizes}
    root_steps = steps_before_blocks(roles)
    root = root_of_text_model(sizes, roles, root_steps.values())
    if root is None:
        return set()
    depths = {}
    for name, steps in root_steps.items():
        if steps[: len(root)] == root:
            depths[name] = len(set(steps) - OUTER)
    depth = min(depths.values())
    outside = set()
    for name, role in roles.items():
        is_below_root = name.split(".")[: len(root)] == root
        is_in_deeper_block = depths.get(name, depth) > depth
        if role != "head" and (not is_below_root or is_in_deeper_block):
            outside.add(name)
    text_bytes = 0
    all_bytes = 0
    for name in root_steps:
        all_bytes += sizes[name]
        if name not in outside:
            text_bytes += sizes[name]
    # A root with less than a quarter of the blocks is not the model's: BLT has its embedding in
    # its small byte encoder.
    if 4 * text_bytes < all_bytes:
        return set()
    return outside


def steps_before_blocks(roles: Mapping[str, Role]) -> dict[str, list[str]]:
    """Return layer -> the steps of its name before ``layers.<number>``, for layers in blocks."""
    root_steps = {}
    for name, role in roles.items():
        block = IN_LAYER.search(f"{name}.")
        if role == "layer" and block is not None:
            # The last three steps are "layers", the number, and "" after the last dot.
            root_steps[name] = block.string[: block.end()].split(".")[:-3]
    return root_steps


def root_of_text_model(
    sizes: Mapping[str, int], roles: Mapping[str, Role], root_steps: Collection[list[str]]
) -> list[str] | None:
    """Return the steps of the text model's root (``outside_text_model``); None if not found."""
    embeddings = [name for name, role in roles.items() if role == "embedding"]
    prefix = [""]
    if embeddings:
        prefix = max(embeddings, key=sizes.__getitem__).split(".")[:-1]
    # The root of an embedding without a prefix is empty: it has every block below it.
    shortest = min(len(prefix), 1)
    for length in range(len(prefix), shortest - 1, -1):
        root = prefix[:length]
        if any(steps[:length] == root for steps in root_steps):
            return root
    return None


def bare(layer: str) -> str:
    """Return a layer's name without prefixes of engines and checkpoints.

    vLLM's inner module of experts, ``routed_experts``, is removed too.
    """
    return OWNERS.sub("", layer).removesuffix(".routed_experts")


def spellings(layer: str) -> list[str]:
    """Return possible spellings of a bare name in configs.

    For a layer with all experts, the names of the first expert are included.
    """
    names = [layer]
    if layer.endswith("experts"):
        names += [f"{layer}.0.{part}" for part in EXPERT_LAYERS]
    prefixed = []
    for name in names:
        prefixed += [prefix + name for prefix in MODEL_PREFIXES]
    return prefixed


def parts_of(path: str) -> list[str]:
    """Return the checkpoint's paths of an engine's layer.

    They are the paths of its parts if it is fused, otherwise its own path.
    """
    parent, _, name = path.rpartition(".")
    if not parent:
        return [path]
    return [f"{parent}.{part}" for part in FUSED_AS.get(name, (name,))]


def fused_layers(paths: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Yield groups of ``paths`` (``model.layers.0.mlp.up_proj``) that are fused into one matrix.

    The members of a group are in the order of ``FUSED_LAYERS``.
    """
    for path in paths:
        parent = path.rpartition(".")[0]
        for names in FUSED_LAYERS:
            members = []
            for name in names:
                member = f"{parent}.{name}"
                if member in paths:
                    members.append(member)
            if len(members) > 1 and path == members[0]:
                yield tuple(members)
