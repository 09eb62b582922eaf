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

``backends/layers/names.py`` says where a module belongs, ``formats.py`` how its weights are stored.  A tensor in any
other format makes the size n/a, and is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from compare_q.backends.base import Storage
from compare_q.backends.checkpoint.config import CheckpointConfig
from compare_q.backends.checkpoint.contents import Checkpoint
from compare_q.backends.checkpoint.formats import Parts, stored_weights
from compare_q.backends.layers.names import IN_LAYER, Role, outside_text_model

PADDED_TO = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
UNEXPLAINED = "has the vocabulary's size, and no name by which to tell head from embedding"
Modules = Mapping[str, Parts]


def storage_of(folder: Path, override_tensors: Sequence[Path] = ()) -> Storage:
    """Storage of the checkpoint in ``folder`` by the convention above; unknown formats give ``None`` and a note."""
    checkpoint = Checkpoint(folder, tuple(override_tensors))
    modules, config = checkpoint.modules, checkpoint.config
    by_role: dict[Role, dict[str, Parts]] = {"layer": {}, "head": {}, "embedding": {}, "": {}}
    for name, parts in modules.items():
        by_role[checkpoint.role(name)][name] = parts
    if name := unexplained(by_role, config):
        return Storage(note=f"{name}: {UNEXPLAINED}")
    sizes = {name: sum(tensor.nbytes for tensor in parts.values()) for name, parts in modules.items()}
    for name in outside_text_model(sizes, config.hidden_layers):
        by_role[checkpoint.role(name)].pop(name)
    totals = {role: total(own, config, role) for role, own in by_role.items() if role}
    layer, head = totals["layer"], totals["head"]
    if head == (0, 0):
        head = totals["embedding"]
    if isinstance(layer, str) or isinstance(head, str):
        return Storage(note=layer if isinstance(layer, str) else str(head))
    if not layer[1] or not head[1]:
        return Storage(note=f"{folder}: no weight matrices found in its safetensors headers")
    return Storage(layer[0] / layer[1], head[0] / head[1], layer[0] + head[0])


def total(modules: Modules, config: CheckpointConfig, role: Role) -> tuple[int, int] | str:
    """Bits and weights of all ``modules``, which have one role; or the first tensor of unknown size, and why."""
    bits = weights = 0
    for name, parts in modules.items():
        stored = stored_weights(parts, role, config)
        if isinstance(stored, str):
            return f"{name}{stored}"
        bits, weights = bits + stored[0], weights + stored[1]
    return bits, weights


def unexplained(by_role: Mapping[Role, Modules], config: CheckpointConfig) -> str:
    """The first matrix outside of all layers that has as many weights as head or embedding, and neither's name."""
    ends: tuple[Role, ...] = ("head", "embedding")
    stored = [total({name: parts}, config, role) for role in ends for name, parts in by_role[role].items()]
    rows, columns = config.vocab_size or 0, config.hidden_size or 0
    sizes = {one[1] for one in stored if not isinstance(one, str)}
    sizes |= {-(-rows // multiple) * multiple * columns for multiple in PADDED_TO}
    for name, parts in by_role["layer"].items():
        size = "" if IN_LAYER.search(name) else total({name: parts}, config, "head")
        if not isinstance(size, str) and size[1] in sizes - {0}:
            return name
    return ""
