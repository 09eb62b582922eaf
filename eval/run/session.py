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
    ``logits_file``: the path of a reference store that the user gave, which is read, or made there; ``verify_weights``:
    scores belong to every byte of a model's files, and not to samples of them; ``digests``: of files that were hashed,
    by path, size and time; ``cleared``: keys of scores that this run has forgotten; ``divergences``: compare with the
    reference by reverse KLD, Jensen-Shannon, total variation and top-5 agreement too.
    """

    cache: Cache
    progress: Progress
    clear: bool = False
    verbose: bool = False
    logits_file: Path | None = None
    hosts: Hosts = field(default_factory=Hosts)
    verify_weights: bool = False
    digests: dict[tuple[str, int, int], str] = field(default_factory=dict)
    cleared: set[str] = field(default_factory=set)
    divergences: bool = False
