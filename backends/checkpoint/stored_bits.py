"""How many bits a safetensors checkpoint stores, by one convention for every engine.  No engine, no torch.

The checkpoint's own headers are read, since a layer that an engine has decompressed would seem to have 16 bits a
weight, and a layer that is packed in int32 would seem to have 32.  The convention:

- layer bpw = stored bits of the weight matrices outside the embedding and the head, with everything that decoding
  needs (scales, zero points, group indices, permutations, codebooks, global scales), divided by the number of weights
  that these bits encode; the zeros with which a format pads a matrix are bits, but no weights;
- experts are weights, router gates are not; nor are norms, biases, activation and KV-cache scales, shapes and other
  descriptions, what lies outside the text model (towers of other modalities, and what projects from them), a
  classifier's head, and multi-token-prediction modules (``mtp*``, and layers numbered past the config's
  ``num_hidden_layers``), which draft tokens and are not run when scoring;
- head bpw likewise; a tied head has the embedding's;
- a matrix of the vocabulary's size that lies in no decoder layer and has neither head's nor embedding's name makes the
  size n/a, and is named;
- VRAM = layer and head bits.

``backends/checkpoint/formats.py`` knows the formats.  A tensor in any other format makes the size n/a, and is named.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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
EMBEDDINGS = {
    "embed_tokens", "wte", "word_embeddings", "word_embedding", "tok_embeddings", "token_embedding", "token_embeddings",
    "tokens_embed", "embed_in", "embeddings", "embedding",
}  # fmt: skip
OTHER_EMBEDDINGS = {"wpe", "embed_positions", "position_embeddings", "embed_tokens_per_layer"}
LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d{1,9})\.")
IN_LAYER = re.compile(r"(?:^|[._])(?:layers?|h|blocks?)\.\d{1,9}\.")
"""Inside a decoder layer, where nothing is the head: OLMo's is called ff_out, as a matrix of each of its blocks is."""
HEADS = {"lm_head", "text_lm_head", "embed_out", "output_layer", "output_projection"}
"""Names of heads, or of what encloses one, as in Phi."""
OUTER_HEADS, OUTER_EMBEDDINGS = {"output", "head", "ff_out"}, {"embed"}
"""Names that mean head and embedding where nothing but names of ``OUTER`` stands before them."""
OUTER = {"model", "transformer", "language_model", "text_model", "llm"}
PADDED_TO = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
UNEXPLAINED = "has the vocabulary's size, and no name by which to tell head from embedding"
ROUTERS = {"gate", "router", "shared_expert_gate"}
OTHER_TOWERS = re.compile(
    r"visual\w*|vision\w*|audio\w*|\w*projector|embed_vision|embed_audio|mlp1|vpm|apm|resampler|patch_merger|connector|"
    r"embed_tokens_extend|talker|token2wav|code2wav|tts|sound_encoder|sound_projection|sam_model|qwen2_model|aligner|"
    r"vit_downsampler2?|vte|gen_vision_model|gen_aligner|gen_head|gen_embed|whisper_encoder"
)
"""Steps of names of what is no text model, for where its root holds that too."""


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


def role_of(module: str, hidden_layers: int | None) -> str:
    """Where a module's bits belong: "layer", "head", "embedding", or "" for nowhere."""
    steps = module.split(".")
    if _drafts(module, hidden_layers) or module == "score":  # a classifier's head
        return ""
    routes = ROUTERS & set(steps[-2:]) and steps[-2:] != ["attention", "gate"]  # RWKV's gate is a layer
    if any(map(OTHER_TOWERS.fullmatch, steps)) or routes or steps[-1] in OTHER_EMBEDDINGS:
        return ""
    if steps[-1] in EMBEDDINGS or (steps[-1] in OUTER_EMBEDDINGS and OUTER.issuperset(steps[:-1])):
        return "embedding"
    is_head = HEADS & set(steps[-2:]) or (steps[-1] in OUTER_HEADS and OUTER.issuperset(steps[:-1]))
    return "head" if is_head and not IN_LAYER.search(module) else "layer"


def outside_text_model(sizes: Mapping[str, int], hidden_layers: int | None) -> set[str]:
    """The modules, but for heads, that lie outside the text model; empty where that is not found.

    Its root is the longest part before its embedding's name (the largest one's) under which numbered blocks lie.  Its
    blocks are those with the fewest steps below: in Kimi-Audio ``model.layers``, and not ``model.encoder.layers``.
    ``sizes``: module -> its bytes.
    """
    roles = {name: role_of(name, hidden_layers) for name in sizes}
    embeddings = [name for name, role in roles.items() if role == "embedding"]
    before = max(embeddings, key=sizes.__getitem__).split(".")[:-1] if embeddings else [""]
    above = {name: found.string[: found.end()].split(".")[:-3] for name, role in roles.items()
             if role == "layer" and (found := IN_LAYER.search(f"{name}."))}  # fmt: skip
    roots = (before[:count] for count in range(len(before), 0, -1)) if before else [before]
    root = next((each for each in roots if any(steps[: len(each)] == each for steps in above.values())), None)
    if root is None:
        return set()
    depths = {name: len(set(steps) - OUTER) for name, steps in above.items() if steps[: len(root)] == root}
    depth = min(depths.values())
    outside = {name for name, role in roles.items() if role != "head"
               and (name.split(".")[: len(root)] != root or depths.get(name, depth) > depth)}  # fmt: skip
    kept, every = (sum(sizes[name] for name in names) for names in (above.keys() - outside, above))
    return outside if 4 * kept >= every else set()  # BLT's embedding lies in its small encoder of bytes


def _total(modules: dict[str, Parts], hints: ConfigHints, role: str) -> StoredWeights | str:
    """Bits and weights of all ``modules``, which have one role; or the first tensor of unknown size, and why."""
    bits = weights = 0
    for name, parts in modules.items():
        found = stored_weights(parts, role, hints)
        if isinstance(found, str):
            return f"{name}{found}"
        bits, weights = bits + found.bits, weights + found.weights
    return StoredWeights(bits, weights)


def _unexplained(by_role: dict[str, dict[str, Parts]], config: CheckpointConfig, hints: ConfigHints) -> str:
    """The first matrix outside of all layers that has as many weights as head or embedding, and neither's name."""
    named = [(role, name) for role in ("head", "embedding") for name in by_role[role]]
    sizes = {found.weights for role, name in named
             if isinstance(found := _total({name: by_role[role][name]}, hints, role), StoredWeights)}  # fmt: skip
    rows, columns = config.vocab_size or 0, config.hidden_size or 0
    sizes |= {-(-rows // multiple) * multiple * columns for multiple in PADDED_TO}
    for name, parts in by_role["layer"].items():
        size = "" if IN_LAYER.search(name) else _total({name: parts}, hints, "head")
        if isinstance(size, StoredWeights) and size.weights in sizes - {0}:
            return name
    return ""


def storage_of(folder: Path, override_tensors: Sequence[Path] = ()) -> Storage:
    """Storage of the checkpoint in ``folder`` by the convention above; unknown formats give ``None`` and a note."""
    modules = _modules(read_headers([*weight_files(folder), *override_tensors]))
    config = CheckpointConfig.read(folder)
    hints = config_hints(config)
    by_role: dict[str, dict[str, Parts]] = {"layer": {}, "head": {}, "embedding": {}, "": {}}
    for name, parts in modules.items():
        by_role[role_of(name, config.hidden_layers)][name] = parts
    if name := _unexplained(by_role, config, hints):
        return Storage(note=f"{name}: {UNEXPLAINED}")
    sizes = {name: sum(tensor.nbytes for tensor in parts.values()) for name, parts in modules.items()}
    for name in outside_text_model(sizes, config.hidden_layers):
        by_role[role_of(name, config.hidden_layers)].pop(name)
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
