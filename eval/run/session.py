"""What stays the same over one run: where things are kept and run, where progress is shown, the user's switches."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from eval.common.cache import Cache
from eval.common.progress import Progress
from eval.run.hosts import Hosts


@dataclass(frozen=True)
class Session:
    """``clear``: forget what the cache holds of this text and these models; ``verbose``: engines print their own logs.

    ``logits_file``: the path of a reference store that the user gave, which is read, or made there.
    """

    cache: Cache
    progress: Progress
    clear: bool = False
    verbose: bool = False
    logits_file: Path | None = None
    hosts: Hosts = field(default_factory=Hosts)
