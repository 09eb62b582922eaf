"""Makes every worker of a run commit after each window, if PYTHONPATH begins with this folder.

``$NOTES`` is a folder.  Each commit adds lines of "label digest" to its file ``commits``.  Its file
``held`` has the label of a model whose worker waits after its first commit, so that a test can end
a process of the run at a known moment.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from compare_q.backends.base import TokenScores
from compare_q.backends.worker import worker

HELD_S = 600
NOTES = Path(os.environ["NOTES"])
add = worker.Committer.add
commit = worker.Committer.commit
committed = set[str]()


def commit_and_note(committer: worker.Committer) -> None:
    """Commit, and write down the windows of the commit."""
    label = committer.engine.planned.label
    digests = [window.digest for window, _ in committer.waiting]
    commit(committer)
    committed.add(label)
    with (NOTES / "commits").open("a", encoding="utf-8") as file:
        for digest in digests:
            file.write(f"{label} {digest}\n")


def add_unless_held(committer: worker.Committer, scores: TokenScores) -> None:
    """Add the scores of a window; wait first if the model is the held one and has committed."""
    label = committer.engine.planned.label
    if label in committed and (NOTES / "held").read_text() == label:
        time.sleep(HELD_S)
    add(committer, scores)


worker.COMMIT_S = 0.0
worker.Committer.add = add_unless_held  # type: ignore[method-assign]
worker.Committer.commit = commit_and_note  # type: ignore[method-assign]
