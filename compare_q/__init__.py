"""What a quantized LLM really loses, in the engine that serves it: ``compare_q`` from Python.

    import compare_q

    result = compare_q.compare("data.json", ["bf16.json", "nvfp4.json"])

``compare``, ``load`` and ``show`` are in ``eval/api.py``, which is read when one of them is first used.  In a checkout
this folder has links to ``eval`` and ``backends``, so that a module has the same name wherever it is installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare_q.eval.api import Comparison, compare, load, show

__version__ = "0.2.0"
__all__ = ["Comparison", "compare", "load", "show"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from compare_q.eval import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
