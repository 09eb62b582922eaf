"""vLLM, unmodified: the kernels, activation quantization and KV cache that serve the checkpoint.

Every position is scored inside vLLM's workers, next to the lm_head (``extension.py``), from the
logits that vLLM computes; the part in this process is ``driver.py``.

Options that the spec's ``engine`` object does not set have vLLM's defaults, except:

- ``max_model_len`` follows the windows (one token more, since vLLM must generate one);
- ``load_format`` is ``safetensors``, so that no pickle is loaded;
- ``skip_tokenizer_init``: windows arrive as token ids;
- ``kv_cache_memory_bytes`` has room for the windows of two steps, unless the spec sets the size or
  the model has another kind of cache; vLLM would claim 90 % of the memory;
- ``enforce_eager``: prefill gains nothing from compiled graphs, which take most of a start;
- ``swa_bounded_replay`` is off, where it exists: it leaves out states that are scored;
- ``enable_chunked_prefill`` is off in prefill with caches of ``options.LOSES_CHUNKS``.

One option belongs to compare_q: ``"noise": "bf16"`` makes the model the noise floor
(``backends/layers/noise.py``), which needs an eager model, as graphs run no hooks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import re
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..base import (
    Capabilities,
    Engine,
    Layer,
    ModelFacts,
    PlannedModel,
    ScoreRequest,
    Storage,
    TokenScores,
    Window,
)
from ..checkpoint.checkpoint_config import ROPE, CheckpointConfig, rope
from ..checkpoint.folder import HuggingFaceFolder
from ..common import machine
from ..common.errors import InputError, ModelError
from ..common.message_text import and_more, dtype_name, one_line, with_class
from ..common.packages import computing
from ..common.process import fork_blockers, in_worker, is_generic, root_cause, warnings_in
from ..hub import local_folder
from ..layers import groups, noise
from . import compat, loaded_layers
from .driver import VllmDriver, has_own_process
from .fused_blocks import WRONG_ROWS, misplaced_scales
from .llm_arguments import (
    OWN_OPTIONS,
    check_checkpoint,
    check_options,
    engine_arguments,
    missing_kernel,
    quantized_on_load,
    ranks,
)

EXTENSION = "compare_q.backends.vllm.extension.ScoringExtension"
"""Class whose methods vLLM adds to its workers."""
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Groups of entry points whose code vLLM runs before it loads a model."""
HARMLESS = re.compile(
    "VLLM_(LOGGING|CONFIGURE_LOGGING|LOG_|NO_USAGE|DO_NOT_TRACK|USAGE|CACHE_ROOT|CONFIG_ROOT|WORKER_MULTIPROC_METHOD|"
    "ALLOW_LONG_MAX_MODEL_LEN|ENABLE_V1_MULTIPROCESSING|HOST_IP|PORT|API_KEY)"
)
"""Beginnings of names of variables that change no score."""
DECODE_UNCHECKED = "decode was not compared with prefill: this vLLM feeds every window in steps"
RESERVED, METHOD = "VLLM_CPU_NUM_OF_RESERVED_CPU", "VLLM_WORKER_MULTIPROC_METHOD"
IMPORTED_ON_LOAD = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu_model_runner",
    "vllm.model_executor.model_loader",
    "vllm.v1.core.sched.scheduler",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors",
    "vllm.model_executor.layers.quantization.modelopt",
    "vllm.plugins.lora_resolvers.hf_hub_resolver",
    "vllm.plugins.lora_resolvers.filesystem_resolver",
    "vllm.distributed.elastic_ep.elastic_execute",
)
"""Modules that ``LLM(...)`` imports with 700 others; imported ahead, a toy loads in 2.2 s instead
of 5.1 s."""


class VllmFolder(HuggingFaceFolder):
    """A folder whose context and stored size may depend on vLLM's options."""

    @property
    def other_config(self) -> str:
        return (
            "engine.hf_overrides changes the config"
            if "hf_overrides" in self.planned.options
            else ""
        )

    def facts(self) -> ModelFacts:
        found = super().facts()
        return replace(found, context=None) if self.other_config else found

    def storage(self) -> Storage:
        if how := quantized_on_load(self.planned.options, quantized=bool(self.config.quantization)):
            return Storage(
                note=f"quantized while loading ({how}); the checkpoint does not state the resulting size"
            )
        return super().storage()


class VllmEngine(Engine):
    """One model in vLLM; see the module."""

    capabilities = Capabilities(
        load_fns=("vllm_score",),
        fwd_fn="vllm_score",
        packages=compat.PACKAGES,
        install=compat.INSTALL,
        summary="what an unmodified vLLM serves: compressed-tensors, NVFP4, FP8, AWQ, GPTQ, ...",
        batches=True,
        decodes=512,
        refuses=True,
        noise=True,
        eager={"enforce_eager": True},
        arithmetic={"kv_cache_dtype": "auto", "quantization": ""}
        | dict.fromkeys(("dtype", "attention_backend", "linear_backend", "moe_backend")),
    )
    files = VllmFolder
    driver: VllmDriver

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.llm: Any = None
        self.arguments: dict[str, Any] = {}
        self.log_start = 0
        self.phase_start = 0

    @classmethod
    def option_names(cls) -> Collection[str] | None:
        try:
            return compat.arguments() | OWN_OPTIONS
        except InputError:  # vLLM is not installed in this Python
            return None

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        compat.check_version()
        check_options(model)
        folder = Path(model.model_dir)
        if folder.is_dir():
            check_checkpoint(model, folder)

    @classmethod
    def refusal(cls, model: PlannedModel) -> str:
        """Ask vLLM for its config of the model and the quantization; no weights are loaded."""
        config = CheckpointConfig.read(Path(model.model_dir))
        set_environment(verbose=False)
        allow_whole_context(model, config)
        from vllm import EngineArgs

        try:
            arguments = engine_arguments(model, config.raw, cpu=compat.is_cpu_build())
            EngineArgs(
                model.model_dir, skip_tokenizer_init=True, **arguments
            ).create_engine_config()
        except Exception as error:
            return f"vLLM refuses {model.model_dir}: {reason_of(error)}"
        return ""

    @classmethod
    def misreads(cls, model: PlannedModel) -> str:
        files, ranks = VllmFolder(model), model.options.get("tensor_parallel_size")
        if (
            files.is_remote
            or files.other_config
            or model.options.get("model_impl") == "transformers"
        ):
            return ""
        ranks = ranks if type(ranks) is int and ranks > 0 else 1
        found = list(misplaced_scales(files.headers, ranks))
        return f"{files.folder}: {found[0]}{and_more(found)}; {WRONG_ROWS}" if found else ""

    @classmethod
    def missing_kernel(cls, quantization: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        return missing_kernel(quantization, options)

    @classmethod
    def gpus(cls, model: PlannedModel) -> int:
        return 0 if cls.spread_by(model) else ranks(model.options)

    @classmethod
    def spread_by(cls, model: PlannedModel) -> str:
        return (
            "distributed_executor_backend"
            if model.options.get("distributed_executor_backend") == "ray"
            else ""
        )

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Packages, and the VLLM_* variables that may choose kernels or precision
        (VLLM_CPU_INT4_W4A8, ...).
        """
        threads = {RESERVED: "0"} if compat.is_cpu_build() else {}
        variables = machine.variables(("VLLM_",), HARMLESS)
        return computing(*compat.PACKAGES, plugins=PLUGIN_GROUPS) | threads | variables

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        set_environment(verbose=verbose)
        worker = f"vllm.v1.worker.{'cpu' if compat.is_cpu_build() else 'gpu'}_worker"
        for module in ("vllm", *IMPORTED_ON_LOAD, worker, EXTENSION.rpartition(".")[0]):
            with suppress(
                ImportError
            ):  # not in this version of vLLM; loading reports what is wrong with it
                importlib.import_module(module)

    def load(self) -> None:
        folder, decode, cpu = (
            local_folder(self.planned.model_dir),
            self.planned.decode,
            compat.is_cpu_build(),
        )
        config = CheckpointConfig.read(folder)
        self.arguments = engine_arguments(self.planned, config.raw, cpu=cpu)
        set_environment(verbose=self.planned.log_file is None)
        register_architectures(config.raw, self.planned.options)
        set_ranks(ranks(self.planned.options))
        self.log_start = self.phase_start = self._log_bytes()
        try:
            allow_whole_context(self.planned, config)
            from vllm import LLM

            self.llm = LLM(
                str(folder),
                skip_tokenizer_init=True,
                worker_extension_cls=EXTENSION,
                **self.arguments,
            )
            runner = self.llm.collective_rpc("compare_q_install", args=(decode is not None,))[-1]
        except (
            Exception
        ) as error:  # for example a config error, a refused checkpoint, a dead worker
            raise ModelError(f"vLLM refused {folder}: {self.reason_of(error)}") from error
        step, seed = None if decode is None else decode.step, noise.seed_of(self.planned.options)
        self.driver = VllmDriver(
            self.llm, runner, seed, on_cpu=cpu, step=step, compares=self.planned.check_decode
        )

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Return the scores in the order in which windows finish; all are queued at once, so that
        batches are full.
        """
        self.phase_start = self._log_bytes()
        self.driver.route = route = self.driver.probe(windows)
        return self.driver.score(windows, self.driver.plan(request, route), self.driver.noise_seed)

    def reason_of(self, error: Exception) -> str:
        """Return the most informative line of an exception.

        If it only refers to an error in another process, that is searched in what vLLM has logged
        since the beginning of loading or scoring.
        """
        cause = root_cause(self._log(self.phase_start)) if is_generic(error) else None
        if cause is not None:
            return f"{cause} (log: {self.planned.log_file})"
        return reason_of(error)

    def layers(self) -> tuple[Layer, ...]:
        return self.driver.what_ran()[0]

    def provenance(self) -> dict[str, Any]:
        config = self.llm.llm_engine.vllm_config
        decode, caches = self.planned.decode, self.driver.what_ran()[1]
        caches = loaded_layers.named(caches, self.arguments.get("kv_cache_dtype"))
        if decode is not None:  # earlier tokens are always read from the cache
            caches = tuple(replace(cache, prefill="") for cache in caches)
        attention, dtype = (
            list(dict.fromkeys(c.backend for c in caches)),
            dtype_name(config.model_config.dtype),
        )
        asked = str(self.arguments.get("attention_backend") or "auto").upper()
        # vLLM for CPUs ignores names of other backends.  A name may have a suffix:
        # TRITON_ATTN_DIFFKV.
        others = [
            name for name in attention if name and asked != "AUTO" and not name.startswith(asked)
        ]
        stored = CheckpointConfig.read(local_folder(self.planned.model_dir)).dtype
        cast = "dtype" not in self.arguments and stored not in (None, dtype)
        unchecked = (
            decode is not None and self.driver.compares and self.driver.decode_difference is None
        )
        floor = noise.provenance_of(noise.seed_of(self.planned.options))
        return {
            "model_class": ", ".join(config.model_config.architectures),
            ROPE: rope(
                CheckpointConfig(config.model_config.hf_config.to_dict()),
                config.model_config.max_model_len,
            ),
            "dtype": dtype,
            "attention": ", ".join(attention),
            "attention_backend": ""
            if others
            else self.arguments.get("attention_backend") or ", ".join(attention),
            "deviations": [
                f"the spec selects attention by {asked}, but {name} ran" for name in others
            ],
            "quantization": config.model_config.quantization,
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "kv_cache": groups.kv_formats(caches),
            "kv_cache_layers": [asdict(group) for group in caches],
            "device": str(config.device_config.device_type),
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "enforce_eager": config.model_config.enforce_eager,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "batch": "all windows queued at once"
            if decode is None
            else f"{decode.batch} windows at a time",
            "scorer": self.driver.provenance(),
            "warnings": warnings_in(self._log(self.log_start)),
            "options": json.loads(json.dumps(self.arguments, default=repr)),
            **floor,
            "notes": [
                *filter(None, [compat.untested()]),
                *([DECODE_UNCHECKED] if unchecked else []),
                *([f"stored in {stored}, and ran in {dtype}, as vLLM chose"] if cast else []),
                *groups.kv_notes(caches, str(config.cache_config.cache_dtype)),
                *floor.get("notes", ()),
            ],
        }

    def close(self) -> None:
        """Stop the engine and its processes.

        A worker without further processes is about to end, and skips vLLM's 1.5 s of garbage
        collection.
        """
        if self.llm is None:
            return
        core = self.llm.llm_engine.engine_core
        if not in_worker() or ranks(self.planned.options) > 1 or has_own_process(core):
            core.shutdown()
            self.llm = None
            vars(self).pop("driver", None)  # missing if loading failed
            gc.collect()

    def _log_bytes(self) -> int:
        """Return the size of the log; 0 if vLLM's output goes to the terminal."""
        log = self.planned.log_file
        return log.stat().st_size if log is not None and log.exists() else 0

    def _log(self, start: int) -> str:
        """Return vLLM's output from a position in the log on; empty if it goes to the terminal."""
        log = self.planned.log_file
        return (
            log.read_bytes()[start:].decode(errors="replace")
            if log is not None and log.exists()
            else ""
        )


def reason_of(error: BaseException) -> str:
    """Return one line: an exception's message, or the first one of a failed validation of vLLM's
    configs.
    """
    if isinstance(error, ValidationError):
        found = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = "".join(f"{step}: " for step in found["loc"])
        return place + " ".join(found["msg"].removeprefix("Value error, ").split())
    if isinstance(
        error, (LookupError, AttributeError, TypeError)
    ):  # their texts say little: 'model.norm.weight'
        return with_class(error)
    return one_line(error)


def allow_whole_context(model: PlannedModel, config: CheckpointConfig) -> None:
    """Let vLLM accept windows as long as the model's context, which need one token more; before
    vLLM is imported.

    The token that vLLM must generate is sampled from the window's last position and never fed back,
    so that no position beyond the context is computed.
    """
    if model.max_tokens == config.stated_context:
        os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")


def set_environment(*, verbose: bool) -> None:
    """Set options that vLLM reads only from the environment, before vLLM is imported; the user's
    variables stay.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "WARNING")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if compat.is_cpu_build():
        # vLLM keeps one core for its front end, which idles here: two windows of 2048 took 20 s on
        # 1 of 2 cores, 6.5 s
        # on both.
        os.environ.setdefault(RESERVED, "0")
        # vLLM's cache of compiled models does not distinguish instruction sets either
        # (``machine``).
        kept = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        os.environ.setdefault(
            "VLLM_CACHE_ROOT", str(Path(kept) / "vllm" / machine.instruction_sets())
        )


def set_ranks(count: int) -> None:
    """Set how vLLM starts ``count`` ranks: a single rank in this process, several as forks if
    nothing prevents forks.

    A fork reuses the imports of this process; a fresh process takes 10 to 20 s to import vLLM.
    vLLM itself notices only the use of CUDA through torch.  The user's variables stay.
    """
    if in_worker() and count == 1:
        # The engine core in this process: a table of two small models took 24 s on two cores, 63 s
        # with one more.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    elif (
        METHOD not in os.environ and not compat.is_cpu_build()
    ):  # on CPUs vLLM itself requires fresh processes
        blockers = fork_blockers()
        os.environ[METHOD] = "spawn" if blockers else "fork"
        if blockers:
            print(
                f"vLLM's processes are not forked: {'; '.join(blockers)}",
                file=sys.stderr,
                flush=True,
            )
    if compat.is_cpu_build() and count > 1:  # by default vLLM expects one NUMA node per rank
        cores = sorted(os.sched_getaffinity(0))
        size = max(len(cores) // count, 1)
        parts = [cores[rank * size : (rank + 1) * size] or cores[-1:] for rank in range(count)]
        os.environ.setdefault(
            "VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, part)) for part in parts)
        )


def register_architectures(config: dict[str, Any], options: dict[str, Any]) -> None:
    """Register the classes of a model's architectures with vLLM, which otherwise starts a Python to
    inspect each.

    That takes 14 to 20 s per architecture that is not in the cache below VLLM_CACHE_ROOT.  Only
    architectures that the registry would import later are registered; without these names in vLLM,
    nothing changes.
    """
    overrides = options.get("hf_overrides")
    named = {**config, **(overrides if isinstance(overrides, dict) else {})}.get(
        "architectures"
    ) or ()
    with suppress(Exception):  # vLLM reports import errors more clearly
        from vllm import ModelRegistry

        for name in named:
            held = ModelRegistry.models.get(name)
            if type(held).__name__ == "_LazyRegisteredModel":
                ModelRegistry.register_model(name, held.load_model_cls())
