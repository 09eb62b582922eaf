"""Progress of a run: bars on a terminal with the time left; elsewhere one line for each finished phase.

Everything is printed to a copy of standard error that is made at the start, so that bars stay visible while the output
of an engine is captured (``backends/common/process.py``).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.text import Text

from compare_q.backends.common.messages import bytes_in_words, printable
from compare_q.backends.worker import messages
from compare_q.backends.worker.messages import Message
from compare_q.eval.common import files

EVERY_S = 0.1
"""Seconds between two messages about one phase: a data set has millions of rows."""
Show = Callable[[Message], None]
"""Shows a ``Progress`` or ``Log`` of another process, or sends it to the process that shows it."""


def counted(unit: str, done: float, total: float | None = None) -> str:
    """``3 windows``, or ``3/16 windows``; bytes as ``1.2 MB/16.1 GB``; empty without a unit."""
    numbers = [bytes_in_words(each) if unit == "bytes" else f"{each:.0f}" for each in (done, total) if each is not None]
    return "/".join(numbers) + ("" if unit == "bytes" else f" {unit}") if unit else ""


class Counter(ProgressColumn):
    """The finished units of a phase, and their total if it is known."""

    def render(self, task: Task) -> Text:
        return Text(counted(task.fields["unit"], task.completed, task.total))


class Phase:
    """One running phase, which several threads may advance; ``say`` prints a line above its bar."""

    def __init__(self, say: Callable[[str], None], send: Show) -> None:
        self.say, self.send = say, send
        self.done, self.waiting, self.last, self.lock = 0, 0, 0.0, threading.Lock()

    def advance(self, amount: int = 1) -> None:
        """Add ``amount`` finished units, which are shown at most every ``EVERY_S`` seconds."""
        with self.lock:
            self.done += amount
            self.waiting += amount
            if (now := time.monotonic()) > self.last + EVERY_S:
                self.last = now
                self.flush()

    def flush(self) -> None:
        """Show the units that were not shown yet."""
        self.send(messages.Progress(self.waiting))
        self.waiting = 0

    def expect(self, total: int) -> None:
        """Set the ``total`` number of units, which was not known at the start."""
        self.send(messages.Progress(total=total))

    def show(self, message: Message) -> None:
        """Show a worker's message."""
        if isinstance(message, messages.Log):
            self.say(message.text)
        elif isinstance(message, messages.Progress) and message.total is not None:
            self.expect(message.total)
        elif isinstance(message, messages.Progress):
            self.advance(message.done)


class Progress:
    """Shows phases: one line for each that runs; models that run at the same time have phases in their threads.

    A process makes one Progress, before anything captures the output.  ``send``: sends the progress to another
    process, which shows it; None: it is shown here.
    """

    def __init__(self, *, quiet: bool = False, send: Show | None = None) -> None:
        self.send, self.lock = send, threading.Lock()
        self.bars: Bars | None = None
        if send is None:
            file = files.text_stream(os.dup(2))
            weakref.finalize(self, file.close)
            self.console = Console(file=file, quiet=quiet)

    def say(self, line: str) -> None:
        """Print one line of plain text."""
        if self.send is not None:
            self.send(messages.Log(line))
        else:
            self.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, title: str, *, unit: str = "", total: int | None = None) -> Iterator[Phase]:
        """Show one phase of ``total`` units; None: not known yet."""
        if self.send is not None:
            self.send(messages.Progress(phase=title, unit=unit, total=total))
            phase = Phase(self.say, self.send)
            yield phase
            phase.flush()
            self.send(messages.Progress(phase=""))
            return
        began = time.perf_counter()
        with self.bar(title, unit, total) as show:
            phase = Phase(self.say, show)
            try:
                yield phase
            finally:
                phase.flush()
        amount = counted(unit, phase.done)
        if phase.done or unit != "bytes":  # something was fetched
            self.say(f"{title}: {amount}{' in ' if amount else ''}{time.perf_counter() - began:.1f} s")

    @contextmanager
    def bar(self, title: str, unit: str, total: int | None) -> Iterator[Show]:
        """Yield a function that draws the messages of a phase; nothing is drawn if there is no terminal.

        A console has one live display, with a line for every phase.  If rich redirected sys.stdout and sys.stderr,
        engines would print above the bar instead of into their logs.
        """
        with self.lock:
            if self.bars is None:
                self.bars = Bars(
                    SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), Counter(),
                    TimeElapsedColumn(), TimeRemainingColumn(), console=self.console, transient=True,
                    redirect_stdout=False, redirect_stderr=False, disable=not self.console.is_terminal,
                )  # fmt: skip
                self.bars.start()
            bars, task = self.bars, self.bars.add_task(title, total=total, unit=unit)

        def draw(message: Message) -> None:
            if isinstance(message, messages.Progress):
                bars.update(task, advance=message.done, total=message.total)

        try:
            yield draw
        finally:
            with self.lock:
                bars.refresh()  # a short phase is seen too
                bars.remove_task(task)
                if not bars.tasks:
                    self.bars = None
                    if not bars.disable:  # rich 13 would print an empty line
                        bars.stop()


@contextmanager
def shown(progress: Progress | None) -> Iterator[Show]:
    """Yield a function that shows the messages of another process's ``Progress``; None: they are not shown."""
    with ExitStack() as phases:
        running: Phase | None = None

        def show(message: Message) -> None:
            nonlocal running
            if progress is None:
                return
            if isinstance(message, messages.Progress) and message.phase:
                phase = progress.phase(message.phase, unit=message.unit, total=message.total)
                running = phases.enter_context(phase)
            elif isinstance(message, messages.Progress) and message.phase is not None:
                phases.close()
            elif isinstance(message, messages.Log):
                progress.say(message.text)
            elif running is not None:
                running.show(message)

        yield show
