"""Logits in vLLM's worker: gathered logits, one rank's logits, and the head that computes them.

Under tensor parallelism ``gathered`` collects [n, V] on every call, as vLLM does when it serves.
``local`` is the same call without the gather: each rank keeps the logits of its vocabulary entries,
without padding.  Some models edit gathered logits after the LogitsProcessor.  The probe compares
both, and uses ``local`` only if they are equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..reference.comparison import LoadedHead, ReferenceWindows
from ..reference.head import Head, head_difference, largest_difference
from .hooks import RequestRows, Tokens, check_signature
from .private_names import check_attributes

if TYPE_CHECKING:
    from ..reference.head import RecomputableHead

UNLIMITED = 1 << 60
CALL = ("lm_head", "hidden_states", "embedding_bias")
GATHER = ("logits",)
"""The first parameters of a LogitsProcessor, and of its method that collects the logits of all
ranks."""
PROCESSOR = ("org_vocab_size", "logits_as_input", "soft_cap", "scale")
"""Attributes of a LogitsProcessor that are read."""


class ProbedLogits(NamedTuple):
    """Logits of some rows, and how they differ from those that vLLM serves."""

    logits: Any  # [n, V'] of this rank; None if vLLM gives them to another rank
    local_difference: float  # the largest one from gathered logits; infinite if unknown
    head: float | str  # the largest difference from the head's product, or why there is none


class LogitsSource:
    """The model's ``compute_logits``, and the last arguments of its LogitsProcessor.

    Kept for the next scoring run: ``reference_head``, of the last reference that the model was
    compared with, and ``reference_windows``, of which the first were read ahead.
    """

    def __init__(self, model: Any) -> None:
        from vllm.model_executor.layers.logits_processor import LogitsProcessor

        self.model = model
        self.processors = [
            module for module in model.modules() if isinstance(module, LogitsProcessor)
        ]
        self.processor: Any = None
        self.lm_head: Any = None
        self.states: Any = None
        self.bias: Any = None
        self.reference_head: LoadedHead | None = None
        self.reference_windows: ReferenceWindows | None = None
        self.reference_states: Any = None  # enter the head with the model's own, if set
        for processor in self.processors:
            check_signature(processor.forward, CALL)
            check_signature(processor._gather_logits, GATHER)
            check_attributes(
                processor, PROCESSOR, "logits of one rank, and the head of a reference"
            )
            processor.register_forward_pre_hook(self._capture, with_kwargs=True)

    def _capture(self, processor: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Keep the arguments of the LogitsProcessor; append the reference's states, if any."""
        arguments = dict(zip(CALL, args, strict=False)) | kwargs
        self.processor = processor
        self.lm_head = arguments["lm_head"]
        self.states = arguments["hidden_states"]
        self.bias = arguments.get("embedding_bias")
        if self.reference_states is None:
            return None
        both = torch.cat([self.states, self.reference_states])
        return (), arguments | {"hidden_states": both}

    @property
    def shard(self) -> tuple[int, int] | None:
        """Vocabulary entries [first, last) of this rank's logits.

        None before the first call, or if unknown.
        """
        indices = getattr(self.lm_head, "shard_indices", None)
        if indices is None or self.processor is None or self.processor.logits_as_input:
            return None
        last = min(indices.org_vocab_end_index, self.processor.org_vocab_size)
        return min(indices.org_vocab_start_index, last), last

    def gathered(self, hidden_states: Any) -> Any:
        """Return logits [n, V]; None on ranks that do not receive them from vLLM.

        Every rank must call this method.
        """
        return self.model.compute_logits(hidden_states)

    def local(self, hidden_states: Any) -> Any:
        """Return logits [n, last - first] of this rank's ``shard``.

        They are wrong for a model that edits gathered logits.
        """
        with ungathered(self.processors):
            return self._unpadded(self.model.compute_logits(hidden_states))

    def logits_of_both(self, hidden_states: Any, reference_states: Any) -> tuple[Any, Any]:
        """Return ``local`` of hidden states [n, H], and a reference's logits by the same head.

        Reference states [n, H] enter the head as they are.  One product of 2 n rows took 3 % less
        than two of n = 512 (H200, V = 128,256, H = 4,096).
        """
        self.reference_states = reference_states
        try:
            logits = self.local(hidden_states)
        finally:
            self.reference_states = None
        n_rows = len(hidden_states)
        return logits[:n_rows], logits[n_rows:]

    def probed(self, hidden_states: Any) -> ProbedLogits:
        """Return ``local`` logits, compared with gathered ones and with the head's product.

        Every rank must call this method.  The model's own edits of logits are left out: on one
        rank's share of the vocabulary, an edit by token id would change another token, or fail.
        """
        # This call also fills ``states`` and ``bias``, which enter the head.
        gathered = self.gathered(hidden_states)
        if self.shard is None:
            # Without a known head, nothing shows that local logits are right: they are never used.
            return ProbedLogits(gathered, local_difference=math.inf, head=0.0)
        with ungathered(self.processors):
            local = self._unpadded(self.processor(self.lm_head, self.states, self.bias))
        local_difference = 0.0
        if gathered is not None:
            local_difference = largest_difference(gathered[:, slice(*self.shard)], local)
        return ProbedLogits(
            local, local_difference, head_difference(self.head(""), self.states, local)
        )

    def _unpadded(self, logits: Any) -> Any:
        if self.shard is None:
            return logits
        first, last = self.shard
        return logits[..., : last - first]

    def weight(self) -> tuple[Any, Any] | str:
        """Return (weight [n, H], bias [n] or None) of this rank's entries.

        If the head is not a plain product, return why instead.
        """
        if self.shard is None:
            return "its logits do not come from a head that compare_q knows"
        first, last = self.shard
        n_entries = last - first
        weight: Any = getattr(self.lm_head, "weight", None)
        method = type(self.lm_head.quant_method).__name__
        is_plain = (
            weight is not None
            and method.startswith("Unquantized")
            and weight.dtype == self.states.dtype
            and weight.ndim == 2
            and len(weight) >= n_entries
            and weight.shape[1] == self.states.shape[-1]
        )
        if not is_plain:
            return (
                "its head is quantized, packed for a CPU's kernels, or of another dtype than its "
                f"states ({method})"
            )
        if self.bias is None:
            return weight[:n_entries], None
        return weight[:n_entries], self.bias[:n_entries]

    def head(self, dtype: str) -> RecomputableHead | str:
        """Return this rank's part of the head, whose logits have this dtype.

        If the head is not a plain product, return why instead.
        """
        weight_and_bias = self.weight()
        if isinstance(weight_and_bias, str):
            return weight_and_bias
        weight, bias = weight_and_bias
        processor = self.processor
        entries = int(processor.org_vocab_size)
        return weight, bias, Head(entries, dtype, processor.soft_cap, float(processor.scale))


class KeptLogits:
    """Keeps the logits of all rows of the next tagged request, computed by chunks.

    ``compare_q_vllm.py`` returns them.
    """

    def __init__(self, source: LogitsSource, chunk_rows: int) -> None:
        self.source = source
        self.chunk_rows = chunk_rows
        self.logits: list[torch.Tensor] = []

    @torch.inference_mode()
    def step(
        self, hidden_states: torch.Tensor, requests: Sequence[RequestRows], tokens: Tokens
    ) -> None:
        """Keep the logits of a step.

        Rows without states are left out, so that the count of rows shows them.
        """
        for request in requests:
            rows = hidden_states[request.begin :][: request.n_rows]
            for states in torch.split(rows, self.chunk_rows):
                # Under tensor parallelism every rank must take part, and all ranks except the first
                # may receive None.
                logits = self.source.gathered(states)
                if logits is not None:
                    self.logits.append(logits[states.any(1)].cpu())


@contextmanager
def ungathered(processors: list[Any]) -> Iterator[None]:
    """In the block, make LogitsProcessors return logits without gathering or cutting them."""
    sizes = [processor.org_vocab_size for processor in processors]
    for processor in processors:
        processor._gather_logits = lambda logits: logits  # shadows the method on this instance
        processor.org_vocab_size = UNLIMITED
    try:
        yield
    finally:
        for processor, size in zip(processors, sizes, strict=True):
            del processor._gather_logits
            processor.org_vocab_size = size
