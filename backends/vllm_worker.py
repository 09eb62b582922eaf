"""What runs inside vLLM's worker processes: hooks into an unmodified vLLM, set after the model has loaded.

``LLM(..., worker_extension_cls="backends.vllm_worker.LogitsExtension")`` mixes the class into every worker; the driver
calls its methods by ``collective_rpc``.  Both model runners call one method with the final hidden states of every
scheduled row on every step, whether or not a request wants prompt log-probabilities:

- V1: ``model_runner._get_prompt_logprobs_dict(hidden_states, num_scheduled_tokens)``
- V2: ``model_runner.prompt_logprobs_worker.compute_prompt_logprobs(logits_fn, hidden_states, input_batch, ...)``

The hook replaces that method on the instance, checks the signature it relies on, and calls the original.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from backends.vllm_install import NEWEST, OLDEST

V1_PARAMETERS = ("hidden_states", "num_scheduled_tokens")
V2_PARAMETERS = ("logits_fn", "hidden_states", "input_batch")


def check_signature(method: Callable[..., Any], expected: tuple[str, ...]) -> None:
    """RuntimeError unless the method's first parameters are the expected ones."""
    found = tuple(inspect.signature(method).parameters)[: len(expected)]
    if found != expected:
        raise RuntimeError(
            f"{method.__name__} takes {found}, not {expected}: this vLLM is not one of {OLDEST} to {NEWEST} that "
            "compare_q knows how to read logits from"
        )


class LogitsExtension:
    """Keeps the logits of every row of one request, between ``compare_q_start`` and ``compare_q_save_logits``."""

    model_runner: Any
    _compare_q_logits: list[Any] | None = None

    def compare_q_install(self) -> None:
        """Set the hook.  RuntimeError if this vLLM's model runner has an unknown shape."""
        runner = self.model_runner
        worker = getattr(runner, "prompt_logprobs_worker", None)
        if worker is not None:
            original = worker.compute_prompt_logprobs
            check_signature(original, V2_PARAMETERS)

            def compute(logits_fn: Any, hidden_states: Any, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
                self._compare_q_keep(logits_fn, hidden_states[: input_batch.num_tokens])
                return original(logits_fn, hidden_states, input_batch, *args, **kwargs)

            worker.compute_prompt_logprobs = compute
        elif hasattr(runner, "_get_prompt_logprobs_dict"):
            original = runner._get_prompt_logprobs_dict
            check_signature(original, V1_PARAMETERS)

            def get(hidden_states: Any, num_scheduled_tokens: dict[str, int], *args: Any, **kwargs: Any) -> Any:
                rows = sum(num_scheduled_tokens.values())
                self._compare_q_keep(runner.model.compute_logits, hidden_states[:rows])
                return original(hidden_states, num_scheduled_tokens, *args, **kwargs)

            runner._get_prompt_logprobs_dict = get
        else:
            raise RuntimeError(f"the model runner {type(runner).__name__} is not one of vLLM {OLDEST} to {NEWEST}")

    def compare_q_start(self) -> None:
        """Keep the logits of what comes next."""
        self._compare_q_logits = []

    def _compare_q_keep(self, logits_fn: Callable[[Any], Any], hidden_states: Any) -> None:
        if self._compare_q_logits is None:
            return
        # Under tensor parallelism every rank has to take part, and all but the first may get None back.
        logits = logits_fn(hidden_states)
        if logits is not None:
            self._compare_q_logits.append(logits.cpu())

    def compare_q_save_logits(self, path: str) -> int:
        """Write the kept rows, in order, to a safetensors file on the first rank and forget them; returns how many."""
        import torch
        from safetensors.torch import save_file

        kept, self._compare_q_logits = self._compare_q_logits, None
        if not kept or getattr(self, "rank", 0) != 0:
            return 0
        logits = torch.cat(kept)
        save_file({"logits": logits.contiguous()}, path)
        return int(logits.shape[0])
