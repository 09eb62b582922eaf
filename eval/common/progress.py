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
from functools import partial

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
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


class Counter(ProgressColumn):
    """``3/16 windows``, or ``3 windows`` if the total is unknown."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f"/{task.total:.0f}"
        unit = task.fields["unit"]
        if unit == "bytes":
            total = "" if task.total is None else f"/{bytes_in_words(task.total)}"
            return Text(f"{bytes_in_words(task.completed)}{total}")
        return Text(f"{task.completed:.0f}{total} {unit}" if unit else "")


class Phase:
    """One running phase.

    ``say`` prints a line above the bar.  ``seconds`` is set when the phase ends.  Threads may call ``advance`` and
    ``show``.
    """

    def __init__(self, say: Callable[[str], None], send: Show) -> None:
        self.say, self.send = say, send
        self.done, self.seconds, self.started = 0, 0.0, time.perf_counter()
        self.waiting, self.last, self.lock = 0, 0.0, threading.Lock()

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

    A process makes one Progress, before anything captures the output.

    Attributes:
        send: sends the progress to another process, which shows it; None: it is shown here.
        models: number of models of the run.
    """

    def __init__(self, *, quiet: bool = False, send: Show | None = None) -> None:
        self.send = send
        self.lock = threading.Lock()
        self.bars: Bars | None = None
        self.models = 1
        if send is None:
            file = files.text_stream(os.dup(2))
            weakref.finalize(self, file.close)
            self.console = Console(file=file, quiet=quiet)

    def numbered(self, title: str, place: int) -> str:
        """Return the title of a phase of a model, whose ``place`` in the run is counted from 0."""
        return f"{title} (model {place + 1} of {self.models})" if self.models > 1 else title

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
        with self.lock:  # a console has one live display, with a line for every phase
            self.bars = bars = self.bars or self._begun()
            task = bars.add_task(title, total=total, unit=unit)
        phase = Phase(self.say, partial(draw, bars, task))
        try:
            yield phase
        finally:
            phase.flush()
            with self.lock:
                bars.refresh()  # a short phase is seen too
                bars.remove_task(task)
                if not bars.tasks:
                    self.bars = None
                    if not bars.disable:  # rich 13 would print an empty line
                        bars.stop()
        phase.seconds = time.perf_counter() - phase.started
        amount = bytes_in_words(phase.done) if unit == "bytes" else f"{phase.done} {unit}"
        amount = f"{amount} in " if unit else ""
        if phase.done or unit != "bytes":  # something was fetched
            self.say(f"{title}: {amount}{phase.seconds:.1f} s")

    def _begun(self) -> Bars:
        """Return a new live display; it shows nothing if there is no terminal."""
        columns = (
            SpinnerColumn(), TextColumn("{task.description}", markup=False),
            BarColumn(), Counter(), TimeElapsedColumn(), TimeRemainingColumn(),
        )  # fmt: skip
        # If rich redirected sys.stdout and sys.stderr, engines would print above the bar instead of into their logs.
        bars = Bars(
            *columns, console=self.console, transient=True, redirect_stdout=False, redirect_stderr=False,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        bars.start()
        return bars


def draw(bars: Bars, task: TaskID, message: Message) -> None:
    """Update the bar of a phase."""
    if isinstance(message, messages.Progress):
        bars.update(task, advance=message.done, total=message.total)


@contextmanager
def shown(progress: Progress | None) -> Iterator[Show]:
    """Yield a function that shows the messages of another process's ``Progress``; None: they are not shown."""
    with ExitStack() as phases:
        running: list[Phase] = []

        def show(message: Message) -> None:
            if progress is None:
                return
            if isinstance(message, messages.Log):
                progress.say(message.text)
            elif isinstance(message, messages.Progress) and message.phase:
                phase = progress.phase(message.phase, unit=message.unit, total=message.total)
                running[:] = [phases.enter_context(phase)]
            elif isinstance(message, messages.Progress) and message.phase is not None:
                phases.close()
            elif running:
                running[0].show(message)

        yield show
