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
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ..checkpoint.checkpoint_config import CheckpointConfig
from ..common import machine
from ..common.message_text import dtype_name
from ..layers import schemes
from ..layers.noise import Noise, vllm_decoder_layers
from . import loaded_layers
from .decode_steps import Graphs, Steps, check_no_state
from .hooks import attach, before_forwards
from .logits import KeptLogits, LogitsSource
from .private_names import RANK_NAMES, check_attributes, check_names
from .probe_scorer import ProbeScorer
from .scorer import Scorer
from .scoring_plan import ProbePlan, ScoringPlan
from .shown_outputs import ShownOutputs


class ScoringExtension:
    """Methods of each worker of vLLM; see the module."""

    model_runner: Any
    vllm_config: Any
    model_config: Any
    device: Any
    get_kv_cache_spec: Any
    _compare_q_source: LogitsSource
    _compare_q_graphs: Graphs
    _compare_q_scorer: Scorer | ProbeScorer | None = None
    _compare_q_kept: KeptLogits | None = None
    _compare_q_noise: Noise | None = None
    _compare_q_outputs: ShownOutputs | None = None

    def compare_q_install(self, decodes: bool = False) -> str:
        """Set the hooks; return the model runner's generation.  ``decodes``: note which graphs run.

        RuntimeError for an unknown vLLM, an unreadable cache, a model whose states do not predict
        the next token, or a model that vLLM would compute differently when it generates.
        """
        generation = attach(self.model_runner, self._compare_q_current)
        check_names(RANK_NAMES)
        check_attributes(self, ("get_kv_cache_spec",), "sizes of KV caches")
        from vllm.config import set_current_vllm_config
        from vllm.v1.sample import sampler

        # The ranks of prompt_logprobs are not read; compiling their computation took 1.8 of the 5.5
        # s of a probe.
        sampler.batched_count_greater_than = inspect.unwrap(sampler.batched_count_greater_than)
        model = self.model_runner.get_model()
        if decodes:
            check_no_state(model)
            self._compare_q_graphs = Graphs(self.model_runner)
        loaded_layers.check_causal(model)
        cache_dtype = self.vllm_config.cache_config.cache_dtype
        dtype = dtype_name(self.vllm_config.model_config.dtype)
        # FlashAttention reads its version from the current config.
        with set_current_vllm_config(self.vllm_config):
            loaded_layers.check_caches(model, cache_dtype, dtype)
        self._compare_q_source = LogitsSource(model)
        return generation

    def _compare_q_current(self) -> KeptLogits | Scorer | ProbeScorer | None:
        """Return the object that receives the steps, if any."""
        if self._compare_q_kept is not None:
            return self._compare_q_kept
        return self._compare_q_scorer

    def compare_q_layers(self) -> str:
        """Return the fields of each ``Layer`` and ``KVCache`` of this rank, as JSON."""
        config = self.vllm_config
        model = self.model_runner.get_model()
        # vLLM's config has the spec's hf_overrides.
        overridden = CheckpointConfig(config.model_config.hf_config.to_dict()).quantization
        stored = CheckpointConfig.read(Path(config.model_config.model)).quantization
        quantization = stored | overridden
        dtype = dtype_name(config.model_config.dtype)
        layers = loaded_layers.layers(model, config.quant_config, quantization, dtype)
        sizes = loaded_layers.kv_sizes(self.get_kv_cache_spec(), config)
        cache_format = schemes.kv_cache(quantization)
        caches = loaded_layers.kv_caches(model, cache_format, dtype, sizes)
        fields_of_layers = [asdict(layer) for layer in layers]
        fields_of_caches = [asdict(cache) for cache in caches]
        return json.dumps([fields_of_layers, fields_of_caches])

    def compare_q_begin(self, plan: dict[str, Any], noise_seed: int | None = None) -> None:
        """Start a scoring run by the fields of ``ScoringPlan``.

        With a seed, its layers on this rank get noise.
        """
        from vllm.distributed import get_pp_group, get_tp_group

        self._compare_q_end_noise()  # of an interrupted run
        if noise_seed is not None:
            self._compare_q_begin_noise(noise_seed)
        is_last_stage = get_pp_group().is_last_rank
        # An earlier stage of a pipeline has no states to score: it opens no store.
        scoring_plan = ScoringPlan()
        if is_last_stage:
            scoring_plan = ScoringPlan(**plan)
        ranks = get_tp_group()
        self._compare_q_scorer = Scorer(
            self._compare_q_source,
            scoring_plan,
            self.device,
            self.model_config.get_vocab_size(),
            ranks.world_size,
            reports=is_last_stage,
            steps=self._compare_q_steps(plan),
            # States and gathered logits are the same on every tensor-parallel rank.
            keeps_record=ranks.rank_in_group == 0,
        )

    def compare_q_read_ahead(self) -> None:
        """Read the first windows of the reference for the next scoring run.

        This one can score nothing afterwards.
        """
        assert isinstance(self._compare_q_scorer, Scorer)
        self._compare_q_scorer.read_ahead()

    def compare_q_begin_probe(self, plan: dict[str, Any]) -> None:
        """Start a run of the probe by the fields of ``ProbePlan``."""
        from vllm.distributed import get_pp_group, get_tp_group

        self._compare_q_end_noise()  # of an interrupted run
        self._compare_q_scorer = ProbeScorer(
            self._compare_q_source,
            ProbePlan(**plan),
            self.device,
            self.model_config.get_vocab_size(),
            get_tp_group().world_size,
            reports=get_pp_group().is_last_rank,
            steps=self._compare_q_steps(plan),
        )

    def _compare_q_steps(self, plan: Mapping[str, Any]) -> Steps | None:
        """Return the counts of a run's decode steps; None in prefill."""
        step = plan.get("step")
        if step is None:
            return None
        return Steps(step, self._compare_q_graphs)

    def compare_q_collect(self, indices: Sequence[int]) -> tuple[str, bytes]:
        """Return (header as JSON, partial statistics) of finished windows.

        The statistics are float32, of all positions, concatenated.
        """
        assert self._compare_q_scorer is not None
        header, data = self._compare_q_scorer.collect(indices)
        return json.dumps(header), data

    def compare_q_end(self) -> str:
        """Finish the scoring run; return its report as JSON."""
        scorer = self._compare_q_scorer
        self._compare_q_scorer = None
        assert scorer is not None
        # After an error, ``compare_q_begin`` or ``compare_q_begin_probe`` ends the noise.
        if not scorer.error:
            scorer.error = self._compare_q_end_noise()
        return json.dumps(scorer.end())

    def compare_q_begin_outputs(
        self, file: str, compare: bool, length: int, noise_seed: int | None
    ) -> None:
        """Show what modules take and return in the next tagged request (``ShownOutputs``)."""
        if noise_seed is not None:
            # Its hooks come first: the outputs have the noise.
            self._compare_q_begin_noise(noise_seed)
        n_layers = self.model_config.get_total_num_hidden_layers()
        shown = ShownOutputs(
            self.model_runner,
            n_layers,
            self._compare_q_source,
            Path(file),
            length,
            compare=compare,
        )
        self._compare_q_outputs = shown
        self._compare_q_kept = shown.logits

    def compare_q_end_outputs(self) -> str:
        """End what ``compare_q_begin_outputs`` began; return the differences as JSON."""
        shown = self._compare_q_outputs
        self._compare_q_outputs = None
        self._compare_q_kept = None
        assert shown is not None
        answer = shown.end()
        self._compare_q_end_noise()
        return answer

    def _compare_q_begin_noise(self, seed: int) -> None:
        """Add noise to the layers of this rank."""
        n_layers = self.model_config.get_total_num_hidden_layers()
        layers = vllm_decoder_layers(self.model_runner.get_model(), n_layers)
        noise = Noise(layers, seed, pairs=True)
        self._compare_q_noise = noise
        noise.handles.append(before_forwards(self.model_runner, noise.begin))

    def _compare_q_end_noise(self) -> str:
        """End the noise; return which layer ran without noise, if any."""
        noise = self._compare_q_noise
        self._compare_q_noise = None
        if noise is None:
            return ""
        return noise.remove()

    def compare_q_keep_logits(self, chunk_rows: int = 1024) -> None:
        """Keep all logits of the next tagged request, computed by chunks.

        ``compare_q_vllm.py`` calls this.
        """
        self._compare_q_kept = KeptLogits(self._compare_q_source, chunk_rows)

    def compare_q_save_logits(self, path: str) -> int:
        """Write the kept rows to a safetensors file on the first rank, and forget them.

        Return their number.
        """
        import torch
        from safetensors.torch import save_file
        from vllm.distributed import get_tp_group

        source = self._compare_q_kept
        self._compare_q_kept = None
        if source is None or not source.logits or get_tp_group().rank_in_group != 0:
            return 0
        logits = torch.cat(source.logits)
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
