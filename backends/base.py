"""How to write an engine.

An engine is a class that derives from ``Engine``.

- It must have ``capabilities`` (load_fns, fwd_fn, packages, install, summary) and two methods:
      load()                    load the model ``self.planned``; ModelError with a one-line reason
      score(windows, request)   yield the TokenScores of each window, in any order
  An engine that returns logits derives from ``LogitsEngine``, and has ``pieces`` instead of
  ``score``.  The docstring of ``backends/logits_engine.py`` shows a whole engine.
- It usually has ``files`` (a model before it loads), ``check`` and ``option_names`` (errors before
  anything loads), ``versions`` (part of the scores' key), ``layers`` and ``provenance`` (what ran)
  and ``close``.
- It rarely has what follows "An engine rarely has these" in ``Engine``.

CONTRIBUTING.md explains how to register and test an engine.  All types that an engine and the
driver exchange can be imported from here.  This module depends on no engine, file format or
statistic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from .common.errors import ModelError
from .common.message_text import with_class
from .common.packages import installed_versions, torch_related_builds
from .common.storage import times_of
from .model_files import ModelFiles
from .model_types import (
    Decode,
    EngineInfo,
    Layer,
    ModelFacts,
    PlannedModel,
    ServingFacts,
    Storage,
    TensorBytes,
)
from .module_differences import ModuleDifference, ModulePlace
from .restoring import QuantizedModule, Trial, TrialScore
from .sampling import SampledToken
from .window import KldKind, ScoreRequest, Spans, TokenScores, Window

__all__ = [
    "Capabilities",
    "Decode",
    "Engine",
    "EngineInfo",
    "KldKind",
    "Layer",
    "ModelFacts",
    "ModelFiles",
    "ModuleDifference",
    "ModulePlace",
    "PlannedModel",
    "QuantizedModule",
    "SampledToken",
    "ScoreRequest",
    "ServingFacts",
    "Spans",
    "Storage",
    "TensorBytes",
    "TokenScores",
    "Trial",
    "TrialScore",
    "Window",
]


@dataclass(frozen=True)
class Capabilities:
    """Properties of an engine that are known before it is imported."""

    # ---- Every engine has these.
    load_fns: tuple[str, ...]  # names of its load functions in specs (ExLlamaV3's names)
    fwd_fn: str  # name of its forward function in specs
    packages: tuple[str, ...]  # distributions; any one of these provides the engine
    install: str  # the command that installs it
    summary: str

    # ---- Usually one or two of these differ from the default.
    reference: bool = True  # its models can be references
    compares: bool = True  # its models can be compared with a reference
    # ``model_dir`` can be ``[dir, files]``, whose tensors replace the model's.
    override_tensors: bool = False
    here: bool = True  # it runs on this machine, and its scores depend on the hardware
    torch: bool = True  # it computes with torch; a CPU build of torch does not use the GPUs
    # Windows are computed in batches, so that rounding depends on the windows of a run.
    batches: bool = False
    decodes: int = 0  # maximum number of windows at a time in decode
    noise: bool = False  # it has the option ``noise``
    samples: bool = False  # it has the method ``sample``
    restores: bool = False  # it has the methods ``exchangeable`` and ``trials``
    outputs: bool = False  # it has the methods ``record_outputs`` and ``compare_outputs``

    # ---- Rarely needed.
    suffixes: tuple[str, ...] = ()  # of model files that only this engine reads by itself
    # Suffixes of another engine's files that this engine reads if the user names it.
    reads_if_named: tuple[str, ...] = ()
    # In the first line of JSON Lines that only this engine reads (``common/jsonl_kinds.py``).
    kinds: tuple[str, ...] = ()
    quant_method: str = ""  # of a config.json that only this engine reads
    marker: str = ""  # a file that only the folders of its models have
    schemes: tuple[str, ...] = ()  # how the addresses of its models begin
    refuses: bool = False  # ``refusal`` may find reasons that ``check`` does not
    # Options that turn compilation off, as noise needs.
    eager: Mapping[str, Any] = field(default_factory=dict)
    # Options that decide roundings, and their defaults; None if the engine chooses.
    arithmetic: Mapping[str, Any] = field(default_factory=dict)
    # load_fn -> options in one-line calls, unless the call sets them.
    one_line: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def installed(self) -> tuple[str, str] | None:
        """Return (distribution, version) that provides the engine; None if it is missing.

        ("built in", "") if it needs no package.
        """
        if not self.packages:
            return ("built in", "")
        return next(iter(installed_versions(self.packages).items()), None)


class Engine(ABC):
    """One model in one engine.  Class methods are called before the engine is imported."""

    def __init__(self, model: PlannedModel) -> None:
        self.planned = model

    # ---- Every engine has these.

    capabilities: ClassVar[Capabilities]

    @abstractmethod
    def load(self) -> None:
        """Load the model; ModelError or InputError with the engine's reason in one line."""

    @abstractmethod
    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield the scores of every window, in the order in which the windows finish.

        It is called again for another text, whose scores must not depend on the texts before it.
        """

    # ---- Usually an engine has these.

    files: ClassVar[type[ModelFiles]] = ModelFiles
    """Class of its models before they load."""

    @classmethod
    def files_of(cls, model: PlannedModel) -> ModelFiles:
        """Return a model before it loads; an engine of several kinds of files chooses the class."""
        return cls.files(model)

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        """InputError if the model cannot run with the installed packages and the files on disk.

        ModelError, also from the methods of ``files``, if a server does not answer, or serves
        another model.  Only a worker may call these for a server, because it may never answer.
        """

    @classmethod
    def option_names(cls) -> Collection[str] | None:
        """Return the names of all options of the ``engine`` object.

        None if they are not known in this Python.
        """
        return None

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Return versions of packages and settings that can change a score, for the scores' key.

        Imports nothing.
        """
        return torch_related_builds(*cls.capabilities.packages)

    def prepare_load(self) -> None:
        """Do what ``load`` needs no GPU for, if it is to load while others have the GPUs."""

    def warm_up(self, windows: Sequence[Window], request: ScoreRequest) -> None:
        """Do what precedes the first of these windows, for example checks of the loaded model.

        It may be skipped: ``score`` must then do the same.
        """

    def layers(self) -> tuple[Layer, ...]:
        """Return how the linear layers ran, in the model's order; called after scoring.

        Empty if unknown.
        """
        return ()

    def provenance(self) -> dict[str, Any]:
        """Return what ran (device, dtype, options, batch), as JSON types; called after scoring.

        ``no_kld``: why there is no KLD, although there was a reference.
        """
        return {}

    def close(self) -> None:
        """Release the model's memory; also called after ``load`` or ``score`` failed."""

    # ---- An engine rarely has these.

    times: Mapping[Path, str] = {}
    """Weight file -> its times when it was last compared with ``stamp``."""

    @classmethod
    def refusal(cls, model: PlannedModel) -> str:
        """Return why the engine would refuse the model by its config; called after its import.

        "" if it would not.
        """
        return ""

    @classmethod
    def misreads(cls, model: PlannedModel) -> str:
        """Return why the engine would compute with other weights than a local model's files hold.

        "" if it would not.  Faults of the files themselves, which affect every engine, are not
        included.  The check reads headers, and does not import an engine.
        """
        return ""

    @classmethod
    def tokens(cls, file: Path, texts: Sequence[str]) -> dict[str, Any] | None:
        """Return the ids of texts by the engine's own tokenizer (``ids``, without BOS).

        ``adds_bos`` is returned too.  None if the engine does not have its own tokenizer, or is
        not installed.  Imports the engine.
        """
        return None

    @classmethod
    def missing_kernel(cls, quantization: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Return a format that this engine has no kernel for on this machine; "" without one.

        ``quantization``: the ``quantization_config`` of a checkpoint.  ``options``: the spec's
        ``engine`` object.
        """
        return ""

    @classmethod
    def gpus(cls, model: PlannedModel) -> int | None:
        """Return the number of GPUs for the model if the machine has any.

        0: all; None: as many as its weights need.
        """
        return 1

    @classmethod
    def gpu_bytes(cls, model: PlannedModel) -> int | None:
        """Return memory of one GPU that is enough to load and score a local model.

        None if it is not known: the model then has its GPUs alone.
        """
        return None

    @classmethod
    def spread_by(cls, model: PlannedModel) -> str:
        """Return the option that makes the engine itself spread the model over machines.

        "" if it does not.
        """
        return ""

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        """Import what loading imports; start no thread and use no GPU, since workers are forks.

        ``verbose``: may print.
        """
        if cls.capabilities.here:
            # An engine that runs on this machine computes the statistics of scores with torch.
            import torch  # noqa: F401

    def sample(
        self, prompts: Sequence[Sequence[int]], n_tokens: int, seed: int
    ) -> Iterator[SampledToken]:
        """Yield ``n_tokens`` sampled tokens of each prompt, all of the same length.

        Tokens of different prompts may come in any order.  They are drawn at temperature 1 from the
        model's distribution over all tokens: nothing is masked, no default of the model applies,
        and tokens that end a text are like any other.  The same seed gives the same tokens if
        machine, version and prompts are the same; random numbers are those of ``seed_of``.
        An engine with this method has ``samples`` in its capabilities.
        """
        raise ModelError(f"{self.planned.load_fn} does not sample text")

    def exchangeable(self, reference: Engine) -> tuple[QuantizedModule, ...]:
        """Return the modules of this loaded model that can be exchanged for the reference's.

        Modules whose weights are the same in both models are left out.  ModelError if the two
        models cannot be exchanged in parts, because more than roundings differs between them.  An
        engine with this method has ``restores`` in its capabilities.

        ``reference``: a loaded model in the same engine.
        """
        raise ModelError(f"{self.planned.load_fn} does not exchange modules")

    def trials(
        self, reference: Engine, windows: Sequence[Window], trials: Sequence[Trial]
    ) -> Iterator[TrialScore]:
        """Yield the score of every trial in every window, one window after the other.

        Both models are as before when the iterator ends, also by an error.
        """
        raise ModelError(f"{self.planned.load_fn} does not exchange modules")

    def record_outputs(self, window: Window, file: Path) -> None:
        """Run a window alone, and write what every module takes and returns into a new file.

        ModelError if this model does not show its modules.  An engine with this method has
        ``outputs`` in its capabilities; ``layers/module_outputs.py`` writes and reads the file.
        """
        raise ModelError(f"{self.planned.load_fn} does not show its layers")

    def compare_outputs(self, window: Window, file: Path) -> list[ModuleDifference]:
        """Run a window alone, and return how far its modules are from those in the file.

        The file was written by ``record_outputs`` of another model, maybe in another engine.
        Modules that only one of the two has are left out.  The differences are in the order in
        which this model runs.  ModelError if the runs cannot be compared.
        """
        raise ModelError(f"{self.planned.load_fn} does not show its layers")

    def reason_of(self, error: Exception) -> str:
        """Return one line on an error of the engine that is not a CompareQError."""
        return with_class(error)

    def check_unchanged(self) -> None:
        """ModelError if the model may have changed since ``stamp``.

        It is called before each commit of scores.
        """
        files = self.files_of(self.planned)
        stamp = self.planned.stamp
        times: dict[Path, str] = {}
        for file in self.times or files.weight_files():
            if file.is_file():
                times[file] = times_of(file.stat())
        # The stamp reads parts of all files: compare it only if a file has new times.
        has_new_times = bool(times.items() - self.times.items())
        if has_new_times and stamp and files.stamp() != stamp:
            raise ModelError(
                f"{self.planned.model_dir}: changed after this run began; run again when no "
                "process writes to it"
            )
        self.times = times
