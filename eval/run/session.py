"""What stays the same over one run: where things are kept and run, the user's switches, and the signals that end it."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compare_q.backends.worker.engine_process import ENDING
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.results.run_result import ModelResult
from compare_q.eval.run.hosts import Hosts, Running

AGAIN_S = 1.0
"""Seconds after which the same signal interrupts once more, if nothing ends the run yet."""


@dataclass(frozen=True)
class Session:
    """``clear``: forget what the cache holds of this text and these models; ``verbose``: engines print their own logs.
    ``logits_file``: the path of a reference store that the user gave, which is read, or made there; ``verify_weights``:
    scores belong to every byte of a model's files, and not to samples of them; ``digests``: of files that were hashed,
    by path, size and time; ``cleared``: keys of scores that this run has forgotten; ``divergences``: compare with the
    reference by reverse KLD, Jensen-Shannon, total variation and top-5 agreement too; ``row_done``: is told each row
    that is known, and its text's name where there are several.
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
    row_done: Callable[[str, ModelResult], None] = lambda _text, _row: None


class InterruptedRun(KeyboardInterrupt):
    """A signal that asks a run to end; ``signal`` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = number


@contextmanager
def signals_interrupt(running: Running) -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt as Ctrl-C does; what this process was started to ignore (nohup) stays ignored.

    The first signal interrupts.  From then on to the end of this process others change nothing: an interrupt in the
    midst of another one leaves threading's locks in a wrong state, and what was finished is still to be shown.  Only
    the same signal interrupts once more, as long as nothing has stopped what is ``running``: Python can lose the first.
    """
    first, at = 0, 0.0

    def interrupt(number: int, _: Any) -> None:
        nonlocal first, at
        now = time.monotonic()
        if not first or (number == first and now > at + AGAIN_S and not running.stopped):
            first, at = number, now
            raise InterruptedRun(number)

    before = {number: signal.getsignal(number) for number in ENDING}
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():  # Python's own end would let a handler of ours kill the process
            signal.signal(number, signal.SIG_IGN if first else handler)
