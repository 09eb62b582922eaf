"""``ModelFiles``: a model before it loads.  Nothing here imports an engine."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from .hub import SILENT, Watch
from .model_types import ModelFacts, PlannedModel, ServingFacts, Storage, TensorBytes


class ModelFiles:
    """A model before it loads: a folder, a GGUF file or on a server.

    The defaults are for a model without files.  Methods about the content need the files on this
    machine.
    """

    is_store: ClassVar[bool] = False
    """The model is a finished reference store, which a run only reads."""

    def __init__(self, model: PlannedModel) -> None:
        self.planned = model

    # Getting the files.

    @property
    def is_remote(self) -> bool:
        """True if the model must still be fetched."""
        return False

    def fetch(self, watch: Watch = SILENT) -> PlannedModel:
        """Return the model with a local ``model_dir``, downloading it if necessary.

        InputError with the reason.
        """
        return self.planned

    def would_fetch(self) -> str:
        """Return what ``fetch`` would download, such as ``16.1 GB to download``.

        InputError if it would fail.
        """
        return ""

    def cached(self) -> PlannedModel | None:
        """Return the model with a local ``model_dir``; None if something must be downloaded."""
        return self.planned

    # What the files tell.

    def facts(self) -> ModelFacts:
        """Return facts from the files' headers; InputError if files are missing."""
        return ModelFacts()

    def storage(self) -> Storage:
        """Return the stored size of the model, by the convention of ``checkpoint/folder.py``."""
        return Storage(note="this model has no files")

    def serving(self) -> ServingFacts:
        """Return the sizes that decide how much memory serving takes in addition to the weights."""
        return ServingFacts()

    def placed(self) -> list[TensorBytes]:
        """Return the stored tensors of the weight files, and where they are; empty if unknown."""
        return []

    # Whether the files are the same.

    def weight_files(self) -> tuple[Path, ...]:
        """Return the weight files, which ``stamp`` reads in samples.

        Empty if they are not on this machine.
        """
        return ()

    def stamp(self) -> str:
        """Return a fingerprint of the files, which is part of the scores' key.

        InputError for damaged files.
        """
        return ""

    def content(self) -> str:
        """Return a fingerprint that a copy of the model on another machine shares."""
        return self.stamp()

    def finished_store(self) -> Path:
        """Return the folder of the reference store, if ``is_store``."""
        raise NotImplementedError
