"""Files of weights, and weights in files, that nobody will load: strays, pickles, tensors that the index leaves out."""

from __future__ import annotations

from collections.abc import Iterator

from backends.checkpoint.doctor.finding import Finding, gathered
from backends.checkpoint.doctor.subject import Checkpoint
from backends.checkpoint.files import read_headers, strays
from backends.common.errors import InputError

INDEX = "model.safetensors.index.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
NOT_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt"}
DELETE = "delete the file, unless an engine is to load it in place of the others"


def check(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Every finding about weights that are not loaded."""
    for file in strays(checkpoint.folder):
        try:
            names = set(read_headers([file]))
        except InputError as error:
            yield Finding("warning", file.name, f"is beside the model's files and cannot be read: {error}", DELETE)
            continue
        again = len(names & checkpoint.tensors.keys())
        what = f"holds {len(names):,} tensors, {again:,} of them also in the model's files"
        what += ": an engine that reads every file loads other weights" if again else ": nobody will load them"
        yield Finding("warning", file.name, what, DELETE)
    pickles = [file.name for pattern in PICKLES for file in sorted(checkpoint.folder.glob(pattern))]
    yield from gathered(
        "note", [name for name in pickles if name not in NOT_WEIGHTS],
        "pickled weights beside safetensors: nobody will load them", "delete the file",
    )  # fmt: skip
    yield from index(checkpoint)


def index(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Where the index and the headers of the files disagree."""
    weight_map = checkpoint.json(INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        return
    unnamed = [name for name in checkpoint.tensors if name not in weight_map]
    yield from gathered(
        "warning", [checkpoint.where(name) for name in unnamed],
        "is in the file and not in the index: some engines load it and some do not",
        "make the index again, or save the model without it",
    )  # fmt: skip
    absent = [f"{INDEX}: {name}" for name in weight_map if name not in checkpoint.tensors]
    yield from gathered("wrong", absent, "is in the index and in none of its files", "download the model again")
