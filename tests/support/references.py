"""Reference stores that an engine leaves behind."""

from __future__ import annotations

from pathlib import Path

from compare_q.backends.base import LogitsEngine, Task
from compare_q.backends.reference.reading import open_reference
from compare_q.backends.reference.store import seal
from compare_q.backends.worker import scoring
from tests.support.toy import toy_windows


def kept_as_reference(engine: LogitsEngine, folder: Path) -> tuple[str, str]:
    """Whether a loaded model keeps its states or its logits in ``folder / "store"``, and why not its states."""
    (folder / "store").mkdir()
    list(scoring.token_scores(engine, toy_windows(1, 20), Task(record=folder / "store")))
    seal(folder / "store", {}, 1)
    store = open_reference(folder / "store")
    return store.contents, store.reason
