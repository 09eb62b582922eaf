"""Decode in an unmodified vLLM: which steps ran, whether they were those that were asked for, and by which graphs.

``long_prefill_token_threshold`` lets a step compute so many tokens of a window's prompt and no more, so that vLLM
computes a window as it generates one: a step's shapes choose the kernels of attention and products, and the graphs.
What vLLM cannot be told, it is asked: every step of a pass is counted where its states are handed over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from compare_q.backends.vllm.hooks import RequestRows

UNKNOWN = "unknown"


class Graphs:
    """Which kind of graph ran each step of a model runner: the last one that it chose ("FULL", "PIECEWISE", "NONE").

    V1 asks its ``cudagraph_dispatcher``, which returns (mode, ...), V2 its ``cudagraph_manager``, whose answer has
    ``cg_mode``; a runner without either is not known.
    """

    def __init__(self, runner: Any) -> None:
        self.last = UNKNOWN
        owners = (getattr(runner, name, None) for name in ("cudagraph_manager", "cudagraph_dispatcher"))
        chooser = next((owner for owner in owners if owner is not None), None)
        if chooser is None:
            return
        dispatch = chooser.dispatch

        def noted(*args: Any, **kwargs: Any) -> Any:
            chosen = dispatch(*args, **kwargs)
            mode = chosen[0] if isinstance(chosen, tuple) else getattr(chosen, "cg_mode", None)
            self.last = str(getattr(mode, "name", UNKNOWN))
            return chosen

        chooser.dispatch = noted


@dataclass
class Steps:
    """The steps of a pass, of which each has the next ``step`` tokens of windows, or what is left of one.

    ``sizes`` counts the windows of all steps by their tokens, ``graphs`` the steps by their graph; ``widest`` is the
    number of windows of the fullest step.
    """

    step: int
    sizes: Counter[int] = field(default_factory=Counter)
    graphs: Counter[str] = field(default_factory=Counter)
    widest: int = 0

    def count(self, requests: Sequence[RequestRows], graph: str) -> str:
        """Count a step of these windows; says which of them has other tokens than it should, empty if none has."""
        self.graphs[graph] += 1
        self.widest = max(self.widest, len(requests))
        wrong = ""
        for request in requests:
            self.sizes[request.n_rows] += 1
            if request.start % self.step or request.n_rows != min(self.step, request.length - request.start):
                wrong = (
                    f"vLLM computed {request.n_rows} tokens of window {request.tag[0]} at position {request.start} in "
                    f"one step, and not {self.step}"
                )
        return wrong

    def report(self) -> dict[str, Any]:
        """Counts for results.json, whose keys are text."""
        sizes = {str(size): self.sizes[size] for size in sorted(self.sizes)}
        return {"tokens_a_step": sizes, "windows_a_step": self.widest, "graphs": dict(self.graphs.most_common())}


def check_decodes(model: Any) -> None:
    """RuntimeError for layers that keep a state in place of keys and values.

    For these vLLM tells a prompt from what is generated: 0.32 computes steps of a prompt of more than one token, and
    the first one, by its kernels of prefill.
    """
    for name, module in model.named_modules():
        if any(base.__name__ == "MambaBase" for base in type(module).__mro__):
            raise RuntimeError(
                f"phase: {name} ({type(module).__name__}) keeps a state, which vLLM may compute by its kernels of "
                "prefill; score this model in prefill"
            )
