"""vLLM, unmodified, as it serves the checkpoint: its kernels, its activation quantization, its KV cache.

Every position is scored inside vLLM's workers, next to the lm_head (``backends/vllm/worker.py``), from the logits that
vLLM computes; the driver's side of it is ``backends/vllm/driver.py``.

Everything that the spec's ``engine`` object does not set is vLLM's default, but for these:

- ``max_model_len`` follows the windows (one more, for the token that vLLM insists on generating);
- ``load_format`` is ``safetensors``: no pickle;
- ``skip_tokenizer_init``: windows arrive as token ids;
- on CPU, ``kv_cache_memory_bytes`` for a few windows, where vLLM would claim 92 % of the RAM.

``"emulate": true`` is ours: NVFP4 activations by vLLM's emulation where the GPU has no kernel for them and vLLM would
leave them unquantized.  Weight-only layers run as their scheme says anywhere.  On CPU the emulation is all there is.

``"noise": "bf16"`` makes the model the noise floor (``backends/layers/noise.py``), eagerly: compiled graphs run no
hooks.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from backends.base import (
    Capabilities,
    LayerGroup,
    LoadRequest,
    ModelFacts,
    ScoringBackend,
    Storage,
    Task,
    TokenScores,
    Window,
)
from backends.checkpoint import files, nvfp4_scales, stored_bits
from backends.checkpoint.config import CheckpointConfig
from backends.checkpoint.folder import FolderModel
from backends.common.capture import captured, root_cause, warnings_in
from backends.common.errors import CompareQError, InputError, ModelError
from backends.common.messages import one_line
from backends.common.options import check_names
from backends.common.packages import installed_versions
from backends.layers import noise
from backends.vllm import install
from backends.vllm.driver import EngineRun
from backends.vllm.environment import one_more_than, set_environment

KERNEL_PACKAGES = ("torch", "triton", "compressed-tensors", "flashinfer-python")
OURS = ("model", "revision", "skip_tokenizer_init", "worker_extension_cls")
EXTENSION = "backends.vllm.plugin.ScoringExtension"
EMULATE = "emulate"
OWN_OPTIONS = {EMULATE, *noise.OPTIONS}
BATCHED_TOKENS = 8192
"""At least what vLLM takes for max_num_batched_tokens on a CPU, to size its KV cache."""


def kv_cache_bytes(config: dict[str, Any], tokens: int) -> int:
    """KV cache of ``tokens`` tokens at 16 bits a value, at least 256 MiB; 4 GiB if the config hides its shape."""
    shape = CheckpointConfig(config).kv_shape
    if shape is None:
        return 4 << 30
    return max(2 * shape.layers * shape.heads * shape.head_size * 2 * tokens, 256 << 20)


def engine_arguments(request: LoadRequest, config: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Arguments of ``LLM(...)`` but for the model: our defaults under the spec's options."""
    defaults: dict[str, Any] = {
        "max_model_len": request.max_tokens + 1,
        "load_format": "safetensors",
        "trust_remote_code": False,
    }
    arguments = {name: value for name, value in (defaults | dict(request.options)).items() if name not in OWN_OPTIONS}
    if noise.seed_of(request.options) is not None:
        arguments["enforce_eager"] = True
    if cpu:
        batched = arguments.get("max_num_batched_tokens", BATCHED_TOKENS)
        tokens = max(2 * batched, 4 * (request.max_tokens + 1))
        arguments.setdefault("kv_cache_memory_bytes", kv_cache_bytes(config, tokens))
    return arguments


def emulation_arguments(layers: Mapping[str, nvfp4_scales.Nvfp4Layer]) -> dict[str, Any]:
    """Arguments of ``LLM(...)`` on a GPU under which NVFP4 activations are emulated; none for weight-only layers."""
    rounded = [path for path, layer in layers.items() if layer.input_scale is not None]
    experts = {"moe_backend": "emulation"} if any(map(nvfp4_scales.is_expert, rounded)) else {}
    return {"linear_backend": "emulation", **experts} if rounded else {}


def check_checkpoint(request: LoadRequest, folder: Path) -> None:
    """InputError if vLLM would misread the scales of a local model, or has nothing to emulate in it."""
    stray = files.strays(folder)
    if stray and not (folder / "model.safetensors.index.json").is_file():
        raise InputError(f"model_dir: {stray[0]}: vLLM would load it as well; move it out of the folder")
    if request.options.get("quantization_config") and not request.options.get("quantization"):
        raise InputError("engine.quantization_config: vLLM ignores it without engine.quantization; give both")
    layers = nvfp4_scales.nvfp4_layers(folder)
    nvfp4_scales.check_scales(folder, layers)
    if not request.options.get(EMULATE):
        return
    if not layers:
        raise InputError(f"engine.{EMULATE}: nothing to emulate: no layer of {folder} is stored in NVFP4; leave it out")
    chosen = emulation_arguments(layers)
    check_names(chosen, install.arguments(), "the installed vLLM")
    for name in chosen:
        if name in request.options:
            raise InputError(f"engine.{name}: chosen by engine.{EMULATE}; give one of the two")


def quantized_on_load(options: Mapping[str, Any], *, quantized: bool) -> str:
    """Which option makes vLLM quantize while it loads a checkpoint, ``quantized`` already or not; empty if none."""
    overrides = options.get("hf_overrides")
    if options.get("quantization_config") or (isinstance(overrides, dict) and "quantization_config" in overrides):
        return "quantization_config"
    if options.get("load_format") == "bitsandbytes":
        return "load_format"
    return "quantization" if options.get("quantization") and not quantized else ""


class VllmScoreBackend(FolderModel, ScoringBackend):
    """See the module's docstring."""

    capabilities = Capabilities(
        load_fns=("vllm_score",),
        fwd_fn="vllm_score",
        packages=install.PACKAGES,
        install=install.INSTALL,
        summary="what an unmodified vLLM serves: compressed-tensors, NVFP4, FP8, AWQ, GPTQ, ...",
    )

    def __init__(self, request: LoadRequest) -> None:
        super().__init__(request)
        self.llm: Any = None
        self.run: EngineRun | None = None
        self.arguments: dict[str, Any] = {}
        self.log_start = 0
        self.environment = dict(os.environ)

    @classmethod
    def check(cls, request: LoadRequest) -> None:
        install.check_version()
        for name in OURS:
            if name in request.options:
                raise InputError(f"engine.{name}: set by compare_q; use model_dir and revision of the spec")
        mode = request.options.get("logprobs_mode", "raw_logprobs")
        if mode not in ("raw_logprobs", "processed_logprobs"):
            raise InputError(f"engine.logprobs_mode: {mode!r} would return logits in place of log-probabilities")
        check_names(request.options, install.arguments() | OWN_OPTIONS, "the installed vLLM")
        if noise.seed_of(request.options) is not None and not request.options.get("enforce_eager", True):
            raise InputError("engine.enforce_eager: engine.noise needs it true; leave it out")
        emulate = request.options.get(EMULATE, False)
        if not isinstance(emulate, bool):
            raise InputError(f"engine.{EMULATE}: must be true or false (got {emulate!r})")
        for name in ("max_model_len", "max_num_batched_tokens"):
            value = request.options.get(name, 1)
            if not isinstance(value, int) or value < 1:
                raise InputError(f"engine.{name}: must be a positive number of tokens (got {value!r})")
        longest = request.options.get("max_model_len")
        if longest is not None and longest <= request.max_tokens:
            raise InputError(
                f"engine.max_model_len: {longest} is too short for windows of {request.max_tokens} tokens + 1"
            )
        folder = Path(request.model_dir)
        if not folder.is_dir():
            return
        check_checkpoint(request, folder)
        if longest is None and CheckpointConfig.read(folder).rope_type == "longrope":
            raise InputError(
                "engine.max_model_len: missing; this model's longrope factors depend on it in vLLM, so set it to what "
                "you serve with"
            )

    @classmethod
    def facts(cls, request: LoadRequest) -> ModelFacts:
        found = super().facts(request)
        return replace(found, context=None) if "hf_overrides" in request.options else found

    @classmethod
    def versions(cls) -> dict[str, str]:
        return installed_versions((*install.PACKAGES, *KERNEL_PACKAGES)) | install.kernel_environment()

    def load(self) -> None:
        folder, config = self.folder, CheckpointConfig.read(self.folder)
        cpu = install.is_cpu_build()
        self.arguments = engine_arguments(self.request, config.raw, cpu=cpu)
        if self.request.options.get(EMULATE) and not cpu:
            self.arguments |= emulation_arguments(nvfp4_scales.nvfp4_layers(folder))
        set_environment(self.request)
        self.log_start = self._log_size()
        try:
            with captured(self.request.log_file), one_more_than(config.stated_context, self.request):
                from vllm import LLM

                self.llm = LLM(str(folder), skip_tokenizer_init=True, worker_extension_cls=EXTENSION, **self.arguments)
                self.run = self._run(self.llm.collective_rpc("compare_q_install"))
        except Exception as error:  # config errors, refused checkpoints, dead workers: one model's failure
            raise ModelError(f"vLLM refused {folder}: {self._reason(error)}") from error

    def _run(self, runners: list[str]) -> EngineRun:
        config = self.llm.llm_engine.vllm_config
        return EngineRun(
            self.llm,
            lambda: captured(self.request.log_file),
            config.model_config.get_vocab_size(),
            config.parallel_config.tensor_parallel_size,
            runners[-1],
            noise.seed_of(self.request.options),
        )

    def score(self, windows: Iterable[Window], task: Task) -> Iterator[TokenScores]:
        """All windows are queued at once, so that the scheduler keeps the engine full; results as they finish."""
        assert self.run is not None
        try:
            yield from self.run.score(list(windows), task)
        except CompareQError:
            raise
        except Exception as error:  # a dead engine, or a prompt that vLLM does not take
            raise ModelError(f"vLLM stopped while scoring: {self._reason(error)}") from error

    def storage(self) -> Storage:
        quantized = bool(CheckpointConfig.read(self.folder).quantization)
        if how := quantized_on_load(self.request.options, quantized=quantized):
            return Storage(note=f"quantized while loading ({how}); the checkpoint does not say what that stores")
        return stored_bits.storage_of(self.folder)

    def layers(self) -> tuple[LayerGroup, ...]:
        return self.run.layers() if self.run else ()

    def provenance(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        return {
            "model_class": ", ".join(config.model_config.architectures),
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "quantization": config.model_config.quantization,
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "device": str(config.device_config.device_type),
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "enforce_eager": config.model_config.enforce_eager,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "batch": "all windows queued at once",
            "scorer": self.run.described() if self.run else {},
            "warnings": warnings_in(self._log()),
            "options": json.loads(json.dumps(self.arguments, default=repr)),
            **noise.provenance_of(noise.seed_of(self.request.options)),
        }

    def close(self) -> None:
        """Stop the engine's processes, and undo what vLLM has set in this process for the model that was loaded.

        It leaves variables such as VLLM_SSM_CONV_STATE_LAYOUT behind, which would reach the next model and its key.
        """
        try:
            if self.llm is not None:
                with captured(self.request.log_file):
                    self.llm.llm_engine.engine_core.shutdown()
                    self.llm = self.run = None
                    gc.collect()
        finally:
            os.environ.clear()
            os.environ.update(self.environment)

    def _log_size(self) -> int:
        file = self.request.log_file
        return file.stat().st_size if file is not None and file.exists() else 0

    def _log(self) -> str:
        """What vLLM has written since this model's load began; empty if it writes to the terminal."""
        if not self._log_size() or self.request.log_file is None:
            return ""
        with self.request.log_file.open("rb") as log:
            log.seek(self.log_start)
            return log.read().decode(errors="replace")

    def _reason(self, error: BaseException) -> str:
        """One line: what the worker's log says went wrong, else the exception's own most telling line."""
        if cause := root_cause(self._log()):
            return f"{cause} (log: {self.request.log_file})"
        telling = [line for line in str(error).splitlines() if line.strip().startswith("Value error, ")]
        return telling[0].strip().removeprefix("Value error, ") if telling else one_line(error)
