"""Use ``compare_q`` from Python: measure how much quality a quantized LLM loses, in the engine that
serves it.

    import compare_q

    result = compare_q.compare("bf16", "nvfp4", data="wiki2")

``compare``, ``load``, ``show``, ``where`` and ``results_schema`` are in ``eval/api.py``, which is
imported when a name is first used.  They raise ``InputError`` for bad input.  An installation has
``eval`` and ``backends`` in this folder.  In a checkout, both are next to this folder, and imported
under the same names.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from compare_q.backends.common.errors import InputError
    from compare_q.eval.api import (
        Comparison,
        Shares,
        compare,
        load,
        results_schema,
        show,
        where,
    )

CHECKOUT = Path(__file__).resolve().parent.parent
if (CHECKOUT / "pyproject.toml").is_file():
    __path__.append(str(CHECKOUT))

__version__ = "0.4.0"
__all__ = [
    "Comparison",
    "InputError",
    "Shares",
    "compare",
    "load",
    "results_schema",
    "show",
    "where",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from compare_q.eval import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
