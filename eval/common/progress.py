"""Progress of a run: bars on a terminal with the time left; elsewhere one line for each finished
phase.

Everything is printed to a copy of standard error that is made at the start, so that bars stay
visible while the output of an engine is captured (``backends/common/process.py``).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from ...backends.common.message_text import bytes_in_words, printable
from ...backends.worker import protocol
from ...backends.worker.protocol import Message
from . import output_files, terminal

EVERY_S = 0.1
"""Seconds between two messages about one phase: a data set has millions of rows."""
WIDE = 80
"""Width in characters of a terminal that shows a bar and the elapsed time, too."""
BAR = 10
"""Width in characters of a bar."""
Show = Callable[[Message], None]
"""Shows a ``Progress`` or ``Log`` of another process, or sends it to the process that shows it."""


def counted(unit: str, done: float, total: float | None = None) -> str:
    """``3 windows``, or ``3/16 windows``; bytes as ``1.2 MB/16.1 GB``; empty without a unit."""
    numbers = [
        bytes_in_words(each) if unit == "bytes" else f"{each:.0f}"
        for each in (done, total)
        if each is not None
    ]
    one = unit.removesuffix("s") if numbers[-1] == "1" else unit
    return "/".join(numbers) + ("" if unit == "bytes" else f" {one}") if unit else ""


class Title(rich_progress.ProgressColumn):
    """The title of a phase, without its end if the other columns leave too little room."""

    def render(self, task: rich_progress.Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class Left(rich_progress.TimeRemainingColumn):
    """The time that is left, and the word that distinguishes it from the elapsed time."""

    def render(self, task: rich_progress.Task) -> Text:
        text = super().render(task)
        return text.append(" left" if text else "")


class Counter(rich_progress.ProgressColumn):
    """The finished units of a phase, and their total if it is known."""

    def render(self, task: rich_progress.Task) -> Text:
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
        self.send(protocol.Progress(self.waiting))
        self.waiting = 0

    def expect(self, total: int) -> None:
        """Set the ``total`` number of units, which was not known at the start."""
        self.send(protocol.Progress(total=total))

    def show(self, message: Message) -> None:
        """Show a worker's message."""
        if isinstance(message, protocol.Log):
            self.say(message.text)
        elif isinstance(message, protocol.Progress):
            self.advance(message.done) if message.total is None else self.expect(message.total)


class Progress:
    """Shows one line per running phase; models that run at the same time have phases in their own
    threads.

    A process makes one Progress, before anything captures the output.  ``send``: sends the progress
    to another process, which shows it; None: it is shown here.  A console has one live display,
    with a line for every phase.
    """

    def __init__(self, *, quiet: bool = False, send: Show | None = None) -> None:
        self.send, self.lock = send, threading.Lock()
        if send is None:
            file = output_files.text_stream(os.dup(2))
            weakref.finalize(self, file.close)
            self.console = Console(file=file, quiet=quiet)
            whole = Column(no_wrap=True)  # only titles are cut
            columns = [Counter(whole), Left(compact=True, table_column=whole)]
            if self.console.width >= WIDE:
                bar = rich_progress.BarColumn(BAR, table_column=whole)
                columns = [bar, rich_progress.TimeElapsedColumn(whole), *columns]
            # if rich redirected, engines would print above the bar, not into logs
            self.bars = rich_progress.Progress(
                rich_progress.SpinnerColumn(table_column=whole),
                Title(),
                *columns,
                console=self.console,
                transient=True,
                redirect_stdout=False,
                redirect_stderr=False,
                disable=not self.console.is_terminal,
            )

    def say(self, line: str) -> None:
        """Print one line of plain text."""
        if self.send is not None:
            self.send(protocol.Log(line))
        else:
            terminal.say(line, console=self.console)

    @contextmanager
    def phase(self, title: str, *, unit: str = "", total: int | None = None) -> Iterator[Phase]:
        """Show one phase of ``total`` units; None: not known yet."""
        if self.send is not None:
            self.send(protocol.Progress(phase=title, unit=unit, total=total))
            phase = Phase(self.say, self.send)
            yield phase
            phase.flush()
            self.send(protocol.Progress(phase=""))
            return
        began = time.perf_counter()
        with self.lock:
            if not (self.bars.tasks or self.bars.disable):
                self.bars.start()
            task = self.bars.add_task(printable(title), total=total, unit=unit)

        def draw(message: Message) -> None:
            if isinstance(message, protocol.Progress):
                self.bars.update(task, advance=message.done, total=message.total)

        phase = Phase(self.say, draw)
        try:
            yield phase
        finally:
            phase.flush()
            with self.lock:
                self.bars.refresh()  # a short phase is seen too
                self.bars.remove_task(task)
                if not (self.bars.tasks or self.bars.disable):  # rich 13 would print an empty line
                    self.bars.stop()
        amount = counted(unit, phase.done)
        if phase.done or unit != "bytes":  # at least one unit was fetched
            self.say(
                f"{title}: {amount}{' in ' if amount else ''}{time.perf_counter() - began:.1f} s"
            )


@contextmanager
def shown(progress: Progress) -> Iterator[Show]:
    """Yield a function that shows the messages of another process's ``Progress``."""
    with ExitStack() as phases:
        running: Phase | None = None

        def show(message: Message) -> None:
            nonlocal running
            if isinstance(message, protocol.Progress) and message.phase:
                phase = progress.phase(message.phase, unit=message.unit, total=message.total)
                running = phases.enter_context(phase)
            elif isinstance(message, protocol.Progress) and message.phase is not None:
                phases.close()
            elif isinstance(message, protocol.Log):
                progress.say(message.text)
            elif running is not None:
                running.show(message)

        yield show
