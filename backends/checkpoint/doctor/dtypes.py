"""Weights of a dtype that the config does not lead one to expect."""

from __future__ import annotations

from collections.abc import Iterator

from backends.checkpoint.doctor.finding import Finding, gathered
from backends.checkpoint.doctor.matrices import NAMES
from backends.checkpoint.doctor.subject import FLOATS, Checkpoint, main_of

SAME = "save the model in one dtype, and let its config.json say which"
UNUSED = ("gate", "router", "A_log")


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Unquantized matrices in another dtype than the config's, and matrices of integers without scales."""
    text = checkpoint.config.text
    stated = text.get("dtype", text.get("torch_dtype"))
    stated = stated.removeprefix("torch.") if isinstance(stated, str) else None
    others: dict[str, list[str]] = {}
    bare: list[str] = []
    for module, parts in checkpoint.matrices:
        main = main_of(parts)
        assert main is not None
        tensor = parts[main]
        where = f"{tensor.file.name}: {module}"
        if tensor.dtype in FLOATS:
            # Routers and states of Mamba are kept in float32 on purpose.
            if stated and NAMES[tensor.dtype] != stated and module.rpartition(".")[2] not in UNUSED:
                others.setdefault(NAMES[tensor.dtype], []).append(where)
        elif len(parts.keys() - {"bias"}) == 1:
            bare.append(f"{where} ({tensor.dtype})")
    for name, where_all in others.items():
        what = f"stored in {name}, and the config says {stated}: engines round it, or compute in another dtype"
        yield from gathered("warning", where_all, what, SAME)
    yield from gathered(
        "wrong", bare, "no float, and no scale beside it: engines take its bytes as numbers, or refuse",
        "quantize again; the scales are missing",
    )  # fmt: skip
