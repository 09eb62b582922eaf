"""What the engines of the ExLlama family share: refusals of checkpoints that they would load as another model."""

from __future__ import annotations

from collections.abc import Sequence

from backends.base import LoadRequest
from backends.checkpoint import files
from backends.checkpoint.config import CheckpointConfig, has_longrope
from backends.common.errors import InputError
from backends.common.json_files import expanded

OUTPUT_FACTOR = 4
"""Windows of float16 logits that the split leaves room for: the logits, and 2.5 times as much to keep them."""


def check_model(request: LoadRequest, methods: Sequence[str], max_seq_len: int | None) -> None:
    """InputError if a local model's config names a format or a length that the engine would get wrong."""
    if max_seq_len is not None and max_seq_len < request.max_tokens:
        raise InputError(f"engine.max_seq_len: {max_seq_len} is too short for windows of {request.max_tokens} tokens")
    folder = expanded(request.model_dir)
    if not folder.is_dir():
        return
    config = CheckpointConfig.read(folder)
    method = config.quantization.get("quant_method")
    others = [file for file in files.strays(folder) if file not in request.override_tensors]
    if stray := [file for file in others if not file.name.startswith("consolidated")]:
        raise InputError(f"model_dir: {stray[0]}: {request.load_fn} would load it as well; move it out of the folder")
    if method is not None and method not in methods:
        raise InputError(f"model_dir: {request.load_fn} does not read {method} models; it reads {', '.join(methods)}")
    if max_seq_len is None and has_longrope(config.raw):
        raise InputError(
            f"engine.max_seq_len: missing; this model's longrope factors depend on it in {request.load_fn}, so set it "
            "to what you serve with"
        )
