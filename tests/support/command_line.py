"""What tests of the command line share: types of the fixtures, model specs, and the printed table's perplexity."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.toy import Ran

Run = Callable[..., Ran]
Specs = Callable[..., tuple[Path, Path]]
Models = Callable[..., tuple[Ran, list[dict[str, Any]]]]
FAKE = {"load_fn": "fake", "label": "fake", "model_dir": "none"}


def in_transformers(model: Path, **keys: Any) -> dict[str, Any]:
    """The spec of a model that Transformers would load."""
    return {"load_fn": "transformers", "label": "toy", "model_dir": str(model), **keys}


def shown_ppl(ran: Ran, label: str) -> float:
    """PPL in the printed table's row of a model whose stored size is n/a."""
    found = re.search(rf"^ ?{label} +closed form +n/a +n/a +★?([\d,.]+)±", ran.out, re.MULTILINE)
    assert found, ran.out
    return float(found[1].replace(",", ""))
