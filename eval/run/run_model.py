"""A model of a run, as the driver knows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ... import backends
from ...backends.base import Capabilities, EngineInfo, ModelFacts, ModelFiles, PlannedModel
from ..specs.spec_types import ModelSpec


@dataclass(frozen=True)
class RunModel:
    """A model of a run: its spec, what its workers get, and what only the driver knows.

    ``planned`` is sent to workers.  The other fields are filled while the run is planned, and again
    after a download.
    """

    spec: ModelSpec
    planned: PlannedModel
    # Path of the Python that runs the engine; None: the driver's.
    python: str | None = None
    # The engine as installed in ``python``.
    info: EngineInfo = field(default_factory=EngineInfo)
    # GPUs that each replica gets; 0: it runs on the CPU.
    n_gpus: int = 0
    # Workers that share the windows.
    replicas: int = 1
    # The part of the scores' key that names GPUs, driver, CPU and the machine's settings.
    hardware: Mapping[str, Any] = field(default_factory=dict)
    # The part of the provenance that is known before the model loads.
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """The model's name in tables and messages."""
        return self.planned.label

    @property
    def engine(self) -> str:
        """The engine's name in the registry."""
        return self.planned.engine

    @property
    def is_reference(self) -> bool:
        """True if the other models are compared with this one."""
        return self.spec.is_reference

    @property
    def resources(self) -> dict[str, float]:
        """Ray's custom resources that a worker takes, by name."""
        return dict(self.spec.resources)

    @property
    def out_logits(self) -> Path | None:
        """The folder in which the reference store of this model is kept; None: the cache."""
        if not self.spec.out_logits:
            return None
        return Path(self.spec.locate(self.spec.out_logits))

    @property
    def capabilities(self) -> Capabilities:
        """The properties of its engine."""
        return backends.engine_class(self.engine).capabilities

    @property
    def files(self) -> ModelFiles:
        """The model's files."""
        return backends.files_of(self.planned)

    @property
    def facts(self) -> ModelFacts:
        """Facts about the model before it loads, from its files or from its server."""
        return self.info.facts or self.files.facts()

    def with_planned(self, **changes: Any) -> RunModel:
        """Return a copy in which these fields of ``planned`` have other values."""
        return replace(self, planned=self.planned.updated(**changes))
