"""llama.cpp through llama-cpp-python's ctypes: one GGUF model, one window at a time.

Each window begins with an empty KV cache.

Options that the spec's ``engine`` object does not set are llama.cpp's defaults, except:

- all layers are on the GPU if the build supports one;
- the context is as long as the longest window, and the logical batch as long as the physical one
  (512 tokens).  The logical batch is the number of rows of logits in memory; it changes no score;
- there are as many threads as torch uses (llama.cpp: 4);
- weights are not repacked (``use_extra_bufts`` false) if llama.cpp was built with AMX tile code,
  which GCC 12.2 of Debian 12 miscompiles: Q4_0 and Q4_1 then crash the process.  ``make`` builds
  llama.cpp without that code.

Some models exclude tokens by a logit of -inf or -3.4e38.  If a reference gives such a token any
probability, the KL divergence of that position is infinite, and no position of such a model would
have a finite one.  Logits below ``LOWEST_LOGIT``, the lowest float16, are therefore set to it: the
probability stays exactly 0 in float32, log-probabilities and entropies do not change, and the
divergence becomes p_ref * (65504 + ...).  A *target* below ``LOWEST_LOGIT`` is set to -inf: its
position is left out and counted.  A position without any logit above ``LOWEST_LOGIT`` is left out
and counted too.  NaN stays NaN.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationInfo, field_validator

from .base import Capabilities, Layer, PlannedModel, Window
from .checkpoint import gguf
from .checkpoint.checkpoint_config import ROPE
from .checkpoint.token_rules import MADE, digests, samples
from .common import machine
from .common.engine_options import EngineOptions
from .common.errors import InputError, ModelError
from .common.packages import installed_versions, package_folder
from .layers.groups import DYNAMIC, KVCache, group_layers, kv_formats
from .layers.schemes import UNKNOWN
from .logits_engine import LogitsEngine

if TYPE_CHECKING:
    import torch

BATCH_TOKENS = 512
"""Tokens of a batch: llama.cpp's own default for the physical batch."""
Positive = Annotated[int, Field(gt=0)]
CacheType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl"]
LOWEST_LOGIT = -65504.0
"""Logits below it are set to it: the lowest float16 (see the module)."""
NO_TILES = (
    "this llama.cpp was built with AMX tile code, which GCC 12 miscompiles: its weights were not "
    "repacked, which is slower and rounds differently; build it with "
    "CMAKE_ARGS=-DGGML_NATIVE=OFF, or set engine.use_extra_bufts to true"
)
NO_FOLDER = "a hub model is owner/repo/file.gguf, and no folder here has its owner's name"
BUFFER = re.compile(r"load_tensors: +(\S+) model buffer size = +([\d.]+) MiB")
CACHE = re.compile(
    r"size = +([\d.]+) MiB \( *\d+ cells, +(\d+) layers,.*?\), K \((\w+)\): .*?, V \((\w+)\)"
)
ROTATED = re.compile(r"attn_rot_([kv]) = 1")
FLASH = re.compile(
    r"(Flash Attention enabled|enabling flash_attn)|Flash Attention not supported|flash_attn is not"
)

DEBUG = 1
WARNING_LEVEL = 3
ERROR = 4
TILES = re.compile(r"\bAMX_\w+ = 1")
"""Pattern in ``llama_print_system_info`` of a build that multiplies in AMX tiles.

``_tile_loadconfig`` of GCC 12.2 to 13.2 declares 8 of the 64 bytes that it reads.  The compiler
therefore drops the stores of ggml's tile configuration, and products of Q4_0 and Q4_1 crash.
"""
ASSIGNED = re.compile(r"layer +(\d+) assigned to device (\w+)")
LIBRARY = re.compile(r"(?:lib)?ggml-([a-z]+)")
FLOAT_TYPES = ("f32", "f16", "bf16")


class LlamacppOptions(EngineOptions):
    """The parameters of llama.cpp that change what runs."""

    n_gpu_layers: Annotated[int, Field(ge=-1)] = -1
    split_mode: Literal["none", "layer", "row", "tensor"] = "layer"
    main_gpu: Annotated[int, Field(ge=0)] = 0
    tensor_split: (
        Annotated[list[Annotated[float, Field(ge=0)]], Field(min_length=1, max_length=16)] | None
    ) = None
    n_batch: Positive = BATCH_TOKENS
    n_ubatch: Positive = BATCH_TOKENS
    n_threads: Positive | None = None
    flash_attn: bool | None = None
    use_extra_bufts: bool | None = None
    type_k: CacheType = "f16"
    type_v: CacheType = "f16"

    @field_validator("type_v")
    @classmethod
    def _flash_attention_reads_quantized_values(cls, type_v: str, info: ValidationInfo) -> str:
        if info.data.get("flash_attn") is False and type_v not in FLOAT_TYPES:
            raise ValueError("quantized values need flash attention; leave flash_attn out")
        return type_v


class LlamacppEngine(LogitsEngine):
    """One GGUF model in llama.cpp."""

    capabilities = Capabilities(
        load_fns=("llamacpp",),
        fwd_fn="llamacpp",
        packages=("llama-cpp-python",),
        install=(
            "pip install llama-cpp-python gguf (before it, on an NVIDIA GPU: "
            "CMAKE_ARGS=-DGGML_CUDA=on, on a CPU with AMX: CMAKE_ARGS=-DGGML_NATIVE=OFF)"
        ),
        summary="GGUF files in llama.cpp, logits on GPU or CPU",
        suffixes=(".gguf",),
        torch=False,
    )
    files = gguf.GgufFiles
    options_type = LlamacppOptions

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.library: Any = None
        self.context: Any = None
        self.batch: Any = None
        self.log = Log()
        self.repacks = True
        self.system_info = ""
        self.threads = 0
        self.floored = 0
        self.excluded = 0

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        super().check(model)
        if not (cls.files(model).is_remote or Path(model.model_dir).exists()):
            raise InputError(f"model_dir: {model.model_dir}: no such path; {NO_FOLDER}")

    @classmethod
    def gpus(cls, model: PlannedModel) -> int | None:
        # These options count all GPUs of the machine.
        if {"main_gpu", "tensor_split"} & model.options.keys():
            return 0
        return None

    @classmethod
    def versions(cls) -> dict[str, str]:
        versions = installed_versions((*cls.capabilities.packages, "gguf", "torch", "triton"))
        variables = machine.variables(
            ("GGML_", "LLAMA_"), re.compile("DEBUG|LOG|CACHE|BACKTRACE|LLAMA_ARG")
        )
        return {**versions, "llama.cpp build": build(), **variables}

    @classmethod
    def tokens(cls, file: Path, texts: Sequence[str]) -> dict[str, Any] | None:
        if not cls.capabilities.installed():
            return None
        import llama_cpp

        Log.begin()
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.vocab_only = True
        first_file = gguf.read_model(file).files[0]
        model = llama_cpp.llama_model_load_from_file(str(first_file).encode(), parameters)
        # Loading the whole model reports why it failed.
        if not model:
            return None
        try:
            return made_tokens(llama_cpp, llama_cpp.llama_model_get_vocab(model), texts)
        finally:
            llama_cpp.llama_model_free(model)

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        super().import_engine(verbose=verbose)
        import llama_cpp  # noqa: F401

    def load(self) -> None:
        file = gguf.read_model(Path(self.planned.model_dir)).files[0]
        options = self.options
        import llama_cpp
        import torch

        self.library = llama_cpp
        self.log = Log.begin()
        llama_cpp.llama_backend_init()
        self.system_info = llama_cpp.llama_print_system_info().decode().strip(" |")
        if options.use_extra_bufts is None:
            self.repacks = not TILES.search(self.system_info)
        else:
            self.repacks = options.use_extra_bufts
        self.threads = options.n_threads or torch.get_num_threads()
        model = model_parameters(llama_cpp, options, repacks=self.repacks)
        self.model = llama_cpp.llama_model_load_from_file(str(file).encode(), model)
        has_encoder = bool(self.model) and llama_cpp.llama_model_has_encoder(self.model)
        if self.model and not has_encoder:
            context = context_parameters(
                llama_cpp, options, max_tokens=self.planned.max_tokens, threads=self.threads
            )
            self.context = llama_cpp.llama_init_from_model(self.model, context)
        if not self.context:
            reason = self.log.reason()
            if has_encoder and not self.log.errors:
                reason = "it has an encoder"
            raise ModelError(f"llama.cpp could not load {file}: {reason}")
        self.batch = llama_cpp.llama_batch_init(options.n_batch, 0, 1)
        # Every token is of sequence 0, and gets logits.
        for i in range(options.n_batch):
            self.batch.n_seq_id[i] = 1
            self.batch.seq_id[i][0] = 0
            self.batch.logits[i] = 1

    def prepare(self, windows: Sequence[Window]) -> None:
        self.floored = 0
        self.excluded = 0

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        library = self.library
        length = len(window.token_ids)
        # llama.cpp limits n_batch to n_ctx; one more token would abort the process.
        most = min(self.options.n_batch, library.llama_n_batch(self.context))
        library.llama_memory_clear(library.llama_get_memory(self.context), True)
        for begin in range(0, length, most):
            yield self._piece(window, begin, min(begin + most, length))

    def _piece(self, window: Window, first: int, last: int) -> torch.Tensor:
        """Return logits [last - first, V], computed at once.

        At positions that predict a scored token, no logit is below ``LOWEST_LOGIT``.
        """
        import torch

        library = self.library
        device = "cpu"
        if torch.cuda.is_available():
            device = "cuda"
        vocab_size = library.llama_vocab_n_tokens(library.llama_model_get_vocab(self.model))
        logits = torch.empty(last - first, vocab_size, device=device)
        rows = self._decode(window, first, last)
        logits.copy_(torch.from_numpy(np.ctypeslib.as_array(rows, tuple(logits.shape))))
        for scored in window.predicting(first, last):
            targets = window.token_ids[first + scored.start + 1 : first + scored.stop + 1]
            # In place: ``logits[scored]`` is a view.
            floored, excluded = raise_to_floor(
                logits[scored], torch.from_numpy(targets).long().to(device)
            )
            self.floored += floored
            self.excluded += excluded
        return logits

    def _decode(self, window: Window, begin: int, end: int) -> Any:
        """Return a pointer to the logits [end - begin, V] of positions ``begin`` to ``end``.

        Earlier positions are in the KV cache.
        """
        self.batch.n_tokens = end - begin
        for i in range(end - begin):
            self.batch.token[i] = int(window.token_ids[begin + i])
            self.batch.pos[i] = begin + i
        status = self.library.llama_decode(self.context, self.batch)
        rows = None
        if not status:
            rows = self.library.llama_get_logits(self.context)
        if not rows:
            raise ModelError(
                f"window {window.index}: llama.cpp returned no logits (status {status}): "
                f"{self.log.reason()}"
            )
        return rows

    def head(self) -> str:
        return "llama.cpp multiplies its head in ggml, which torch cannot do again bit for bit"

    def layers(self) -> tuple[Layer, ...]:
        model = gguf.read_model(Path(self.planned.model_dir))
        devices = self.log.devices
        # llama.cpp numbers the output after the last block.
        output_number = max(devices, default=0)
        roles = ("layer", model.head)
        layers = []
        for tensor in model.tensors:
            if model.role(tensor) not in roles or len(tensor.shape) < 2:
                continue
            number = output_number
            block = gguf.BLOCK_PREFIX.match(tensor.name)
            if block is not None:
                number = int(block[1])
            device = devices.get(number, UNKNOWN)
            kernel = f"ggml {device.rstrip('0123456789').lower()}"
            # ggml does not log activations.
            layers.append(Layer(tensor.name, tensor.type_name, UNKNOWN, kernel))
        return group_layers(layers)

    def provenance(self) -> dict[str, Any]:
        library = self.library
        n_ctx = library.llama_n_ctx(self.context)
        caches = tuple(kv_caches(self.log.text, n_ctx))
        return {
            "llama.cpp": library.llama_version().decode(),
            "system_info": self.system_info,
            "use_extra_bufts": self.repacks,
            "devices": dict(Counter(self.log.devices.values())),
            "buffers_mib": {name: float(size) for name, size in BUFFER.findall(self.log.text)},
            "n_ctx": n_ctx,
            "n_batch": library.llama_n_batch(self.context),
            "n_ubatch": library.llama_n_ubatch(self.context),
            "n_threads": self.threads,
            "flash_attn": self.flash_attention(),
            "type_k": self.options.type_k,
            "type_v": self.options.type_v,
            "kv_cache": kv_formats(caches),
            "kv_cache_layers": [asdict(group) for group in caches],
            "kv_cache_rotated": sorted(set(ROTATED.findall(self.log.text))),
            "batch": "one window at a time",
            ROPE: gguf.read_model(Path(self.planned.model_dir)).rope(n_ctx),
            MADE: self.made_tokens(),
            "logits_set_to_floor": {
                "floor": LOWEST_LOGIT,
                "entries": self.floored,
                "targets_left_out": self.excluded,
            },
            "notes": self.notes(),
            "warnings": self.log.warnings,
            "options": self.options.model_dump(exclude_none=True),
        }

    def flash_attention(self) -> bool | None:
        """Return llama.cpp's choice as logged; the option if the log has no such line."""
        choice: bool | None = self.options.flash_attn
        line = FLASH.search(self.log.text)
        if line is not None:
            choice = bool(line[1])
        return choice

    def notes(self) -> list[str]:
        """Return the notes of the model's row."""
        notes = []
        if self.floored > self.excluded:
            # Without the count: a row may contain windows of other sessions and replicas.
            notes.append(
                f"logits that llama.cpp excludes count as {LOWEST_LOGIT:.0f}: "
                "KL divergence is finite where it would be infinite"
            )
        if not self.repacks and self.options.use_extra_bufts is None:
            notes.append(NO_TILES)
        return notes

    def made_tokens(self) -> dict[str, Any]:
        """Return digests of the sample texts' tokens by the model's own tokenizer.

        ``adds_bos``: True if llama.cpp adds BOS before a text.
        """
        vocabulary = self.library.llama_model_get_vocab(self.model)
        tokens = made_tokens(self.library, vocabulary, samples())
        return {**tokens, "ids": digests(tokens["ids"])}

    def close(self) -> None:
        if self.batch is not None:
            self.library.llama_batch_free(self.batch)
        if self.context:
            self.library.llama_free(self.context)
        if self.model:
            self.library.llama_model_free(self.model)
        self.model = self.context = self.batch = None


def made_tokens(library: Any, vocabulary: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Return the ids of each text without BOS, and if llama.cpp adds BOS before a text.

    The keys are ``ids`` and ``adds_bos``: no ids and None if the file has no tokenizer.
    """
    # llama.cpp would abort the process.
    if library.llama_vocab_type(vocabulary) == library.LLAMA_VOCAB_TYPE_NONE:
        return {"ids": [], "adds_bos": None}
    ids: list[list[int]] = []
    for text in texts:
        data = text.encode()
        # No token is shorter than a byte, except for a space that is added before the text.
        size = len(data) + 8
        buffer = (library.llama_token * size)()
        count = library.llama_tokenize(vocabulary, data, len(data), buffer, size, False, False)
        ids.append(list(buffer[: max(count, 0)]))
    return {"ids": ids, "adds_bos": bool(library.llama_vocab_get_add_bos(vocabulary))}


def kv_caches(log: str, tokens: int) -> Iterator[KVCache]:
    """Yield the caches for ``tokens`` tokens, from the lines of llama.cpp's log.

    Every batch, also the first one, writes its keys and values to the cache and attends to the
    cache (``build_attn`` in llama-graph.cpp of llama-cpp-python 0.3.36).
    """
    for mib, layers, keys, values in CACHE.findall(log):
        stored = keys
        if keys != values:
            stored = f"{keys} (values {values})"
        scales = DYNAMIC
        if stored in FLOAT_TYPES:
            scales = ""
        yield KVCache(
            "blk.*",
            int(layers),
            stored,
            scales,
            attention="llama.cpp",
            prefill="",
            token_bytes=float(mib) * 1024**2 / tokens / int(layers),
        )


def model_parameters(library: Any, options: LlamacppOptions, *, repacks: bool) -> Any:
    """Return ``llama_model_params`` of the module ``llama_cpp``.

    ``repacks``: True if ggml may repack the weights.
    """
    parameters = library.llama_model_default_params()
    parameters.n_gpu_layers = options.n_gpu_layers
    parameters.main_gpu = options.main_gpu
    parameters.split_mode = getattr(library, f"LLAMA_SPLIT_MODE_{options.split_mode.upper()}")
    if options.tensor_split:
        # llama.cpp reads llama_max_devices() numbers, and a spec may have 16.
        size = max(library.llama_max_devices(), 16)
        parameters.tensor_split = (ctypes.c_float * size)(*options.tensor_split)
    parameters.use_extra_bufts = repacks
    return parameters


def context_parameters(
    library: Any, options: LlamacppOptions, *, max_tokens: int, threads: int
) -> Any:
    """Return ``llama_context_params`` for windows of at most ``max_tokens`` tokens.

    ``library``: the module ``llama_cpp``.
    """
    # ggml's own numbers, because llama-cpp-python 0.3.36 lacks bf16.
    types = {name: number for number, (name, *_) in gguf.TYPES.items()}
    parameters = library.llama_context_default_params()
    parameters.n_ctx = max_tokens
    parameters.n_batch = options.n_batch
    parameters.n_ubatch = options.n_ubatch
    parameters.n_threads = threads
    parameters.n_threads_batch = threads
    parameters.type_k = types[options.type_k]
    parameters.type_v = types[options.type_v]
    if options.flash_attn is not None:
        parameters.flash_attn_type = int(options.flash_attn)
    return parameters


def raise_to_floor(logits: torch.Tensor, targets: torch.Tensor) -> tuple[int, int]:
    """Set logits [T, V] below ``LOWEST_LOGIT`` to it, and targets int64 [T] below it to -inf.

    Return the number of logits below ``LOWEST_LOGIT``, and the number of targets among them.  If
    all logits of a position are below ``LOWEST_LOGIT``, all of them are set to -inf.
    """
    import torch

    if bool(logits.amin() >= LOWEST_LOGIT):
        return 0, 0
    low = logits < LOWEST_LOGIT
    columns = targets[:, None]
    excluded = low.gather(1, columns)
    logits.masked_fill_(low, LOWEST_LOGIT)
    logits.scatter_(1, columns, torch.where(excluded, -torch.inf, logits.gather(1, columns)))
    logits[low.all(-1)] = -torch.inf
    return int(low.sum()), int(excluded.sum())


class Log:
    """llama.cpp's log since a model's load began.

    All but debug lines are also written to the standard error.
    """

    def __init__(self) -> None:
        self.text = ""
        self.devices: dict[int, str] = {}
        self.warnings: list[str] = []
        self.errors: list[str] = []

    def hear(self, level: int, text: bytes, _: Any) -> None:
        """Add a line: llama.cpp's callback."""
        line = text.decode(errors="replace")
        # llama.cpp logs at level "debug" which device has a layer.
        assignment = ASSIGNED.search(line)
        if assignment is not None:
            self.devices[int(assignment[1])] = assignment[2]
        if level == DEBUG:
            return
        os.write(2, text)
        self.text += line
        # The message without the function's name.
        message = " ".join(line.partition(": ")[2].split())
        if not message:
            return
        if level == WARNING_LEVEL:
            self.warnings.append(message)
        elif level == ERROR:
            self.errors.append(message)

    def reason(self) -> str:
        """Return the errors in this log, in one line."""
        return "; ".join(dict.fromkeys(self.errors)) or "no reason given"

    @classmethod
    def begin(cls) -> Log:
        """Return a new log that llama.cpp fills from now on."""
        import llama_cpp

        log = cls()
        LISTENING["log"] = log
        if "callback" not in LISTENING:
            LISTENING["callback"] = llama_cpp.llama_log_callback(hear_present_log)
        llama_cpp.llama_log_set(LISTENING["callback"], ctypes.c_void_p())
        return log


LISTENING: dict[str, Any] = {}
"""The callback of this process and the log that it fills.

They are kept because llama.cpp may call the callback at any time.
"""


def hear_present_log(level: int, text: bytes, user_data: Any) -> None:
    """Pass a line of llama.cpp to the log that is filled at present."""
    LISTENING["log"].hear(level, text, user_data)


def libraries() -> dict[str, str]:
    """Return name -> size and time of the libraries that llama-cpp-python may load."""
    package = package_folder("llama_cpp")
    if package is None:
        return {}
    # pip's hashes do not change when another build is copied over the installed one.
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH", package / "lib"))
    versions = {}
    # Subfolders count too: ``make`` may put a library for CPUs with AVX-512 into
    # glibc-hwcaps/x86-64-v4.
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            stat = file.stat()
            versions[str(file.relative_to(folder))] = f"{stat.st_size} {stat.st_mtime_ns}"
    return versions


def build() -> str:
    """Return the identity of the installed build, such as "cpu cuda 1f0c...".

    Builds of one version may give different scores.
    """
    versions = libraries()
    backends = set()
    for name in versions:
        library = LIBRARY.match(name)
        if library is not None and library[1] != "base":
            backends.add(library[1])
    digest = hashlib.sha256(repr(sorted(versions.items())).encode()).hexdigest()
    return " ".join([*sorted(backends), digest[:12]])
