"""vLLM, unmodified: the kernels, activation quantization and KV cache that serve the checkpoint.

Every position is scored inside vLLM's workers, next to the lm_head (``extension.py``), from the
logits that vLLM computes; the part in this process is ``driver.py``.  ``probe.py`` checks a loaded
model once, before its first window.

Options that the spec's ``engine`` object does not set have vLLM's defaults, except:

- ``max_model_len`` follows the windows (one token more, since vLLM must generate one);
- ``load_format`` is ``safetensors``, so that no pickle is loaded;
- ``skip_tokenizer_init``: windows arrive as token ids;
- ``kv_cache_memory_bytes`` has room for the windows of two steps, unless the spec sets the size or
  the model has another kind of cache; vLLM would claim 90 % of the memory;
- ``enforce_eager``: prefill gains nothing from compiled graphs, which take most of a start;
- ``swa_bounded_replay`` is off, where it exists: it leaves out states that are scored;
- ``enable_chunked_prefill`` is off in prefill with caches of ``llm_arguments.LOSES_CHUNKS``.

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
    ModuleDifference,
    PlannedModel,
    SampledToken,
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
from ..common.packages import torch_related_builds
from ..common.process import fork_blockers, in_worker, is_generic, root_cause, warnings_in
from ..hub import local_folder
from ..layers import groups, noise
from ..layers.groups import KVCache
from . import gpu_memory, installed_vllm, loaded_layers
from .decode import PrefillCheck
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
from .private_names import WORKER_NAMES, check_names
from .probe import Probe, ProbeResult, plan_of
from .sampling import sampled_tokens
from .scoring_plan import ScoringPlan
from .vllm_scores import n_checked_tokens, token_scores

EXTENSION = "compare_q.backends.vllm.extension.ScoringExtension"
"""Class whose methods vLLM adds to its workers."""
PLUGIN_GROUPS = ("vllm.general_plugins", "vllm.platform_plugins")
"""Groups of entry points whose code vLLM runs before it loads a model."""
HARMLESS_VLLM_VARIABLES = re.compile(
    "VLLM_(LOGGING|CONFIGURE_LOGGING|LOG_|NO_USAGE|DO_NOT_TRACK|USAGE|CACHE_ROOT|CONFIG_ROOT|"
    "WORKER_MULTIPROC_METHOD|ALLOW_LONG_MAX_MODEL_LEN|ENABLE_V1_MULTIPROCESSING|HOST_IP|PORT|"
    "API_KEY)"
)
"""Beginnings of names of variables that change no score."""
DECODE_UNCHECKED = "decode was not compared with prefill: this vLLM feeds every window in steps"
RESERVED = "VLLM_CPU_NUM_OF_RESERVED_CPU"
START_METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
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
"""Modules that ``LLM(...)`` imports with 700 others.

Imported ahead, a toy loads in 2.2 s instead of 5.1 s.
"""
IMPORTED_ON_LOAD_ON_GPUS = (
    "vllm.v1.attention.backends.flash_attn",
    "vllm.v1.attention.backends.flex_attention",
    "vllm.v1.attention.backends.turboquant_attn",
    "vllm.model_executor.warmup.minimax_m3_msa_warmup",
    "triton.experimental.gluon",
)
"""Modules that loading any model on a GPU imports as well: 0.35 s on an H200's host (vLLM 0.26)."""
SCORER_FACTS = ("chunk_rows", "recomputed_positions", "reference_head", "logits_dtype", "steps")
"""Entries of the ranks' report that are in the results."""


class VllmFolder(HuggingFaceFolder):
    """A folder whose context and stored size may depend on vLLM's options."""

    @property
    def other_config(self) -> str:
        if "hf_overrides" in self.planned.options:
            return "engine.hf_overrides changes the config"
        return ""

    def facts(self) -> ModelFacts:
        facts = super().facts()
        if self.other_config:
            return replace(facts, context=None)
        return facts

    def storage(self) -> Storage:
        is_quantized = bool(self.config.quantization)
        option = quantized_on_load(self.planned.options, quantized=is_quantized)
        if option:
            return Storage(
                note=f"quantized while loading ({option}); the checkpoint does not state the "
                "resulting size"
            )
        return super().storage()


class VllmEngine(Engine):
    """One model in vLLM; see the module."""

    capabilities = Capabilities(
        load_fns=("vllm_score",),
        fwd_fn="vllm_score",
        packages=installed_vllm.VLLM_PACKAGES,
        install=installed_vllm.INSTALL_VLLM,
        summary="what an unmodified vLLM serves: compressed-tensors, NVFP4, FP8, AWQ, GPTQ, ...",
        batches=True,
        decodes=512,
        refuses=True,
        noise=True,
        samples=True,
        outputs=True,
        eager={"enforce_eager": True},
        arithmetic={"kv_cache_dtype": "auto", "quantization": ""}
        | dict.fromkeys(("dtype", "attention_backend", "linear_backend", "moe_backend")),
    )
    files = VllmFolder
    # Set by ``load``.
    driver: VllmDriver
    probe: Probe
    prefill_check: PrefillCheck | None

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.llm: Any = None
        self.arguments: dict[str, Any] = {}
        # How the model is scored.  The probe is run once, with the first windows.
        self.route: ProbeResult | None = None
        self.log_start = self._log_bytes()
        self.phase_start = self.log_start

    @property
    def folder(self) -> Path:
        """The folder of the model."""
        return local_folder(self.planned.model_dir)

    @classmethod
    def option_names(cls) -> Collection[str] | None:
        try:
            return installed_vllm.arguments() | OWN_OPTIONS
        except InputError:  # vLLM is not installed in this Python
            return None

    @classmethod
    def check(cls, model: PlannedModel) -> None:
        installed_vllm.check_version()
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
        # A failing import is not a refusal.
        from vllm import EngineArgs  # noqa: F401

        try:
            check_names(WORKER_NAMES)
            arguments = engine_arguments(model, config.raw, cpu=installed_vllm.is_cpu_build())
            create_config(model.model_dir, arguments)
        except Exception as error:
            return f"vLLM refuses {model.model_dir}: {reason_of(error)}"
        return ""

    @classmethod
    def misreads(cls, model: PlannedModel) -> str:
        files = VllmFolder(model)
        # Not checked: a model that must still be fetched, and a config that the spec changes.
        if files.is_remote or files.other_config:
            return ""
        n_ranks = model.options.get("tensor_parallel_size")
        if type(n_ranks) is not int or n_ranks <= 0:
            n_ranks = 1
        clauses = list(misplaced_scales(files.headers, n_ranks))
        if not clauses:
            return ""
        return f"{files.folder}: {clauses[0]}{and_more(clauses)}; {WRONG_ROWS}"

    @classmethod
    def missing_kernel(cls, quantization: Mapping[str, Any], options: Mapping[str, Any]) -> str:
        return missing_kernel(quantization, options)

    @classmethod
    def gpus(cls, model: PlannedModel) -> int:
        if cls.spread_by(model):
            return 0
        return ranks(model.options)

    @classmethod
    def gpu_bytes(cls, model: PlannedModel) -> int | None:
        return gpu_memory.bytes_needed(model, VllmFolder(model))

    @classmethod
    def spread_by(cls, model: PlannedModel) -> str:
        if model.options.get("distributed_executor_backend") == "ray":
            return "distributed_executor_backend"
        return ""

    @classmethod
    def versions(cls) -> dict[str, str]:
        """Packages, and the VLLM_* variables that may choose kernels or precision.

        For example VLLM_CPU_INT4_W4A8.
        """
        defaults = {}
        if installed_vllm.is_cpu_build():
            defaults[RESERVED] = "0"  # as ``set_environment`` sets it, unless the user does
        packages = torch_related_builds(*installed_vllm.VLLM_PACKAGES, plugins=PLUGIN_GROUPS)
        return packages | defaults | machine.variables(("VLLM_",), HARMLESS_VLLM_VARIABLES)

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        set_environment(verbose=verbose)
        of_platform: tuple[str, ...] = ("vllm.v1.worker.gpu_worker", *IMPORTED_ON_LOAD_ON_GPUS)
        if installed_vllm.is_cpu_build():
            of_platform = ("vllm.v1.worker.cpu_worker",)
        for module in ("vllm", *IMPORTED_ON_LOAD, *of_platform, EXTENSION.rpartition(".")[0]):
            # Not in this version of vLLM; loading reports what is wrong with it.  The extension
            # uses private names when it is imported.
            with suppress(ImportError, AttributeError):
                importlib.import_module(module)
        prepare_forks()

    def prepare_load(self) -> None:
        """Let vLLM make its config of the model, so that the next time takes milliseconds.

        The first time, vLLM imports the classes of the model and its format.
        """
        self.set_arguments()
        with suppress(Exception):  # loading reports the same error more clearly
            create_config(str(self.folder), self.arguments)

    def set_arguments(self) -> None:
        """Set the arguments of ``LLM(...)``, and what vLLM reads from elsewhere."""
        config = CheckpointConfig.read(self.folder)
        is_cpu = installed_vllm.is_cpu_build()
        self.arguments = engine_arguments(self.planned, config.raw, cpu=is_cpu)
        set_environment(verbose=self.planned.log_file is None)
        allow_whole_context(self.planned, config)
        register_architectures(config.raw, self.planned.options)
        set_ranks(ranks(self.planned.options))

    def load(self) -> None:
        is_cpu = installed_vllm.is_cpu_build()
        decode = self.planned.decode
        self.set_arguments()
        try:
            check_names(WORKER_NAMES)
            from vllm import LLM

            self.llm = LLM(
                str(self.folder),
                skip_tokenizer_init=True,
                worker_extension_cls=EXTENSION,
                **self.arguments,
            )
            # All ranks return the same.
            runner = self.llm.collective_rpc("compare_q_install", args=(decode is not None,))[-1]
        except Exception as error:
            # For example a config error, a refused checkpoint, a dead worker.
            raise ModelError(f"vLLM refused {self.folder}: {self.reason_of(error)}") from error
        self.driver = VllmDriver(self.llm, runner, on_cpu=is_cpu)
        self.prefill_check = None
        if decode is not None:
            self.driver.step = decode.step
            if self.planned.check_decode:
                self.prefill_check = PrefillCheck(decode.step, on_cpu=is_cpu)
        tokens = n_checked_tokens(self.driver)
        self.probe = Probe(self.driver, tokens=tokens, decode=self.prefill_check)

    def warm_up(self, windows: Sequence[Window], request: ScoreRequest) -> None:
        plan = self.plan(windows, request)
        if request.reference is not None:
            self.driver.load_reference(windows, plan)

    def score(self, windows: Sequence[Window], request: ScoreRequest) -> Iterator[TokenScores]:
        """Return the scores in the order in which windows finish.

        All windows are queued at once, so that batches are full.
        """
        plan = self.plan(windows, request)
        return token_scores(self.driver, windows, plan, noise.seed_of(self.planned.options))

    def plan(self, windows: Sequence[Window], request: ScoreRequest) -> ScoringPlan:
        """Return how windows are scored; the first ones are probed."""
        # Before the probe, whose errors are in the log too.
        self.phase_start = self._log_bytes()
        if self.route is None:
            self.route = self.probe.result(windows)
        parallel = self.llm.llm_engine.vllm_config.parallel_config
        return plan_of(request, self.route, parallel.tensor_parallel_size)

    def sample(
        self, prompts: Sequence[Sequence[int]], n_tokens: int, seed: int
    ) -> Iterator[SampledToken]:
        self.phase_start = self._log_bytes()
        return sampled_tokens(self.driver, prompts, n_tokens, seed)

    def record_outputs(self, window: Window, file: Path) -> None:
        self.phase_start = self._log_bytes()
        seed = noise.seed_of(self.planned.options)
        self.driver.outputs(window, file, seed, compare=False)

    def compare_outputs(self, window: Window, file: Path) -> list[ModuleDifference]:
        self.phase_start = self._log_bytes()
        seed = noise.seed_of(self.planned.options)
        return self.driver.outputs(window, file, seed, compare=True)

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
        model_config = config.model_config
        decode = self.planned.decode
        caches = self.caches()
        dtype = dtype_name(model_config.dtype)
        attention = list(dict.fromkeys(cache.backend for cache in caches))
        requested_attention = self.arguments.get("attention_backend")
        others = other_backends(attention, str(requested_attention or "auto").upper())
        attention_backend = ""
        if not others:
            attention_backend = requested_attention or ", ".join(attention)
        batch = "all windows queued at once"
        if decode is not None:
            batch = f"{decode.batch} windows at a time"
        floor = noise.provenance_of(noise.seed_of(self.planned.options))
        notes = [
            *self.notes(dtype),
            *groups.kv_notes(caches, str(config.cache_config.cache_dtype)),
            *floor.get("notes", ()),
        ]
        hf_config = CheckpointConfig(model_config.hf_config.to_dict())
        return {
            "model_class": ", ".join(model_config.architectures),
            ROPE: rope(hf_config, model_config.max_model_len),
            "dtype": dtype,
            "attention": ", ".join(attention),
            "attention_backend": attention_backend,
            "deviations": [
                f"the spec selects attention by {str(requested_attention).upper()}, but {name} ran"
                for name in others
            ],
            "quantization": model_config.quantization,
            "kv_cache_dtype": config.cache_config.cache_dtype,
            "kv_cache": groups.kv_formats(caches),
            "kv_cache_layers": [asdict(cache) for cache in caches],
            "device": str(config.device_config.device_type),
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "enforce_eager": model_config.enforce_eager,
            "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
            "max_num_seqs": config.scheduler_config.max_num_seqs,
            "batch": batch,
            "scorer": self.scorer_provenance(),
            "warnings": warnings_in(self._log(self.log_start)),
            "options": json.loads(json.dumps(self.arguments, default=repr)),
            **floor,
            "notes": notes,
        }

    def caches(self) -> tuple[KVCache, ...]:
        """Return the KV caches that ran."""
        _, caches = self.driver.what_ran()
        cache_dtype = self.arguments.get("kv_cache_dtype")
        caches = loaded_layers.mark_chosen_formats(caches, cache_dtype)
        if self.planned.decode is None:
            return caches
        # Earlier tokens are always read from the cache.
        return tuple(replace(cache, prefill="") for cache in caches)

    def scorer_provenance(self) -> dict[str, Any]:
        """Return how the windows of the last run were scored."""
        decodes = self.planned.decode is not None
        facts: dict[str, Any] = {"model_runner": self.driver.runner}
        if self.route is not None:
            facts |= asdict(self.route)
        for name in SCORER_FACTS:
            if name in self.driver.report and (decodes or name != "steps"):
                facts[name] = self.driver.report[name]
        if decodes:
            facts["decode_difference"] = None
            if self.prefill_check is not None:
                facts["decode_difference"] = self.prefill_check.mean_difference
        return facts

    def notes(self, dtype: str) -> list[str]:
        """Return notes on the version, the check of decode, and the model's ``dtype``."""
        notes = []
        untested = installed_vllm.untested()
        if untested:
            notes.append(untested)
        if self.prefill_check is not None and self.prefill_check.mean_difference is None:
            notes.append(DECODE_UNCHECKED)
        stored = CheckpointConfig.read(self.folder).dtype
        if "dtype" not in self.arguments and stored not in (None, dtype):
            notes.append(f"stored in {stored}, and ran in {dtype}, as vLLM chose")
        return notes

    def close(self) -> None:
        """Stop the engine and its processes."""
        if self.llm is None:
            return
        core = self.llm.llm_engine.engine_core
        has_processes = ranks(self.planned.options) > 1 or has_own_process(core)
        if in_worker() and not has_processes:
            skip_shutdown(core)
            return
        core.shutdown()
        self.llm = None
        # Both hold the LLM; they are missing if loading failed.
        vars(self).pop("driver", None)
        vars(self).pop("probe", None)
        gc.collect()

    def _log_bytes(self) -> int:
        """Return the size of the log; 0 if vLLM's output goes to the terminal."""
        log = self.planned.log_file
        if log is None or not log.exists():
            return 0
        return log.stat().st_size

    def _log(self, start: int) -> str:
        """Return vLLM's output from a position in the log on; empty if it goes to the terminal."""
        log = self.planned.log_file
        if log is None or not log.exists():
            return ""
        return log.read_bytes()[start:].decode(errors="replace")


def skip_shutdown(core: Any) -> None:
    """Let a worker that is about to end do so without vLLM's shutdown.

    Until the worker has ended, the model's memory may stay in use.

    The shutdown of an engine in this process searches all objects of all modules for garbage,
    twice: 2.6 s on two cores.  Newer versions (0.32, not 0.26) also run it when the engine is
    deleted.
    """
    finalizer = getattr(core, "_finalizer", None)
    if finalizer is not None:
        finalizer.detach()


def create_config(folder: str, arguments: Mapping[str, Any]) -> None:
    """Let vLLM make its config of a model; its exception is the reason why it refuses the model."""
    from vllm import EngineArgs

    EngineArgs(folder, skip_tokenizer_init=True, **arguments).create_engine_config()


def other_backends(attention: Sequence[str], requested: str) -> list[str]:
    """Return the names of attention that ran although the spec selects another one.

    vLLM for CPUs ignores names of other backends.  A name may have a suffix: TRITON_ATTN_DIFFKV.
    """
    if requested == "AUTO":
        return []
    return [name for name in attention if name and not name.startswith(requested)]


def reason_of(error: BaseException) -> str:
    """Return the message of an exception in one line.

    Of a failed validation of vLLM's configs, return the first message.
    """
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = "".join(f"{step}: " for step in first["loc"])
        return place + " ".join(first["msg"].removeprefix("Value error, ").split())
    # Their texts say little: 'model.norm.weight'.
    if isinstance(error, (LookupError, AttributeError, TypeError)):
        return with_class(error)
    return one_line(error)


def allow_whole_context(model: PlannedModel, config: CheckpointConfig) -> None:
    """Let vLLM accept windows as long as the model's context, which need one token more.

    This is called before vLLM is imported.  The token that vLLM must generate is sampled from the
    window's last position and never fed back, so that no position beyond the context is computed.
    """
    if model.max_tokens == config.stated_context:
        os.environ.setdefault("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "1")


def prepare_forks() -> None:
    """Do now what vLLM would do once in each fork of this process, with the same result.

    Functions that this version of vLLM does not have are left out.
    """
    load_plugins()
    import_formats()
    # vLLM for CPUs compiles no kernels with Triton.
    if installed_vllm.is_cpu_build():
        replace_kernels()
        return
    # The hash of all of Triton's files, which names compiled kernels: 0.36 s.
    for module in ("triton.runtime.cache", "triton.compiler.compiler"):
        with suppress(ImportError, AttributeError):
            importlib.import_module(module).triton_key()
            return


def load_plugins() -> None:
    """Load vLLM's plugins, which register models and formats; errors are ignored."""
    try:
        from vllm import plugins
    except ImportError:
        return
    try:
        plugins.load_general_plugins()
    except Exception:
        # Loading a model then tries again, and reports the error.
        plugins.plugins_loaded = False


def import_formats() -> None:
    """Import the classes of all quantization formats: 0.3 s on an H200's host (vLLM 0.26).

    vLLM does so when it looks up the class of any format.
    """
    # Loading a model tries again, and reports the error.
    with suppress(Exception):
        from vllm.model_executor.layers import quantization

        quantization.get_quantization_config("fp8")


def replace_kernels() -> None:
    """Replace vLLM's Triton kernels for CPUs now; loading a model then skips this step.

    vLLM looks for each kernel among all variables of all modules: 0.7 s.  A module that is imported
    later finds the replaced kernels.
    """
    # If this fails, loading a model replaces them, and reports the error.
    with suppress(Exception):
        from vllm.platforms import current_platform

        current_platform.register_triton_kernel_overrides()
        current_platform.register_triton_kernel_overrides = do_nothing


def do_nothing(*_: Any) -> None:
    """Replace a function whose work was done before the fork."""


def set_environment(*, verbose: bool) -> None:
    """Set options that vLLM reads only from the environment, before vLLM is imported.

    The user's variables stay.
    """
    level = "WARNING"
    if verbose:
        level = "INFO"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", level)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if installed_vllm.is_cpu_build():
        # vLLM keeps one core for its front end, which idles here: two windows of 2048 took 20 s on
        # 1 of 2 cores, 6.5 s on both.
        os.environ.setdefault(RESERVED, "0")
        # vLLM's cache of compiled models does not distinguish instruction sets either
        # (``machine``).
        user_cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        cache_root = Path(user_cache) / "vllm" / machine.instruction_sets()
        os.environ.setdefault("VLLM_CACHE_ROOT", str(cache_root))
    else:
        # torch.compile would choose a folder for each compiled model: every model in decode would
        # compile vLLM's kernels again, in 9 s on an H200 (vLLM 0.26).  This is Triton's default.
        home = os.environ.get("TRITON_HOME") or Path.home()
        os.environ.setdefault("TRITON_CACHE_DIR", str(Path(home) / ".triton" / "cache"))


def set_ranks(count: int) -> None:
    """Set how vLLM starts ``count`` ranks; the user's variables stay.

    A single rank runs in this process, several as forks if nothing prevents forks.  A fork reuses
    the imports of this process; a fresh process takes 10 to 20 s to import vLLM.
    """
    is_cpu = installed_vllm.is_cpu_build()
    if in_worker() and count == 1:
        # The engine core in this process: a table of two small models took 24 s on two cores, 63 s
        # with one more.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    elif START_METHOD_VARIABLE not in os.environ and not is_cpu:
        # On CPUs vLLM itself requires fresh processes.  On GPUs it notices only the use of CUDA
        # through torch.
        blockers = fork_blockers()
        if blockers:
            os.environ[START_METHOD_VARIABLE] = "spawn"
            reasons = "; ".join(blockers)
            print(f"vLLM's processes are not forked: {reasons}", file=sys.stderr, flush=True)
        else:
            os.environ[START_METHOD_VARIABLE] = "fork"
    if is_cpu and count > 1:  # by default vLLM expects one NUMA node per rank
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", cores_of_ranks(count))


def cores_of_ranks(count: int) -> str:
    """Return this process's cores, divided among ``count`` ranks, as vLLM reads them: 0,1|2,3."""
    cores = sorted(os.sched_getaffinity(0))
    n_cores = max(len(cores) // count, 1)
    shares = []
    for rank in range(count):
        # If there are fewer cores than ranks, the last ranks share a core.
        share = cores[rank * n_cores : (rank + 1) * n_cores] or cores[-1:]
        shares.append(",".join(str(core) for core in share))
    return "|".join(shares)


def register_architectures(config: dict[str, Any], options: dict[str, Any]) -> None:
    """Register the classes of a model's architectures with vLLM, in this process.

    Otherwise vLLM starts a Python to inspect each, which takes 14 to 20 s per architecture that is
    not in the cache below VLLM_CACHE_ROOT.  Only architectures that the registry would import later
    are registered.  If a vLLM lacks the private names that are used here, nothing changes.
    """
    overrides = options.get("hf_overrides")
    complete = dict(config)
    if isinstance(overrides, dict):
        complete |= overrides
    architectures = complete.get("architectures") or ()
    with suppress(Exception):  # vLLM reports import errors more clearly
        from vllm import ModelRegistry

        for name in architectures:
            registered = ModelRegistry.models.get(name)
            if type(registered).__name__ == "_LazyRegisteredModel":
                ModelRegistry.register_model(name, registered.load_model_cls())
