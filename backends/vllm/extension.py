"""Methods that compare_q adds to vLLM's workers; the caller is ``backends/vllm/driver.py``.

``LLM(..., worker_extension_cls=...)`` mixes the class into every worker, which imports this file
before it builds a model; the driver calls the methods by ``collective_rpc``.  Their names begin
with ``compare_q``, because vLLM refuses names that the worker already has.  A scoring run consists
of ``begin``, requests with a tag, ``collect`` for finished requests, and ``end``.  An error inside
a step is kept for the next ``collect``: raised inside the step, it would kill the engine.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint_config import CheckpointConfig
from ..common import machine
from ..common.message_text import dtype_name
from ..layers import schemes
from ..layers.noise import Noise, vllm_decoder_layers
from . import loaded_layers as vllm_layers
from .hooks import Graphs, Steps, attach, before_forwards, check_decodes
from .logits import KeptLogits, LogitsSource
from .scorer import Scorer
from .scoring_plan import ScoringPlan


class ScoringExtension:
    """Methods of each worker of vLLM; see the module."""

    model_runner: Any
    vllm_config: Any
    model_config: Any
    device: Any
    get_kv_cache_spec: Any
    _compare_q_source: LogitsSource
    _compare_q_graphs: Graphs
    _compare_q_scorer: Scorer | None = None
    _compare_q_kept: KeptLogits | None = None
    _compare_q_noise: Noise | None = None

    def compare_q_install(self, decodes: bool = False) -> str:
        """Set the hooks; return the model runner's generation.  ``decodes``: note which graphs run.

        RuntimeError for an unknown vLLM, an unreadable cache, a model whose states do not predict
        the next token, or a model that vLLM would compute differently when it generates.
        """
        generation = attach(
            self.model_runner, lambda: self._compare_q_kept or self._compare_q_scorer
        )
        from vllm.config import set_current_vllm_config
        from vllm.v1.sample import sampler

        # The ranks of prompt_logprobs are not read; compiling their computation took 1.8 of the 5.5
        # s of a probe.
        sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)
        model = self.model_runner.get_model()
        if decodes:
            check_decodes(model)
            self._compare_q_graphs = Graphs(self.model_runner)
        vllm_layers.check_causal(model)
        with set_current_vllm_config(self.vllm_config):  # FlashAttention reads its version from it
            told, dtype = (
                self.vllm_config.cache_config.cache_dtype,
                self.vllm_config.model_config.dtype,
            )
            vllm_layers.check_caches(model, told, dtype_name(dtype))
        self._compare_q_source = LogitsSource(model)
        return generation

    def compare_q_layers(self) -> str:
        """Return how this rank's layers run, as JSON: the fields of each ``Layer`` and ``KVCache``."""
        config, model = self.vllm_config, self.model_runner.get_model()
        stated = CheckpointConfig(
            config.model_config.hf_config.to_dict()
        ).quantization  # with the spec's hf_overrides
        checkpoint = CheckpointConfig.read(Path(config.model_config.model)).quantization | stated
        dtype = dtype_name(config.model_config.dtype)
        found = vllm_layers.layers(model, config.quant_config, checkpoint, dtype)
        sizes = vllm_layers.kv_sizes(self.get_kv_cache_spec(), config)
        caches = vllm_layers.kv_caches(model, schemes.kv_cache(checkpoint), dtype, sizes)
        return json.dumps([[asdict(layer) for layer in found], [asdict(cache) for cache in caches]])

    def compare_q_begin(self, plan: dict[str, Any], noise_seed: int | None = None) -> None:
        """Start a scoring run by the fields of ``ScoringPlan``; with a seed, its layers on this
        rank get noise.
        """
        from vllm.distributed import get_pp_group, get_tp_group

        self._compare_q_quiet()  # after an interrupted run
        if noise_seed is not None:
            layers = vllm_decoder_layers(
                self.model_runner.get_model(), self.model_config.get_total_num_hidden_layers()
            )
            self._compare_q_noise = noise = Noise(layers, noise_seed, pairs=True)
            noise.handles.append(before_forwards(self.model_runner, noise.begin))
        tp, last_stage = get_tp_group(), get_pp_group().is_last_rank
        step = plan.get("step")
        # States and gathered logits are the same on every tensor-parallel rank; the first rank
        # keeps them.
        self._compare_q_scorer = Scorer(
            self._compare_q_source,
            ScoringPlan(**plan) if last_stage else ScoringPlan(),
            self.device,
            self.model_config.get_vocab_size(),
            tp.world_size,
            keeps=tp.rank_in_group == 0,
            reports=last_stage,
            steps=None if step is None else Steps(step, self._compare_q_graphs),
        )

    def compare_q_collect(self, indices: Sequence[int]) -> tuple[str, bytes]:
        """Return (header as JSON, partial statistics float32 of all positions, concatenated) of
        finished windows.
        """
        assert self._compare_q_scorer is not None
        header, data = self._compare_q_scorer.collect(indices)
        return json.dumps(header), data

    def compare_q_end(self) -> str:
        """Finish the scoring run; return its report as JSON."""
        scorer, self._compare_q_scorer = self._compare_q_scorer, None
        assert scorer is not None
        scorer.error = scorer.error or self._compare_q_quiet()
        return json.dumps(scorer.end())

    def _compare_q_quiet(self) -> str:
        """End the noise; return which layer ran without noise, if any."""
        noise, self._compare_q_noise = self._compare_q_noise, None
        return "" if noise is None else noise.remove()

    def compare_q_keep_logits(self, chunk_rows: int = 1024) -> None:
        """Keep all logits of the next tagged request, computed by chunks (for
        ``compare_q_vllm.py``).
        """
        self._compare_q_kept = KeptLogits(self._compare_q_source, chunk_rows)

    def compare_q_save_logits(self, path: str) -> int:
        """Write the kept rows to a safetensors file on the first rank, and forget them; return
        their number.
        """
        import torch
        from safetensors.torch import save_file
        from vllm.distributed import get_tp_group

        kept, self._compare_q_kept = self._compare_q_kept, None
        if kept is None or not kept.kept or get_tp_group().rank_in_group != 0:
            return 0
        logits = torch.cat(kept.kept)
        save_file({"logits": logits}, path)
        return int(logits.shape[0])


def prepare_cpu() -> None:
    """On a CPU, make two things available that vLLM's own kernels need but vLLM does not request.

    Linux gives AMX's registers only to processes that request them.  vLLM's int4 kernels do not: a
    small model ends by SIGILL if oneDNN, which requests the registers, has not computed a product
    before.  NVFP4 W4A4 layers run in vLLM's own emulation, which vLLM lists for GPUs only.
    """
    import torch
    from vllm.platforms import PlatformEnum, current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels import linear

    torch.cpu._init_amx()
    linear._POSSIBLE_NVFP4_KERNELS.setdefault(PlatformEnum.CPU, [linear.EmulationNvFp4LinearKernel])


prepare_cpu()  # in each worker, before it builds the model
machine.choose_mkl_kernels()  # in each rank, before it computes the table of its rotary embedding
