"""Types that describe one model: what is planned, what its files tell, and how its layers ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from pydantic import BaseModel, ConfigDict


@dataclass(frozen=True)
class Decode:
    """Decode, as in generation: earlier tokens of a window come from the KV cache."""

    step: int = 1  # tokens of a window at a time
    batch: int = 1  # windows at a time

    @property
    def label(self) -> str:
        """``decode 1x32`` for one token of each of 32 windows."""
        return f"decode {self.step}x{self.batch}"


class PlannedModel(BaseModel):
    """One model whose spec was checked: the only input of an engine, sent to its worker as JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    label: str  # the model's name in tables and messages
    engine: str  # its name in the registry
    load_fn: str  # which of the engine's ways to load it
    # Folder, file, hub id or server URL; ``ModelFiles.fetch`` replaces a hub id by a local path.
    model_dir: str
    max_tokens: int  # length of the longest window of all texts
    options: dict[str, Any] = {}  # the spec's ``engine`` object, checked by the engine
    override_tensors: tuple[Path, ...] = ()  # files whose tensors replace the model's
    revision: str | None = None  # branch, tag or commit of a hub id; None: the default branch
    decode: Decode | None = None  # how windows are fed in decode steps; None: prefill
    # Refuse decode that differs from prefill; False: the run compares them itself.
    check_decode: bool = True
    samples: bool = False  # it is loaded to sample text, not to score
    stamp: str = ""  # ``ModelFiles.stamp`` when the scores' key was made; empty before that
    log_file: Path | None = None  # file for the engine's output; None: the terminal

    def updated(self, **changes: Any) -> Self:
        """Return a copy with these fields changed; TypeError for a field that does not exist."""
        unknown = changes.keys() - type(self).model_fields.keys()
        if unknown:
            # ``model_copy`` would accept any name.
            raise TypeError(f"PlannedModel has no {', '.join(sorted(unknown))}")
        return self.model_copy(update=changes)


@dataclass(frozen=True)
class ModelFacts:
    """Facts about a model from its files, before it loads; None if they do not state it.

    Attributes:
        vocab_size: number of logits.
        context: maximum number of tokens.
        tokenizer: its folder, or the vocabulary without special tokens.
        rope_changes_above: longest context up to which the engine uses the short rotary factors.
        dtype: of unquantized products, by spec and files.
    """

    vocab_size: int | None = None
    context: int | None = None
    tokenizer: Path | Mapping[int, str] | None = None
    rope_changes_above: int | None = None
    dtype: str | None = None


@dataclass(frozen=True)
class ServingFacts:
    """Sizes from a model's config: the memory that serving takes in addition to the weights.

    Attributes:
        vocab_size: logits of a token; None if not stated.
        kv: for each group of attention layers (numbers of a token, number of last tokens that are
            stored or None for all); empty if not stated.
        kv_layers: number of these layers.
        kv_is_upper: layers with a sliding window count as if they stored all tokens.
        step_numbers: numbers of a token that a decoder layer holds at once; None if not stated.
        float_bytes: bytes of such a number; None: the dtype that ran decides.
    """

    vocab_size: int | None = None
    kv: tuple[tuple[int, int | None], ...] = ()
    kv_layers: int = 0
    kv_is_upper: bool = False
    step_numbers: int | None = None
    float_bytes: int | None = None


@dataclass(frozen=True)
class Storage:
    """Stored size of a model; None if unknown, never a guess.

    Attributes:
        bpw_layer: bits per weight of the layers.
        bpw_head: bits per weight of the head.
        vram_bits: layers and head together.
        note: why something is unknown.
        file_bytes: the weight files on disk, with everything in them.
    """

    bpw_layer: float | None = None
    bpw_head: float | None = None
    vram_bits: float | None = None
    note: str = ""
    file_bytes: int | None = None

    @property
    def vram_gib(self) -> float | None:
        """Size of layers and head in GiB."""
        if self.vram_bits is None:
            return None
        return self.vram_bits / 8 / 1024**3


class TensorBytes(NamedTuple):
    """A stored tensor, and where its bytes are; ``shape``: inputs last."""

    name: str
    file: Path
    start: int
    nbytes: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Layer:
    """``count`` linear layers as an engine ran them; the checkpoint's scheme may differ.

    Attributes:
        name: the module's path in the model, with ``*`` for numbers that vary.
        weights: stored format, such as "nvfp4 g16", "int4 g128", "fp8 channel", "bfloat16".
        activations: their precision in the product, such as "bfloat16", "int8 token", "nvfp4".
        kernel: the class or function that computed the product.
        asked: the activations of the checkpoint's scheme if others ran.
    """

    name: str
    weights: str
    activations: str
    kernel: str
    asked: str = ""
    count: int = 1


class EngineInfo(BaseModel):
    """An engine as installed in one Python, and its checks of one model before it loads."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # (distribution, version) that provides the engine; None: not installed.
    installed: tuple[str, str] | None = None
    # Packages, settings and named files that can change a score; part of its key.
    versions: dict[str, str] = {}
    cpu_only: bool = False  # torch of this Python is a build without GPU code
    problem: str = ""  # why the model cannot run there, in one line
    facts: ModelFacts | None = None  # of a model on a server; None if its files are on this machine
    stamp: str = ""  # of a model on a server
    # Why a server did not answer; the request is repeated when this model is scheduled.
    unreachable: str = ""
