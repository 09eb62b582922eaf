"""vLLM, unmodified, as it serves the checkpoint: its kernels, its activation quantization, its KV cache.

Perplexity comes from vLLM's own ``prompt_logprobs=0``: the exact log-probability of each real prompt token,
``log_softmax`` in float32 over the model's real vocabulary (vLLM cuts the padding of a sharded head), with nothing
added.  Entry i belongs to token i; entry 0 is empty.

Everything that the spec's ``engine`` object does not set is vLLM's default, but for these:

- ``max_model_len`` follows the windows (one more, for the token that vLLM insists on generating);
- ``max_num_batched_tokens`` bounds the log-probabilities' memory: without Triton vLLM holds about 10 bytes for each
  vocabulary entry of each scheduled row, which its memory profiling never sees;
- ``load_format`` is ``safetensors``: no pickle;
- ``skip_tokenizer_init``: windows arrive as token ids;
- on CPU, ``kv_cache_memory_bytes`` for a few windows, where vLLM would claim 92 % of the RAM.
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from backends import checkpoint, hub, vllm_install
from backends.base import (
    Capabilities,
    CompareQError,
    InputError,
    LoadRequest,
    ModelError,
    ScoringBackend,
    Storage,
    TokenScores,
    Window,
    installed_versions,
)
from backends.capture import captured, root_cause, warnings_in
from backends.messages import one_line
from backends.options import check_names

LOGPROB_BYTES = 2 << 30
"""Memory that a batch's log-probabilities may take."""
BYTES_A_LOGIT = 10
KERNEL_PACKAGES = ("torch", "triton", "compressed-tensors", "flashinfer-python")
OURS = ("model", "revision", "skip_tokenizer_init")


def batched_tokens(vocab_size: int) -> int:
    """Default ``max_num_batched_tokens``: LOGPROB_BYTES worth of rows, a multiple of 256 from 256 to 8192."""
    rows = LOGPROB_BYTES // (BYTES_A_LOGIT * vocab_size)
    return min(max(rows // 256, 1) * 256, 8192)


def kv_cache_bytes(config: dict[str, Any], tokens: int) -> int:
    """KV cache of ``tokens`` tokens at 16 bits a value, at least 256 MiB; 4 GiB if the config hides its shape."""
    text = checkpoint.text_config(config)
    layers, hidden, heads = (text.get(name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if not (layers and hidden and heads):
        return 4 << 30
    kv_heads, head_dim = text.get("num_key_value_heads") or heads, text.get("head_dim") or hidden // heads
    return max(int(2 * layers * kv_heads * head_dim * 2 * tokens), 256 << 20)


def engine_arguments(request: LoadRequest, config: dict[str, Any], *, cpu: bool) -> dict[str, Any]:
    """Arguments of ``LLM(...)`` but for the model: our defaults under the spec's options."""
    defaults: dict[str, Any] = {
        "max_model_len": request.max_tokens + 1,
        "max_num_batched_tokens": batched_tokens(checkpoint.vocab_size(config) or 262144),
        "load_format": "safetensors",
        "trust_remote_code": False,
    }
    arguments = {**defaults, **request.options}
    if cpu:
        tokens = max(2 * arguments["max_num_batched_tokens"], 4 * (request.max_tokens + 1))
        arguments.setdefault("kv_cache_memory_bytes", kv_cache_bytes(config, tokens))
    return arguments


class VllmScoreBackend(ScoringBackend):
    """See the module's docstring."""

    capabilities = Capabilities(
        load_fns=("vllm_score",),
        fwd_fn="vllm_score",
        packages=vllm_install.PACKAGES,
        install=vllm_install.INSTALL,
        summary="what an unmodified vLLM serves: compressed-tensors, NVFP4, FP8, AWQ, GPTQ, ...",
    )

    def __init__(self, request: LoadRequest) -> None:
        super().__init__(request)
        self.llm: Any = None
        self.arguments: dict[str, Any] = {}
        self.log_start = 0
        self.environment = dict(os.environ)

    @classmethod
    def check(cls, request: LoadRequest) -> None:
        vllm_install.check_version()
        for name in OURS:
            if name in request.options:
                raise InputError(f"engine.{name}: set by compare_q; use model_dir and revision of the spec")
        mode = request.options.get("logprobs_mode", "raw_logprobs")
        if mode not in ("raw_logprobs", "processed_logprobs"):
            raise InputError(f"engine.logprobs_mode: {mode!r} would return logits in place of log-probabilities")
        check_names(request.options, vllm_install.arguments(), "the installed vLLM")
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
        if longest is None and folder.is_dir() and checkpoint.rope_type(checkpoint.config_of(folder)) == "longrope":
            raise InputError(
                "engine.max_model_len: missing; this model's longrope factors depend on it in vLLM, so set it to what "
                "you serve with"
            )

    @classmethod
    def versions(cls) -> dict[str, str]:
        return installed_versions((*vllm_install.PACKAGES, *KERNEL_PACKAGES)) | vllm_install.kernel_environment()

    def load(self) -> None:
        folder = hub.resolve(self.request.model_dir, self.request.revision)
        config = checkpoint.config_of(folder)
        self.arguments = engine_arguments(self.request, config, cpu=vllm_install.is_cpu_build())
        set_environment(self.request)
        self.log_start = self._log_size()
        try:
            with captured(self.request.log_file), one_more_than(checkpoint.stated_context(config), self.request):
                from vllm import LLM

                self.llm = LLM(str(folder), skip_tokenizer_init=True, **self.arguments)
        except Exception as error:  # config errors, refused checkpoints, dead workers: one model's failure
            raise ModelError(f"vLLM refused {folder}: {self._reason(error)}") from error

    def score(self, windows: Iterable[Window]) -> Iterator[TokenScores]:
        """All windows are queued at once, so that the scheduler keeps the engine full; results as they finish."""
        from vllm import SamplingParams

        params = SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False, flat_logprobs=True)
        engine, pending = self.llm.llm_engine, {}
        try:
            with captured(self.request.log_file):
                for window in windows:
                    pending[str(window.row)] = window
                    engine.add_request(str(window.row), {"prompt_token_ids": window.token_ids.tolist()}, params)
            while pending and engine.has_unfinished_requests():
                with captured(self.request.log_file):
                    outputs = engine.step()
                for output in outputs:
                    if output.finished:
                        yield token_scores(pending.pop(output.request_id), output.prompt_logprobs)
        except CompareQError:
            raise
        except Exception as error:  # a dead engine, or a prompt that vLLM does not take
            raise ModelError(f"vLLM stopped while scoring: {self._reason(error)}") from error
        if pending:
            raise ModelError(
                f"vLLM returned no result for {len(pending)} windows, the first is row {min(pending, key=int)}"
            )

    def storage(self) -> Storage:
        folder = hub.resolve(self.request.model_dir, self.request.revision)
        on_load = self.request.options.get("quantization")
        if on_load and "quantization_config" not in checkpoint.config_of(folder):
            return Storage(note=f"quantized to {on_load} while loading; the checkpoint does not say what that stores")
        return checkpoint.storage_of(folder)

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
            "warnings": warnings_in(self._log()),
            "options": json.loads(json.dumps(self.arguments, default=repr)),
        }

    def close(self) -> None:
        """Stop the engine's processes, and undo what vLLM has set in this process for the model that was loaded.

        It leaves variables such as VLLM_SSM_CONV_STATE_LAYOUT behind, which would reach the next model and its key.
        """
        try:
            if self.llm is not None:
                with captured(self.request.log_file):
                    self.llm.llm_engine.engine_core.shutdown()
                    self.llm = None
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


def set_environment(request: LoadRequest) -> None:
    """What vLLM only takes from the environment; a variable that the user has set stays."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if request.log_file else "INFO")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    # A fork of this process fails with "CUDA error: initialization error" if anything here has touched CUDA, and vLLM
    # notices only what went through torch.
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    if vllm_install.is_cpu_build():
        # vLLM keeps one core back for its front end, which idles here: two windows of 2048 took 20 s on 1 of 2 cores,
        # 6.5 s on both.
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "0")


@contextmanager
def one_more_than(context: int | None, request: LoadRequest) -> Iterator[None]:
    """Let vLLM accept ``max_model_len`` = context + 1, where the windows are exactly as long as the context.

    The one token that vLLM must generate is sampled from the window's last position and never fed back, so no position
    beyond the context is computed.
    """
    name = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
    if request.max_tokens != context or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


def token_scores(window: Window, prompt_logprobs: Any) -> TokenScores:
    """Scores of one window from vLLM's flat prompt log-probabilities; ModelError if a single one is missing.

    ``prompt_logprobs`` has L positions; the first entry of position i > 0 must be that of the window's token i.
    """
    where = f"row {window.row}"
    if prompt_logprobs is None or len(prompt_logprobs) != len(window.token_ids):
        found = "none" if prompt_logprobs is None else str(len(prompt_logprobs))
        raise ModelError(f"{where}: vLLM returned log-probabilities for {found} of {len(window.token_ids)} positions")
    starts = np.asarray(prompt_logprobs.start_indices[1:], dtype=np.int64)
    empty = np.asarray(prompt_logprobs.end_indices[1:], dtype=np.int64) <= starts
    if empty.any():
        raise ModelError(f"{where}: vLLM returned no log-probability at position {int(empty.argmax()) + 1}")
    tokens = np.asarray(prompt_logprobs.token_ids, dtype=np.int64)[starts]
    wrong = tokens != window.token_ids[1:]
    if wrong.any():
        raise ModelError(f"{where}: vLLM scored another token at position {int(wrong.argmax()) + 1}")
    logprob = np.asarray(prompt_logprobs.logprobs, dtype=np.float32)[starts]
    return TokenScores(window.row, logprob[window.score_from - 1 :])
