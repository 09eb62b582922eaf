"""The contract between the driver and the engines: the types that travel, what an engine must offer, its errors.

Two kinds of engine meet it.  A ``LogitsBackend`` hands out the logits of one window at a time, and the driver scores
them (``eval/run/scoring.py``).  A ``ScoringBackend`` scores where the logits are and hands out log-probabilities only.
The driver never asks an engine for its name.

What this file does not know: any engine, any file format, any statistic.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from backends.common.packages import installed_versions
from backends.common.watch import SILENT, Watch

if TYPE_CHECKING:
    import torch

    from backends.reference.head import Head


@dataclass(frozen=True)
class Window:
    """One evaluation window.

    ``token_ids`` is int32 [L]; positions ``score_from`` (>= 1) to L - 1 are scored, each as the prediction of the
    token at that position from all tokens before it in the window.
    """

    index: int
    token_ids: NDArray[np.int32]
    score_from: int = 1

    @property
    def n_scored(self) -> int:
        """Number of scored positions T = L - score_from."""
        return len(self.token_ids) - self.score_from


@dataclass(frozen=True)
class TokenScores:
    """Scores of one window, one entry a scored position, in order; definitions in ``backends/scoring/statistics.py``.

    All are [T], T = ``Window.n_scored``.  ``logprob`` (of the real token), ``entropy``, ``top1_logprob`` (of the most
    probable token): float32, nats; ``top1``: bool, the real token is the most probable one.  Against a reference:
    ``ref_logprob``, ``ref_top1_logprob`` and ``kld`` = KL(reference || model): float32, nats; ``same_top``: bool, both
    have the same most probable token.  None where an engine cannot tell, or without a reference.
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

    def alone(self) -> TokenScores:
        """The same scores without what depends on a reference."""
        return replace(self, ref_logprob=None, ref_top1_logprob=None, kld=None, same_top=None)


@dataclass(frozen=True)
class Task:
    """What a run does beside scoring: compare with a reference store, or leave this model behind as one.

    ``vocab_size``: the entries that model and reference share, to which logits are cut; None: the model's own.
    ``record``: an existing empty folder for ``backends/reference/store.py``.
    """

    reference: Path | None = None
    vocab_size: int | None = None
    record: Path | None = None


@dataclass(frozen=True)
class Storage:
    """Stored size of a model; ``None`` where it is not known, never a guess.

    ``bpw_layer`` and ``bpw_head`` are bits a weight; ``vram_bits`` is the bits of both together.  ``note`` says why
    something is unknown.
    """

    bpw_layer: float | None = None
    bpw_head: float | None = None
    vram_bits: float | None = None
    note: str = ""

    @property
    def vram_gib(self) -> float | None:
        """Layers and head in GiB."""
        return None if self.vram_bits is None else self.vram_bits / 8 / 1024**3


@dataclass(frozen=True)
class Layer:
    """One linear layer as an engine ran it: what the engine really did, not what the checkpoint asks for.

    ``name``: the module's path in the model; ``weights``: how the weights are stored ("nvfp4 g16", "int4 g128", "fp8
    channel", "bfloat16"); ``activations``: the precision in which the product took the activations ("bfloat16", "int8
    token", "nvfp4"); ``kernel``: the class or function that computed the product; ``asked``: the activations that the
    checkpoint's scheme asks for, where other activations ran, else "".
    """

    name: str
    weights: str
    activations: str
    kernel: str
    asked: str = ""


@dataclass(frozen=True)
class LayerGroup:
    """``count`` layers that ran alike and whose names differ in numbers only: ``layer``, with ``*`` for its numbers."""

    layer: Layer
    count: int


@dataclass(frozen=True)
class ModelFacts:
    """What a model's files say before anything loads it; None where they do not.

    ``vocab_size``: logits it has; ``context``: tokens it can take; ``tokenizer``: a folder with its own tokenizer, or
    its vocabulary (id -> token, without special tokens).
    """

    vocab_size: int | None = None
    context: int | None = None
    tokenizer: Path | Mapping[int, str] | None = None


@dataclass(frozen=True)
class Capabilities:
    """What the driver and ``--list-engines`` may know of an engine before it is imported.

    ``load_fns`` are upstream's names for its ways to load; ``fwd_fn`` the one forward name they go with.
    ``packages`` are distribution names, any one of which provides the engine; ``install`` is the exact cure.
    ``override_tensors``: ``model_dir`` can be ``[dir, files]``, whose tensors replace those of the same name.
    ``reference``: it can leave a reference behind; ``compares``: it can be compared with one; ``files``: suffixes of
    model files that only it reads; ``here``: it runs on this machine, whose hardware its scores name;
    ``torch``: it computes with torch, whose CPU builds leave GPUs alone.
    """

    load_fns: tuple[str, ...]
    fwd_fn: str
    packages: tuple[str, ...]
    install: str
    summary: str
    override_tensors: bool = False
    reference: bool = True
    compares: bool = True
    files: tuple[str, ...] = ()
    here: bool = True
    torch: bool = True

    def installed(self) -> tuple[str, str] | None:
        """(distribution, version) that provides the engine, or None.  Engines without packages are built in."""
        if not self.packages:
            return "built in", ""
        return next(iter(installed_versions(self.packages).items()), None)


@dataclass(frozen=True)
class LoadRequest:
    """Everything an engine is told about one model before it loads.

    ``model_dir`` is a local folder or a hub id; ``max_tokens`` the longest window that will be scored; ``options``
    the spec's ``engine`` object, checked by the engine itself.
    """

    label: str
    load_fn: str
    model_dir: str
    max_tokens: int
    options: Mapping[str, Any] = field(default_factory=dict)
    override_tensors: tuple[Path, ...] = ()
    revision: str | None = None
    log_file: Path | None = None


class Backend(ABC):
    """One model in one engine.  ``check`` runs before anything is imported; ``load`` may take minutes."""

    capabilities: ClassVar[Capabilities]

    def __init__(self, request: LoadRequest) -> None:
        self.request = request

    @classmethod
    def check(cls, request: LoadRequest) -> None:
        """Raise InputError if the request cannot work with what is installed and on disk.  Imports no engine."""

    @classmethod
    def is_remote(cls, request: LoadRequest) -> bool:
        """Whether the model's files still have to be fetched."""
        return False

    @classmethod
    def fetch(cls, request: LoadRequest, watch: Watch = SILENT) -> LoadRequest:
        """The request with a model on this machine, downloaded if need be; InputError with the reason.

        ``watch`` is told how large the download is and how far.
        """
        return request

    @classmethod
    def would_fetch(cls, request: LoadRequest) -> str:
        """What ``fetch`` of a remote model would mean, e.g. ``16.1 GB to download``; it downloads nothing.

        InputError with the reason in one line if the model cannot be had.
        """
        return ""

    @classmethod
    def here(cls, request: LoadRequest) -> LoadRequest | None:
        """The request with a model that is on this machine; None if something would have to be downloaded."""
        return None if cls.is_remote(request) else request

    @classmethod
    def facts(cls, request: LoadRequest) -> ModelFacts:
        """What a fetched model's files say; InputError if they are missing.  Cheap: it is called before every run."""
        return ModelFacts()

    @classmethod
    def stamp(cls, request: LoadRequest) -> str:
        """What changes when a fetched model does: part of the key of its scores.  InputError for damaged files."""
        return ""

    @classmethod
    def content(cls, request: LoadRequest) -> str:
        """Like ``stamp``, but the same for a copy of the model on another machine."""
        return cls.stamp(request)

    @classmethod
    @abstractmethod
    def versions(cls) -> dict[str, str]:
        """Versions (and settings) that can change a score; part of the cache key, so it must not import anything."""

    @abstractmethod
    def load(self) -> None:
        """Load the model, or raise ModelError or InputError with the engine's reason in one line."""

    @abstractmethod
    def storage(self) -> Storage:
        """Stored size of the model by the one convention (``backends/checkpoint/stored_bits.py``); needs no load."""

    def layers(self) -> tuple[LayerGroup, ...]:
        """How the model's linear layers ran, in the model's order; empty where the engine does not tell.

        Called after scoring.
        """
        return ()

    def provenance(self) -> dict[str, Any]:
        """What really ran: device, dtype, options, batch shape; JSON types only.  Called after scoring."""
        return {}

    @abstractmethod
    def close(self) -> None:
        """Release the model's memory.  Also called after a failed load or score."""


class LogitsBackend(Backend):
    """An engine that hands out logits."""

    def prepare(self, windows: Sequence[Window]) -> None:
        """All windows whose logits will be asked for, in this order; called once, before the first."""

    @abstractmethod
    def logits(self, window: Window) -> torch.Tensor:
        """Logits [L, V] of one window over the real vocabulary, any float dtype, on any device."""

    def head(self) -> tuple[torch.Tensor, torch.Tensor | None, Head] | str:
        """(weight [V, H], bias [V] or None, the rest) of a head that can be recomputed, or why there is none."""
        return "this engine does not show its head"

    def states(self) -> torch.Tensor:
        """States [L, H] that entered the head in the last call of ``logits``; only after ``head`` gave one."""
        raise NotImplementedError


class ScoringBackend(Backend):
    """An engine that scores next to its own lm_head and never hands out logits."""

    @abstractmethod
    def score(self, windows: Iterable[Window], task: Task) -> Iterator[TokenScores]:
        """Scores of every window, in the order in which they finish."""
