"""Decode in vLLM's worker: how many tokens of a window a step has, and which graph runs it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .hooks import RequestRows

UNKNOWN_MODE = "unknown"


class Graphs:
    """The kind of graph that a model runner chose last ("FULL", "PIECEWISE", "NONE", "unknown").

    V1 asks its ``cudagraph_dispatcher``, which returns (mode, ...), V2 its ``cudagraph_manager``,
    whose answer has ``cg_mode``.
    """

    def __init__(self, runner: Any) -> None:
        self.last = UNKNOWN_MODE
        chooser: Any = getattr(runner, "cudagraph_manager", None)
        if chooser is None:
            chooser = getattr(runner, "cudagraph_dispatcher", None)
        dispatch: Any = getattr(chooser, "dispatch", None)
        if dispatch is None:
            return

        def noted(*args: Any, **kwargs: Any) -> Any:
            answer = dispatch(*args, **kwargs)
            if isinstance(answer, tuple):
                mode = answer[0]
            else:
                mode = getattr(answer, "cg_mode", None)
            self.last = str(getattr(mode, "name", UNKNOWN_MODE))
            return answer

        chooser.dispatch = noted


@dataclass
class Steps:
    """Counts of the decode steps of a scoring run.

    Each step has the next ``step`` tokens of a window, or its last tokens.
    """

    step: int
    graph: Graphs
    sizes: Counter[int] = field(default_factory=Counter)  # tokens of a window in a step -> count
    graphs: Counter[str] = field(default_factory=Counter)  # steps by graph
    widest: int = 0  # most windows in a step

    def count(self, requests: Sequence[RequestRows]) -> str:
        """Count a step of these windows.

        Return an error if a window has the wrong tokens (the last such window's), else "".
        """
        self.graphs[self.graph.last] += 1
        self.widest = max(self.widest, len(requests))
        fault = ""
        for request in requests:
            self.sizes[request.n_rows] += 1
            n_tokens = min(self.step, request.length - request.start)
            if request.start % self.step != 0 or request.n_rows != n_tokens:
                fault = (
                    f"vLLM computed {request.n_rows} tokens of window {request.tag[0]} at "
                    f"position {request.start} in one step, and not {self.step}"
                )
        return fault

    def report(self) -> dict[str, Any]:
        """Return the counts for results.json, with text as keys."""
        sizes = {str(size): self.sizes[size] for size in sorted(self.sizes)}
        return {
            "tokens_a_step": sizes,
            "windows_a_step": self.widest,
            "graphs": dict(self.graphs.most_common()),
        }


def check_no_state(model: Any) -> None:
    """Raise RuntimeError for layers that keep a state.

    vLLM 0.32 computes some of a prompt's steps in such layers by kernels of prefill.
    """
    for name, module in model.named_modules():
        bases = {base.__name__ for base in type(module).__mro__}
        if "MambaBase" in bases:
            raise RuntimeError(
                f"phase: {name} ({type(module).__name__}) keeps a state, which vLLM may compute "
                "by its kernels of prefill; score this model in prefill"
            )
