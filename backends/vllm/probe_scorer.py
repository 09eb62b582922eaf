"""Scores of the probe in vLLM's worker: gathered and local logits, and the head's own product.

Windows get the same statistics as in scoring, without a comparison and without a record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from .chunks import Chunk, chunk_rows
from .scoring_plan import ProbePlan
from .step_scorer import StepScorer


@dataclass
class ProbeScorer(StepScorer):
    """One rank's scorer in a run of the probe."""

    plan: ProbePlan
    local_difference: float = 0.0  # largest one of local from gathered logits
    head_difference: float = 0.0  # largest one of local logits from the head's product
    head_reason: str = ""  # why the head's product could not be compared

    @property
    def needs_collectives(self) -> bool:
        """True: the logits of all ranks are gathered in each chunk."""
        return True

    def rows_per_chunk(self, hidden_size: int, itemsize: int) -> int:
        """Return the number of rows of a chunk of states [N, H]; ``itemsize``: bytes per number."""
        return chunk_rows(
            columns=self.vocab_size,
            hidden_size=hidden_size,
            itemsize=itemsize,
            caps_logits=self.caps_logits,
            on_cpu=self.device.type == "cpu",
        )

    def score_chunk(self, states: torch.Tensor, chunk: Chunk) -> bool:
        """Write the statistics of a chunk of states [n, H] into its ``out``; return True."""
        if self.plan.gathered:
            self.head_reason = "its logits are not its head's alone"
            logits = self.source.gathered(states)
        else:
            probed = self.source.probed(states)
            # max() keeps a NaN only in this order.
            self.local_difference = max(probed.local_difference, self.local_difference)
            self.note_head(probed.head)
            logits = probed.logits
        if logits is None:  # vLLM gives them to another rank
            self.reports = False
        elif not self.error:
            self.write_statistics(self.logits_of_shard(logits), states, chunk)
        return True

    def note_head(self, difference: float | str) -> None:
        """Note the head's difference from local logits, or the reason why there is none."""
        if isinstance(difference, str):
            self.head_reason = difference
        else:
            self.head_difference = max(difference, self.head_difference)

    def end(self) -> dict[str, Any]:
        """Return the report of the run."""
        return super().end() | {
            "local_difference": self.local_difference,
            "head_difference": self.head_difference,
            "head_reason": self.head_reason,
        }
