"""Tokens of a text in the cache of a run in another process."""

from __future__ import annotations

from pathlib import Path

from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.spec_files import load_data_specs
from compare_q.eval.text import text_windows


def tokenize(data: Path, cache: Path) -> None:
    """Put the tokens of a data spec's text into a cache.

    A run in another process would import Transformers for them, which takes 5 s.
    """
    (spec,) = load_data_specs([data])
    text_windows.build(spec, None, Cache(cache), Progress(quiet=True))
