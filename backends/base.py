"""The interface between the driver and the engines: the types that travel, ``ModelFiles`` and ``Engine``.

``ModelFiles`` describes a model before it loads: a Hugging Face folder (``backends/checkpoint/folder.py``), a GGUF file
(``backends/checkpoint/gguf.py``) or what a server serves (``backends/vllm_server/engine.py``).  ``Engine`` loads and
scores it.  An engine whose logits are at hand derives from ``LogitsEngine`` (``backends/logits_engine.py``), whose
docstring shows a whole engine.  The driver never asks an engine for its name.

This file knows no engine, no file format and no statistic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from compare_q.backends.common.packages import computing, installed_versions
from compare_q.backends.hub import SILENT, Watch

Spans = tuple[tuple[int, int], ...]
"""The scored positions of a window: ranges [begin, end), none of them empty, in order, and apart from one another."""


def abbreviated(spans: Spans, length: int) -> tuple[int, ...]:
    """Where all positions behind the first scored one are scored too, that one; else each range's begin and end."""
    (first, end), *more = spans
    return (first,) if end == length and not more else tuple(number for span in spans for number in span)


@dataclass(frozen=True)
class Window:
    """A piece of tokenized text that one forward pass scores; ``index`` is its number in the run, from 0.

    ``token_ids`` is int32 [L].  The positions in ``spans`` (from 1 to L - 1) are scored: the token at each of them is
    predicted from all tokens before it in the window.
    """

    index: int
    token_ids: NDArray[np.int32]
    spans: Spans

    @classmethod
    def scored_from(cls, index: int, token_ids: NDArray[np.int32], first: int = 1) -> Window:
        """A window of which every position from ``first`` on is scored."""
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
        """Of the positions ``begin`` to ``end``, those whose logits predict a scored token, counted from ``begin``."""
        for first, last in self.spans:
            low, high = max(first - 1, begin), min(last - 1, end)
            if low < high:
                yield slice(low - begin, high - begin)

    @property
    def what_is_scored(self) -> str:
        """The scored positions as text, for digests."""
        return ",".join(map(str, abbreviated(self.spans, len(self.token_ids))))


@dataclass(frozen=True)
class TokenScores:
    """Scores of the window with index ``window``, as ``backends/scoring/statistics.py`` defines them.

    Each array is [T], T = ``Window.n_scored``, with one entry for each scored position, in order.  ``logprob`` (of the
    real token), ``entropy`` and ``top1_logprob`` (of the most probable token) are float32, in nats; ``top1`` is bool:
    the real token is the most probable one.  Against a reference: ``ref_logprob``, ``ref_top1_logprob`` and ``kld`` =
    KL(reference || model), float32, in nats; ``same_top``, bool: both have the same most probable token; and if they
    are asked for, float32: ``reverse_kld`` = KL(model || reference) and ``js`` (Jensen-Shannon), in nats, ``tv`` (total
    variation) and ``top5`` (share of the five most probable tokens that both have), from 0 to 1.  An array is None
    where the engine cannot tell, and without a reference.
    """

    window: int
    logprob: NDArray[np.float32]
    entropy: NDArray[np.float32] | None = None
    top1_logprob: NDArray[np.float32] | None = None
    top1: NDArray[np.bool_] | None = None
    ref_logprob: NDArray[np.float32] | None = None
    ref_top1_logprob: NDArray[np.float32] | None = None
    kld: NDArray[np.float32] | None = None
    same_top: NDArray[np.bool_] | None = None
    reverse_kld: NDArray[np.float32] | None = None
    js: NDArray[np.float32] | None = None
    tv: NDArray[np.float32] | None = None
    top5: NDArray[np.float32] | None = None

    def without_divergences(self) -> TokenScores:
        """The same scores without the arrays that have to be asked for."""
        return replace(self, reverse_kld=None, js=None, tv=None, top5=None)

    def alone(self) -> TokenScores:
        """The same scores without the arrays that depend on a reference."""
        return replace(self.without_divergences(), ref_logprob=None, ref_top1_logprob=None, kld=None, same_top=None)


class ScoreRequest(BaseModel):
    """Options of ``Engine.score``, apart from the windows.

    Attributes:
        reference: folder of the reference store to compare with; None: no comparison.
        vocab_size: number of vocabulary entries that model and reference share, to which both are cut; None: all of the
            reference's.
        record: existing folder into which this model's states or logits are written, as a reference store
            (``backends/reference/store.py``); None: nothing is recorded.
        divergences: also compute ``reverse_kld``, ``js``, ``tv`` and ``top5`` of ``TokenScores``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    reference: Path | None = None
    vocab_size: int | None = None
    record: Path | None = None
    divergences: bool = False


@dataclass(frozen=True)
class Storage:
    """Stored size of a model; None where it is not known, never a guess.

    ``bpw_layer`` and ``bpw_head`` are bits per weight of the layers and of the head; ``vram_bits`` is the number of
    bits of both together; ``file_bytes`` is what the files of its weights take on disk, whatever they hold; ``note``
    says why something is not known.
    """

    bpw_layer: float | None = None
    bpw_head: float | None = None
    vram_bits: float | None = None
    note: str = ""
    file_bytes: int | None = None

    @property
    def vram_gib(self) -> float | None:
        """Size of layers and head in GiB."""
        return None if self.vram_bits is None else self.vram_bits / 8 / 1024**3


@dataclass(frozen=True)
class Layer:
    """``count`` linear layers as an engine ran them: what the engine really did, not what the checkpoint asks for.

    ``name``: the module's path in the model, with ``*`` for its numbers where there are several; ``weights``: how the
    weights are stored ("nvfp4 g16", "int4 g128", "fp8 channel", "bfloat16"); ``activations``: the precision in which
    the product took the activations ("bfloat16", "int8 token", "nvfp4"); ``kernel``: the class or function that
    computed the product; ``asked``: the activations that the checkpoint's scheme asks for, where other activations ran,
    else "".
    """

    name: str
    weights: str
    activations: str
    kernel: str
    asked: str = ""
    count: int = 1


@dataclass(frozen=True)
class ModelFacts:
    """What a model's files say before anything loads the model; None where they do not say it.

    ``vocab_size``: the number of its logits; ``context``: the number of tokens that it can take; ``tokenizer``: a
    folder with its own tokenizer, or its vocabulary (id -> token, without special tokens).  ``rope_changes_above``: so
    many tokens of context from which the engine takes other rotary factors, whatever the length of a window; ``dtype``:
    what unquantized products are computed in, by the spec and the files.
    """

    vocab_size: int | None = None
    context: int | None = None
    tokenizer: Path | Mapping[int, str] | None = None
    rope_changes_above: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class Capabilities:
    """What the driver and ``compare-q engines`` may know of an engine before it is imported.

    ``load_fns``: what specs call its ways to load, with ExLlamaV3's names; ``fwd_fn``: the forward name that goes with
    all of them; ``packages``: distributions, each of which provides the engine; ``install``: the exact command that
    installs it.  ``override_tensors``: ``model_dir`` can be ``[dir, files]``, and the tensors in the files replace
    the model's tensors of the same name. ``reference``: its models can be references; ``compares``: its models can
    be compared with a reference; ``suffixes``: of model files that no other engine reads; ``quant_method``: of a
    config.json that no other engine reads, and ``own_part``: of a weight that is stored so, for folders whose
    config.json does not name it; ``schemes``: how the addresses of its models begin; ``here``: it runs on
    this machine, so that its scores depend on this machine's hardware; ``torch``: it computes with torch, so that a
    CPU build of torch leaves the GPUs unused; ``batches``: windows are computed in batches, so that rounding
    depends on which windows a run has; ``decodes``: how many windows at a time it can score in the steps of
    generation, 0 if it cannot; ``decodes_behind_prompts``: it can do so for some tokens of a window alone.
    """

    load_fns: tuple[str, ...]
    fwd_fn: str
    packages: tuple[str, ...]
    install: str
    summary: str
    override_tensors: bool = False
    reference: bool = True
    compares: bool = True
    suffixes: tuple[str, ...] = ()
    quant_method: str = ""
    own_part: str = ""
    schemes: tuple[str, ...] = ()
    here: bool = True
    torch: bool = True
    batches: bool = False
    decodes: int = 0
    decodes_behind_prompts: bool = False

    def installed(self) -> tuple[str, str] | None:
        """(distribution, version) that provides the engine; None if it is not installed.

        For an engine that needs no package it is ("built in", "").
        """
        if not self.packages:
            return "built in", ""
        return next(iter(installed_versions(self.packages).items()), None)


@dataclass(frozen=True)
class Decode:
    """Windows are fed as generation computes them: ``step`` tokens of each of ``batch`` windows at a time.

    The keys and values of the tokens before come from the cache.  The first step of a window has nothing before it.
    ``behind_prompts``: only tokens whose logits predict scored ones are fed so, and those between them as prompts.
    """

    step: int = 1
    batch: int = 1
    behind_prompts: bool = False

    @property
    def words(self) -> str:
        """``decode 1x32``: one token of each of 32 windows."""
        return f"decode {self.step}x{self.batch}{' behind prompts' if self.behind_prompts else ''}"

    def stretches(self, window: Window) -> Iterator[tuple[int, int, bool]]:
        """(begin, end, whether they are fed in steps) of the positions of a window, in order."""
        done, everything = 0, ((1, len(window.token_ids) + 1),)
        for first, last in window.spans if self.behind_prompts else everything:
            if done < first - 1:
                yield done, first - 1, False
            yield first - 1, last - 1, True
            done = last - 1
        if done < len(window.token_ids):
            yield done, len(window.token_ids), False


class EngineInfo(BaseModel):
    """What one Python has of an engine, and what the engine says of one model before it loads.

    Attributes:
        installed: (distribution, version) that provides the engine; None: it is not installed.
        versions: packages, settings and contents of named files that can change a score; part of the scores' key.
        cpu_only: torch of this Python is a build without GPU code.
        problem: why the model cannot run there, in one line; empty if it can.
        facts: what a model on a server or node says of itself; None if its files are on this machine: read them.
        stamp: fingerprint of a model on a server (``ModelFiles.stamp``); empty if its files are on this machine.
        silence: why a server did not answer; empty if it did.  Such a model is asked again when its turn comes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    installed: tuple[str, str] | None = None
    versions: dict[str, str] = {}
    cpu_only: bool = False
    problem: str = ""
    facts: ModelFacts | None = None
    stamp: str = ""
    silence: str = ""


class PlannedModel(BaseModel):
    """One model whose spec was checked: the only input of an engine, sent to its worker as JSON.

    Engines read:

    Attributes:
        label: the model's name in tables and messages.
        engine: the engine's name in the registry (``backends/__init__.py``).
        load_fn: which of the engine's ways to load it.
        model_dir: folder, file, hub id or server URL; ``ModelFiles.fetch`` replaces a hub id by a local path, and from
            then on no engine asks the hub.
        max_tokens: length of the longest window of all texts, in tokens.
        options: the spec's ``engine`` object, checked by the engine.
        override_tensors: files whose tensors replace the model's.
        revision: branch, tag or commit of a hub id; None: the default branch.
        decode: how windows are fed in decode steps; None: prefill.
        stamp: ``ModelFiles.stamp`` when the scores' key was made; empty before that.
        log_file: file for the engine's output; None: the terminal.

    The driver alone reads, and fills while it plans:

    Attributes:
        spec: the model spec as JSON types, without keys that the user did not set.
        python: path of the Python that runs the engine; None: the driver's.
        n_gpus: number of GPUs that each replica gets; 0: it runs on the CPU.
        replicas: number of workers that share the windows.
        resources: Ray's custom resources that a worker takes, by name.
        hardware: the part of the scores' key that names GPUs, driver, CPU and settings of the machine.
        info: what ``python`` has of the engine.
        is_reference: the other models are compared with this one.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    label: str
    engine: str
    load_fn: str
    model_dir: str
    max_tokens: int
    options: dict[str, Any] = {}
    override_tensors: tuple[Path, ...] = ()
    revision: str | None = None
    decode: Decode | None = None
    stamp: str = ""
    log_file: Path | None = None

    spec: dict[str, Any] = {}
    python: str | None = None
    n_gpus: int = 0
    replicas: int = 1
    resources: dict[str, float] = {}
    hardware: dict[str, Any] = {}
    info: EngineInfo = EngineInfo()
    is_reference: bool = False

    def updated(self, **changes: Any) -> Self:
        """A copy with these fields changed; TypeError for a field that does not exist."""
        if unknown := changes.keys() - type(self).model_fields.keys():
            raise TypeError(f"PlannedModel has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=changes)


class ModelFiles:
    """A model as it lies on a disk, on the hub or behind a server; every default is right for a model without files.

    Nothing here imports an engine.  What is said of a model's content holds once it is on this machine.
    """

    def __init__(self, model: PlannedModel) -> None:
        self.planned = model

    @property
    def is_remote(self) -> bool:
        """Whether the model still has to be fetched."""
        return False

    def fetch(self, watch: Watch = SILENT) -> PlannedModel:
        """Return the model with a local ``model_dir``, downloaded if need be; InputError with the reason in one line.

        ``watch`` receives the size of the download and its progress.
        """
        return self.planned

    def would_fetch(self) -> str:
        """What ``fetch`` of a remote model would mean, such as ``16.1 GB to download``; nothing is downloaded.

        InputError with the reason in one line if the model cannot be had.
        """
        return ""

    def cached(self) -> PlannedModel | None:
        """Return the model with a local ``model_dir``; None if something would have to be downloaded."""
        return self.planned

    def facts(self) -> ModelFacts:
        """What the files say, read from headers only; InputError if files are missing."""
        return ModelFacts()

    def stamp(self) -> str:
        """Changes when the files do, and is part of the scores' key; InputError for damaged files."""
        return ""

    def content(self) -> str:
        """Like ``stamp``, but the same for a copy of the model on another machine."""
        return self.stamp()

    def weight_files(self) -> tuple[Path, ...]:
        """Files of the weights, of which ``stamp`` reads samples only; empty where they are not here."""
        return ()

    def storage(self) -> Storage:
        """Stored size of the model by the convention of ``backends/checkpoint/folder.py``."""
        return Storage(note="this model has no files")


class Engine(ABC):
    """One model in one engine.

    The class methods are called before the engine is imported.  An engine is constructed with a model whose files are
    on this machine; ``load`` may take minutes.
    """

    capabilities: ClassVar[Capabilities]
    files: ClassVar[type[ModelFiles]] = ModelFiles
    """What its models are before it loads them."""

    def __init__(self, model: PlannedModel) -> None:
        self.planned = model

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        """InputError if the model cannot run with the installed packages and the files on disk.

        ModelError, as from the methods of ``files``, if the model runs elsewhere and is silent, or not what it must be:
        only a worker may ask it, for it may never answer.
        """

    @classmethod
    def gpus(cls, model: PlannedModel) -> int | None:
        """How many GPUs the model takes where there are some: 0 means all, None as many as its weights need."""
        return 1

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Versions of packages, and settings, that can change a score and are part of its key; nothing is imported."""
        return computing(*cls.capabilities.packages)

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        """Import what loading and scoring any model will import, and touch no GPU: models are forks of that process.

        ``verbose``: the engine may print what it likes.
        """
        if cls.capabilities.here:
            import torch  # noqa: F401 - the statistics of the scores, in whichever engine

    @abstractmethod
    def load(self) -> None:
        """Load the model, or raise ModelError or InputError with the engine's reason in one line."""

    @abstractmethod
    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Yield the scores of every window, in the order in which the windows finish.

        It is called again for another text, whose scores must not depend on the texts before it.  ModelError if the
        engine fails.
        """

    def check_unchanged(self) -> None:
        """ModelError if the model may have changed since ``stamp``; it is called before scores are committed."""

    def layers(self) -> tuple[Layer, ...]:
        """How the model's linear layers ran, in the model's order; empty where the engine does not tell.

        It is called after scoring.
        """
        return ()

    def provenance(self) -> dict[str, Any]:
        """What really ran (device, dtype, options, batch shape), in JSON types only.  It is called after scoring."""
        return {}

    def close(self) -> None:
        """Release the model's memory.  It is also called after a load or a score that failed."""
