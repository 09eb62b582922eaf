"""How many bits a safetensors checkpoint stores, by one convention for every engine.  No engine, no torch.

The checkpoint's own headers are read, since a layer that an engine has decompressed would seem to have 16 bits a
weight, and a layer that is packed in int32 would seem to have 32.  The convention:

- layer bpw = stored bits of the weight matrices outside the embedding and the head, with everything that decoding
  needs (scales, zero points, group indices, permutations, codebooks, global scales), divided by the number of weights
  that these bits encode; the zeros with which a format pads a matrix are bits, but no weights;
- experts are weights, router gates are not; nor are norms, biases, activation and KV-cache scales, shapes and other
  descriptions, the tensors of vision, audio and speech towers with what projects from them, a classifier's head, and
  multi-token-prediction modules (``mtp*``, and layers numbered past the config's ``num_hidden_layers``), which draft
  tokens and are not run when scoring;
- head bpw likewise; a tied head has the embedding's;
- VRAM = layer and head bits.

``backends/checkpoint/formats.py`` knows the formats.  A tensor in any other format makes the size n/a, and is named.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from backends.base import Storage
from backends.checkpoint.config import CheckpointConfig
from backends.checkpoint.files import Tensor, read_headers, weight_files
from backends.checkpoint.formats import Parts, StoredWeights, stored_weights
from backends.checkpoint.hints import ConfigHints, config_hints

EXPERTS = re.compile(r"(gate_up_proj|gate_proj|up_proj|down_proj|w[123])(?:_(.+))?")
"""The tensors that hold all experts of a layer at once: ``experts.down_proj``, ``experts.down_proj_scale_inv``, ..."""
EXPERT_PARTS = {
    None: "weight", "blocks": "weight_packed", "scales": "weight_scale", "scale": "weight_scale",
    "scale_inv": "weight_scale_inv",
}  # fmt: skip
EMBEDDINGS = {"embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "embeddings"}
OTHER_EMBEDDINGS = {"wpe", "embed_positions", "position_embeddings", "embed_tokens_per_layer"}
LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
HEADS = {"lm_head", "embed_out"}
WHOLE_HEADS, WHOLE_EMBEDDINGS = {"output", "model.output", "head"}, {"embed"}
"""Names that mean head and embedding where they are the whole name; DeepSeek-V4 has ``head`` and ``embed``."""
ROUTERS = {"gate", "router", "shared_expert_gate"}
OTHER_TOWERS = {
    "visual", "vision_tower", "vision_model", "vision_encoder", "multi_modal_projector", "mm_projector",
    "audio_tower", "audio_model", "embed_vision", "embed_audio",
    "mlp1", "vpm", "apm", "resampler", "audio_projection_layer", "vision_language_adapter", "patch_merger", "connector",
    "vision_backbone", "vision_embed_tokens", "embed_tokens_extend", "talker", "token2wav", "code2wav", "tts",
    "sound_encoder", "sound_projection",
    "sam_model", "qwen2_model", "vision", "projector", "aligner", "vit_large_projector", "vit_downsampler",
    "vit_downsampler2", "vte", "visual_tokenizer", "gen_vision_model", "gen_aligner", "gen_head", "gen_embed",
}  # fmt: skip


def _split(name: str) -> tuple[str, str]:
    """A tensor's module and which part of the module it is: "weight", "scales", "weight.absmax", ..."""
    module, below, part = name.partition(".weight.")
    if below:
        return module, f"weight.{part}"
    module, _, part = name.rpartition(".")
    if module.endswith("experts") and (expert := EXPERTS.fullmatch(part)):
        return f"{module}.{expert[1]}", EXPERT_PARTS.get(expert[2], expert[2])
    return module, part


def _modules(tensors: dict[str, Tensor]) -> dict[str, Parts]:
    modules: dict[str, Parts] = {}
    for name, tensor in tensors.items():
        module, part = _split(name)
        modules.setdefault(module, {})[part] = tensor
    return modules


def _drafts(module: str, hidden_layers: int | None) -> bool:
    """Whether a module only predicts tokens further on: MTP, by its name or by its number."""
    number = LAYER_NUMBER.search(f"{module}.")
    past = hidden_layers is not None and number is not None and int(number[1]) >= hidden_layers
    return past or any(step.startswith("mtp") for step in module.split("."))


def _role(module: str, hidden_layers: int | None) -> str:
    """Where a module's bits belong: "layer", "head", "embedding", or "" for nowhere."""
    steps = module.split(".")
    if _drafts(module, hidden_layers) or module == "score":  # a classifier's head
        return ""
    if OTHER_TOWERS & set(steps) or ROUTERS & set(steps[-2:]) or steps[-1] in OTHER_EMBEDDINGS:
        return ""
    if steps[-1] in HEADS or module in WHOLE_HEADS:
        return "head"
    return "embedding" if steps[-1] in EMBEDDINGS or module in WHOLE_EMBEDDINGS else "layer"


def _total(modules: dict[str, Parts], hints: ConfigHints, role: str) -> StoredWeights | str:
    """Bits and weights of all ``modules``, which have one role; or the first tensor of unknown size, and why."""
    bits = weights = 0
    for name, parts in modules.items():
        found = stored_weights(parts, role, hints)
        if isinstance(found, str):
            return f"{name}{found}"
        bits, weights = bits + found.bits, weights + found.weights
    return StoredWeights(bits, weights)


def storage_of(folder: Path, override_tensors: Sequence[Path] = ()) -> Storage:
    """Storage of the checkpoint in ``folder`` by the convention above; unknown formats give ``None`` and a note."""
    modules = _modules(read_headers([*weight_files(folder), *override_tensors]))
    config = CheckpointConfig.read(folder)
    hints = config_hints(config)
    by_role: dict[str, dict[str, Parts]] = {"layer": {}, "head": {}, "embedding": {}, "": {}}
    for name, parts in modules.items():
        by_role[_role(name, config.hidden_layers)][name] = parts
    layer, head = (_total(by_role[role], hints, role) for role in ("layer", "head"))
    if isinstance(head, StoredWeights) and not head.weights:
        head = _total(by_role["embedding"], hints, "embedding")
    if isinstance(layer, str):
        return Storage(note=layer)
    if isinstance(head, str):
        return Storage(note=head)
    if not layer.weights or not head.weights:
        return Storage(note=f"{folder}: no weight matrices found in its safetensors headers")
    return Storage(layer.bits / layer.weights, head.bits / head.weights, layer.bits + head.bits)
