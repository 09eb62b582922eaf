"""The interface between the driver and the engines: the types that both exchange, ``ModelFiles``
and ``Engine``.

``ModelFiles`` describes a model before it loads, ``Engine`` loads and scores it.  An engine that
returns logits derives from ``LogitsEngine`` (``backends/logits_engine.py``); its docstring shows a
complete engine.  This module depends on no engine, file format or statistic.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from .common.errors import ModelError
from .common.message_text import with_class
from .common.packages import computing, installed_versions
from .common.storage import times_of
from .hub import SILENT, Watch

Spans = tuple[tuple[int, int], ...]
"""The scored positions of a window: non-empty ranges [begin, end) in order, with gaps between them.
"""


def span_numbers(spans: Spans, length: int) -> tuple[int, ...]:
    """Return the first scored position if all positions after it are scored, else begin and end of
    each range.
    """
    (first, end), *more = spans
    return (
        (first,)
        if end == length and not more
        else tuple(number for span in spans for number in span)
    )


@dataclass(frozen=True)
class Window:
    """A token sequence that one forward pass scores."""

    index: int  # its number in the run, from 0
    token_ids: NDArray[np.int32]  # [L]
    # within 1 to L - 1; each position is predicted from all tokens before it in the window
    spans: Spans
    is_single: bool = (
        False  # no other window is computed with it, so that its roundings are those of batch 1
    )

    @classmethod
    def scored_from(cls, index: int, token_ids: NDArray[np.int32], first: int = 1) -> Window:
        """Return a window whose positions from ``first`` on are all scored."""
        return cls(index, token_ids, ((first, len(token_ids)),))

    @property
    def n_scored(self) -> int:
        """Number of scored positions T."""
        return sum(end - begin for begin, end in self.spans)

    @property
    def positions(self) -> NDArray[np.int32]:
        """The scored positions [T]."""
        return np.concatenate([np.arange(begin, end, dtype=np.int32) for begin, end in self.spans])

    @property
    def targets(self) -> NDArray[np.int32]:
        """The scored tokens [T]."""
        return self.token_ids[self.positions]

    def predicting(self, begin: int, end: int) -> Iterator[slice]:
        """Yield the positions from ``begin`` to ``end`` whose logits predict a scored token,
        counted from ``begin``.
        """
        for first, last in self.spans:
            low, high = max(first - 1, begin), min(last - 1, end)
            if low < high:
                yield slice(low - begin, high - begin)

    @property
    def positions_text(self) -> str:
        """The scored positions as text, for digests."""
        return ",".join(map(str, span_numbers(self.spans, len(self.token_ids))))

    @cached_property
    def digest(self) -> str:
        """The first 32 hexadecimal digits of the SHA-256 of the tokens, the scored positions, and
        ``is_single``.

        Scores are found by it: windows with the same digest have the same scores, whichever text
        they are cut from.
        """
        facts = f"{self.positions_text} "
        if self.is_single:
            facts += "alone "
        tokens = self.token_ids.astype("<i4").tobytes()
        return hashlib.sha256(facts.encode() + tokens).hexdigest()[:32]


@dataclass(frozen=True)
class TokenScores:
    """Scores of the window with index ``window``, as ``backends/scoring/token_statistics.py``
    defines them.

    Each array is [T], one entry per scored position, in nats where it has a unit; None if the
    engine does not know it.  With a reference, all arrays exist.
    """

    window: int
    logprob: NDArray[np.float32]  # of the real token
    entropy: NDArray[np.float32] | None = None
    top1_logprob: NDArray[np.float32] | None = None  # of the most probable token
    top1: NDArray[np.bool_] | None = None  # the real token is the most probable one
    ref_logprob: NDArray[np.float32] | None = None  # of the real token in the reference
    ref_top1_logprob: NDArray[np.float32] | None = None
    kld: NDArray[np.float32] | None = None  # KL(reference || model)
    same_top: NDArray[np.bool_] | None = None  # both have the same most probable token


class ScoreRequest(BaseModel):
    """Options of ``Engine.score``, apart from the windows."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: Path | None = None  # folder of the reference store to compare with
    vocab_size: int | None = (
        None  # number of entries that are compared, the first ones; None: all of the reference's
    )
    record: Path | None = (
        None  # existing folder into which this model's states or logits are written, as a store
    )
    record_key: str = ""  # key of the reference that is recorded, for the header of each file


@dataclass(frozen=True)
class Storage:
    """Stored size of a model; None if unknown, never a guess."""

    bpw_layer: float | None = None  # bits per weight of the layers
    bpw_head: float | None = None
    vram_bits: float | None = None  # layers and head together
    note: str = ""  # why something is unknown
    file_bytes: int | None = None  # the weight files on disk, with everything in them

    @property
    def vram_gib(self) -> float | None:
        """Size of layers and head in GiB."""
        return None if self.vram_bits is None else self.vram_bits / 8 / 1024**3


@dataclass(frozen=True)
class Layer:
    """``count`` linear layers as an engine ran them; the checkpoint's scheme may differ."""

    name: str  # the module's path in the model, with ``*`` for numbers that vary
    weights: str  # stored format: "nvfp4 g16", "int4 g128", "fp8 channel", "bfloat16"
    activations: str  # their precision in the product: "bfloat16", "int8 token", "nvfp4"
    kernel: str  # the class or function that computed the product
    asked: str = ""  # the activations of the checkpoint's scheme if others ran
    count: int = 1


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model from its files, before it loads; None if they do not state it."""

    vocab_size: int | None = None  # number of logits
    context: int | None = None  # maximum number of tokens
    tokenizer: Path | Mapping[int, str] | None = (
        None  # its folder, or the vocabulary without special tokens
    )
    rope_changes_above: int | None = (
        None  # longest context up to which the engine uses the short rotary factors
    )
    dtype: str | None = None  # of unquantized products, by spec and files


@dataclass(frozen=True)
class ServingFacts:
    """Sizes from a model's config that decide how much memory serving takes in addition to the
    weights.
    """

    vocab_size: int | None = None  # logits of a token; None if not stated
    kv: tuple[
        tuple[int, int | None], ...
    ] = ()  # (numbers of a token, number of last tokens that are kept or None for
    # all) for each group of attention layers; empty if not stated
    kv_layers: int = 0  # number of these layers
    kv_is_upper: bool = False  # layers with a sliding window count as if they kept all tokens
    step_numbers: int | None = (
        None  # numbers of a token that a decoder layer holds at once; None if not stated
    )
    float_bytes: int | None = None  # bytes of such a number; None: the dtype that ran decides


@dataclass(frozen=True)
class Capabilities:
    """Properties of an engine that are known before it is imported."""

    load_fns: tuple[str, ...]  # names of its load functions in specs (ExLlamaV3's names)
    fwd_fn: str  # name of its forward function in specs
    packages: tuple[str, ...]  # distributions; any one of these provides the engine
    install: str  # the command that installs it
    summary: str
    override_tensors: bool = (
        False  # ``model_dir`` can be ``[dir, files]``, whose tensors replace the model's
    )
    reference: bool = True  # its models can be references
    compares: bool = True  # its models can be compared with a reference
    suffixes: tuple[str, ...] = ()  # of model files that only this engine reads
    quant_method: str = ""  # of a config.json that only this engine reads
    marker: str = ""  # a file that only the folders of its models have
    schemes: tuple[str, ...] = ()  # how the addresses of its models begin
    here: bool = True  # it runs on this machine, and its scores depend on the hardware
    torch: bool = True  # it computes with torch; a CPU build of torch does not use the GPUs
    batches: bool = (
        False  # windows are computed in batches, so that rounding depends on the windows of a run
    )
    refuses: bool = False  # ``refusal`` may find reasons that ``check`` does not
    decodes: int = 0  # maximum number of windows at a time in decode
    noise: bool = False  # it has the option ``noise``
    eager: Mapping[str, Any] = field(
        default_factory=dict
    )  # options that turn compilation off, as noise needs
    arithmetic: Mapping[str, Any] = field(
        default_factory=dict
    )  # options that decide roundings, and their defaults:
    # None if the engine chooses
    one_line: Mapping[str, Mapping[str, Any]] = field(
        default_factory=dict
    )  # load_fn -> options in one-line calls,
    # unless the call gives them

    def installed(self) -> tuple[str, str] | None:
        """Return (distribution, version) that provides the engine, ("built in", "") without one;
        None if missing.
        """
        return (
            next(iter(installed_versions(self.packages).items()), None)
            if self.packages
            else ("built in", "")
        )


@dataclass(frozen=True)
class Decode:
    """Decode, as in generation: earlier tokens of a window come from the KV cache."""

    step: int = 1  # tokens of a window at a time
    batch: int = 1  # windows at a time

    @property
    def label(self) -> str:
        """Return ``decode 1x32`` for one token of each of 32 windows."""
        return f"decode {self.step}x{self.batch}"


class TensorBytes(NamedTuple):
    """A stored tensor, and where its bytes are; ``shape``: inputs last."""

    name: str
    file: Path
    start: int
    nbytes: int
    shape: tuple[int, ...]


class EngineInfo(BaseModel):
    """The engine of one model as installed in one Python, and the engine's checks of the model
    before it loads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    installed: tuple[str, str] | None = (
        None  # (distribution, version) that provides the engine; None: not installed
    )
    versions: dict[
        str, str
    ] = {}  # packages, settings and named files that can change a score; part of its key
    cpu_only: bool = False  # torch of this Python is a build without GPU code
    problem: str = ""  # why the model cannot run there, in one line
    facts: ModelFacts | None = None  # of a model on a server; None if its files are on this machine
    stamp: str = ""  # of a model on a server
    unreachable: str = (
        ""  # why a server did not answer; the request is repeated when this model is scheduled
    )


class PlannedModel(BaseModel):
    """One model whose spec was checked: the only input of an engine, sent to its worker as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    label: str  # the model's name in tables and messages
    engine: str  # its name in the registry
    load_fn: str  # which of the engine's ways to load it
    # folder, file, hub id or server URL; ``ModelFiles.fetch`` replaces a hub id by a local path
    model_dir: str
    max_tokens: int  # length of the longest window of all texts
    options: dict[str, Any] = {}  # the spec's ``engine`` object, checked by the engine
    override_tensors: tuple[Path, ...] = ()  # files whose tensors replace the model's
    revision: str | None = None  # branch, tag or commit of a hub id; None: the default branch
    decode: Decode | None = None  # how windows are fed in decode steps; None: prefill
    check_decode: bool = (
        True  # refuse decode that differs from prefill; False: the run compares them itself
    )
    stamp: str = ""  # ``ModelFiles.stamp`` when the scores' key was made; empty before that
    log_file: Path | None = None  # file for the engine's output; None: the terminal

    def updated(self, **changes: Any) -> Self:
        """A copy with these fields changed; TypeError for a field that does not exist."""
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise TypeError(f"PlannedModel has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=changes)


class ModelFiles:
    """A model before it loads: a folder, a GGUF file or on a server.  The defaults are for a model
    without files.

    Nothing here imports an engine.  Methods about the content need the files on this machine.
    """

    is_store: ClassVar[bool] = False
    """The model is a finished reference store, which a run only reads."""

    def __init__(self, model: PlannedModel) -> None:
        self.planned = model

    @property
    def is_remote(self) -> bool:
        """Return True if the model must still be fetched."""
        return False

    def fetch(self, watch: Watch = SILENT) -> PlannedModel:
        """Return the model with a local ``model_dir``, downloading it if necessary; InputError with
        the reason.
        """
        return self.planned

    def would_fetch(self) -> str:
        """Return what ``fetch`` would download, such as ``16.1 GB to download``; InputError if it
        would fail.
        """
        return ""

    def cached(self) -> PlannedModel | None:
        """Return the model with a local ``model_dir``; None if something would have to be
        downloaded.
        """
        return self.planned

    def facts(self) -> ModelFacts:
        """Return facts from the files' headers; InputError if files are missing."""
        return ModelFacts()

    def stamp(self) -> str:
        """Return a fingerprint of the files, which is part of the scores' key; InputError for
        damaged files.
        """
        return ""

    def content(self) -> str:
        """Return a fingerprint that a copy of the model on another machine shares."""
        return self.stamp()

    def finished_store(self) -> Path:
        """Return the folder of the reference store, if ``is_store``."""
        raise NotImplementedError

    def weight_files(self) -> tuple[Path, ...]:
        """Return the weight files, which ``stamp`` reads in samples; empty if they are not on this
        machine.
        """
        return ()

    def placed(self) -> list[TensorBytes]:
        """Return the stored tensors of the weight files, and where they are; empty if unknown."""
        return []

    def storage(self) -> Storage:
        """Return the stored size of the model by the convention of
        ``backends/checkpoint/folder.py``.
        """
        return Storage(note="this model has no files")

    def serving(self) -> ServingFacts:
        """Return the sizes that decide how much memory serving takes in addition to the weights."""
        return ServingFacts()


class Engine(ABC):
    """One model in one engine.  Class methods are called before the engine is imported."""

    capabilities: ClassVar[Capabilities]
    files: ClassVar[type[ModelFiles]] = ModelFiles
    """Class of its models before they load."""
    times: Mapping[Path, str] = {}
    """Weight file -> its times when it was last compared with ``stamp``."""

    def __init__(self, model: PlannedModel) -> None:
        self.planned = model

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        """InputError if the model cannot run with the installed packages and the files on disk.

        ModelError, also from the methods of ``files``, if a server does not answer, or serves
        another model.  Only a worker may call these for a server, because it may never answer.
        """

    @classmethod
    def option_names(cls) -> Collection[str] | None:
        """Return the names of all options of the ``engine`` object; None if they are not known in
        this Python.
        """
        return None

    @classmethod
    def refusal(cls, model: PlannedModel) -> str:
        """Return why the engine, which is imported, would refuse the model by its config; "" if it
        would not.
        """
        return ""

    @classmethod
    def misreads(cls, model: PlannedModel) -> str:
        """Return why the engine would compute with other weights than a local model's files hold;
        "" if it would not.

        Faults of the files themselves, which affect every engine, are not included.  The check
        reads headers, and does not import an engine.
        """
        return ""

    @classmethod
    def tokens(cls, file: Path, texts: Sequence[str]) -> dict[str, Any] | None:
        """Return the ids that the engine's own tokenizer gives texts (``ids``, without BOS), and
        ``adds_bos``.

        None if the engine does not have its own tokenizer, or is not installed.  Imports the
        engine.
        """
        return None

    @classmethod
    def missing_kernel(cls, quantization: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        """Return a format that this engine has no kernel for on this machine; "" if it has all
        kernels.

        ``quantization``: the ``quantization_config`` of a checkpoint.  ``options``: the spec's
        ``engine`` object.
        """
        return ""

    @classmethod
    def gpus(cls, model: PlannedModel) -> int | None:
        """Return the number of GPUs for the model if the machine has any; 0: all; None: as many as
        its weights need.
        """
        return 1

    @classmethod
    def spread_by(cls, model: PlannedModel) -> str:
        """Return the option that makes the engine itself spread the model over machines; empty if
        it does not.
        """
        return ""

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Return versions of packages and settings that can change a score, for the scores' key;
        imports nothing.
        """
        return computing(*cls.capabilities.packages)

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        """Import what loading imports; start no thread and use no GPU: workers are forks.
        ``verbose``: may print.
        """
        if cls.capabilities.here:
            import torch  # noqa: F401 - every engine computes the statistics of scores with it

    @abstractmethod
    def load(self) -> None:
        """Load the model; ModelError or InputError with the engine's reason in one line."""

    @abstractmethod
    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield the scores of every window, in the order in which the windows finish.

        It is called again for another text, whose scores must not depend on the texts before it.
        """

    def reason_of(self, error: Exception) -> str:
        """Return one line on an error of the engine that is not a CompareQError."""
        return with_class(error)

    def check_unchanged(self) -> None:
        """ModelError if the model may have changed since ``stamp``; called before each commit of
        scores.
        """
        files, stamp, where = self.files(self.planned), self.planned.stamp, self.planned.model_dir
        times = {
            file: times_of(file.stat())
            for file in self.times or files.weight_files()
            if file.is_file()
        }
        if times.items() - self.times.items() and stamp and files.stamp() != stamp:
            raise ModelError(
                f"{where}: changed after this run began; run again when no process writes to it"
            )
        self.times = times

    def layers(self) -> tuple[Layer, ...]:
        """Return how the linear layers ran, in the model's order; empty if unknown.  Called after
        scoring.
        """
        return ()

    def provenance(self) -> dict[str, Any]:
        """Return what ran (device, dtype, options, batch), as JSON types.  Called after scoring."""
        return {}

    def close(self) -> None:
        """Release the model's memory; also called after ``load`` or ``score`` failed."""
