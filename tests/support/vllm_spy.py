"""For tests: count, edit or keep logits in vLLM's workers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from compare_q.backends.vllm.chunks import Chunk
from compare_q.backends.vllm.extension import ScoringExtension
from compare_q.backends.vllm.scorer import Scorer
from compare_q.backends.vllm.step_scorer import StepScorer

EDITED = 300
BY = -3.0
"""Logit that is edited: with two ranks of 160 entries, no rank has this index."""


class SpyExtension(ScoringExtension):
    """Counts the rows of logits that are gathered across ranks, inside the scorer and in total.

    It can also make a model that edits its logits after the LogitsProcessor.
    """

    def compare_q_install(self, decodes: bool = False) -> str:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        self._spy = {"inside": 0, "all": 0, "inside_now": False}
        gather = LogitsProcessor._gather_logits

        def counted(processor: Any, logits: Any) -> Any:
            self._spy["all"] += logits.shape[0]
            self._spy["inside"] += logits.shape[0] * self._spy["inside_now"]
            return gather(processor, logits)

        step = StepScorer.step

        def watched(*args: Any) -> None:
            self._spy["inside_now"] = True
            step(*args)
            self._spy["inside_now"] = False

        LogitsProcessor._gather_logits = counted
        StepScorer.step = watched  # type: ignore[method-assign]
        return super().compare_q_install(decodes)

    def compare_q_spied(self) -> str:
        """Return the counts since the last call."""
        spied = json.dumps(self._spy)
        self._spy.update(inside=0, all=0)
        return spied

    def compare_q_edit(self) -> None:
        """Edit one logit from now on; only gathered logits have the entry at its index."""
        model = self.model_runner.get_model()
        original = model.compute_logits

        def edited(hidden_states: Any) -> Any:
            logits = original(hidden_states)
            if logits is not None:
                logits.index_add_(
                    -1,
                    torch.tensor([EDITED]).to(logits.device),
                    torch.full_like(logits[..., :1], BY),
                )
            return logits

        model.compute_logits = edited


class KeptLogits:
    """The logits of the scoring step itself: kernels in bf16 compute others in another batch."""

    def __init__(self) -> None:
        self.parts: dict[int, list[torch.Tensor]] = {}  # by window
        self.logits_of_both: Any = None  # the scorer's own method, while another one replaces it

    def note(self, logits: torch.Tensor, chunk: Chunk) -> None:
        """Append a chunk's logits to those of their windows, whose rows arrive in order."""
        begin = 0
        for part in chunk.parts:
            end = begin + part.n_rows
            earlier = self.parts.setdefault(part.rows.window, [])
            assert part.rows.begin == sum(len(rows) for rows in earlier)
            earlier.append(logits[begin:end].clone())
            begin = end


KEPT = KeptLogits()
"""Of this process: vLLM's worker calls the two functions below."""


def keep_logits(worker: Any) -> None:
    """Keep the logits of the next scoring run in this process."""
    logits_of_both = Scorer.logits_of_both

    def noted(scorer: Scorer, states: torch.Tensor, chunk: Chunk) -> Any:
        logits, reference = logits_of_both(scorer, states, chunk)
        # Not in a run of the probe, which compares with no reference.
        if scorer.plan.reference is not None:
            KEPT.note(logits, chunk)
        return logits, reference

    KEPT.logits_of_both = logits_of_both
    Scorer.logits_of_both = noted  # type: ignore[method-assign]


def save_logits(worker: Any, folder: str) -> None:
    """Write the kept logits to ``{window}.safetensors`` in a folder, and keep no more.

    They are ``logits`` [T, V] of scored positions.
    """
    from safetensors.torch import save_file

    Scorer.logits_of_both = KEPT.logits_of_both  # type: ignore[method-assign]
    for window, parts in KEPT.parts.items():
        save_file({"logits": torch.cat(parts)}, Path(folder) / f"{window}.safetensors")
    KEPT.parts = {}
