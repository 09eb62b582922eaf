"""A file of log-probabilities as a model: what the kinds of such files have in common."""

from __future__ import annotations

import hashlib
from abc import abstractmethod
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from ..base import Engine, ModelFiles, PlannedModel, Storage
from ..common.engine_options import EngineOptions, parse_options
from ..common.errors import ModelError
from ..common.json_files import open_regular
from .format import RowHeader

HASHED_BYTES = 1 << 24


class RowFile(ModelFiles):
    """A file of log-probabilities before it is read as a whole."""

    @property
    def file(self) -> Path:
        """The file."""
        return Path(self.planned.model_dir)

    def storage(self) -> Storage:
        return Storage(note="a file of scores does not describe weights; give override_*")

    def stamp(self) -> str:
        digest = hashlib.sha256()
        with open_regular(self.file) as stream:
            while True:
                content = stream.read(HASHED_BYTES)
                if not content:
                    return digest.hexdigest()
                digest.update(content)


class RowFileEngine(Engine):
    """One file of log-probabilities; ``header`` is set by ``load``."""

    header: RowHeader

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.file = Path(model.model_dir)

    @classmethod
    @abstractmethod
    def lines(cls, file: Path) -> Iterable[Any]:
        """Return the lines of a file after the first one; InputError for a wrong line."""

    @classmethod
    def option_names(cls) -> Collection[str]:
        return EngineOptions.model_fields.keys()

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        parse_options(EngineOptions, model.options)
        # For the InputError of a wrong line.
        for _ in cls.lines(Path(model.model_dir)):
            pass

    def check_stamp(self) -> None:
        """ModelError if the file that was read is not the one that the run began with."""
        stamp = self.files(self.planned).stamp()
        if self.planned.stamp and stamp != self.planned.stamp:
            raise ModelError(f"{self.file}: was changed after this run began; run again")

    def lacks(self, missing: Sequence[int], n_windows: int, advice: str) -> ModelError:
        """Return the error of a file without the windows with these indices."""
        return ModelError(
            f"{self.file}: lacks {len(missing):,} of {n_windows:,} windows, window "
            f"{missing[0]} among them; {advice}"
        )

    def provenance(self) -> dict[str, Any]:
        header = self.header
        engine = " ".join(filter(None, (header.engine, header.engine_version)))
        return {
            "engine_version": engine or "unknown",
            # Not this machine, which only reads the file.
            "cpu": header.hardware,
            "gpus": [],
            "driver": None,
            "scores_file": self.file.name,
            "model": header.model,
            "batch": "unknown: another program scored the windows",
            "kernels": "unknown: a file of scores does not name them",
            "notes": ["its log-probabilities are from a file; compare_q did not run this engine"],
        }
