"""Progress of a run: bars on a terminal, elsewhere one line for each finished phase.

Everything is printed to a copy of standard error that is made at the start, so that bars stay
visible while the output of an engine is captured (``backends/common/process.py``).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from rich import progress as rich_progress
from rich.console import Console
from rich.table import Column
from rich.text import Text

from ...backends.common.message_text import bytes_in_words, printable
from ...backends.worker import protocol
from ...backends.worker.protocol import Message
from . import output_files, terminal

UPDATE_S = 0.1
"""Seconds between two messages about one phase: a data set has millions of rows."""
WIDTH_FOR_BAR = 80
"""Width in characters of a terminal that shows a bar and the elapsed time, too."""
BAR_WIDTH = 10
"""Width in characters of a bar."""
Show = Callable[[Message], None]
"""Shows a ``Progress`` or ``Log`` of another process, or sends it to the process that shows it."""


def units_in_words(unit: str, done: float, total: float | None = None) -> str:
    """``3 windows``, or ``3/16 windows``; bytes as ``1.2 MB/16.1 GB``; empty without a unit."""
    if not unit:
        return ""
    numbers = [number_in_words(unit, done)]
    if total is not None:
        numbers.append(number_in_words(unit, total))
    fraction = "/".join(numbers)
    if unit == "bytes":
        return fraction
    if numbers[-1] == "1":
        unit = unit.removesuffix("s")
    return f"{fraction} {unit}"


def number_in_words(unit: str, number: float) -> str:
    """Return a number without its unit; bytes with a suitable unit such as MB."""
    if unit == "bytes":
        return bytes_in_words(number)
    return f"{number:.0f}"


class Title(rich_progress.ProgressColumn):
    """The title of a phase, without its end if the other columns leave too little room."""

    def render(self, task: rich_progress.Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class RemainingTime(rich_progress.TimeRemainingColumn):
    """The time that is left, and the word that distinguishes it from the elapsed time."""

    def render(self, task: rich_progress.Task) -> Text:
        text = super().render(task)
        if text:
            text.append(" left")
        return text


class Counter(rich_progress.ProgressColumn):
    """The finished units of a phase, and their total if it is known."""

    def render(self, task: rich_progress.Task) -> Text:
        return Text(units_in_words(task.fields["unit"], task.completed, task.total))


class Phase:
    """One running phase, which several threads may advance; ``say`` prints a line above its bar."""

    def __init__(self, say: Callable[[str], None], send: Show) -> None:
        self.say = say
        self.send = send
        self.done = 0
        self.unsent = 0
        self.sent_at = 0.0
        self.lock = threading.Lock()

    def advance(self, amount: int = 1) -> None:
        """Add ``amount`` finished units, which are shown at most every ``UPDATE_S`` seconds."""
        with self.lock:
            self.done += amount
            self.unsent += amount
            now = time.monotonic()
            if now > self.sent_at + UPDATE_S:
                self.sent_at = now
                self.flush()

    def flush(self) -> None:
        """Show the units that were not shown yet."""
        self.send(protocol.Progress(self.unsent))
        self.unsent = 0

    def expect(self, total: int) -> None:
        """Set the ``total`` number of units, which was not known at the start."""
        self.send(protocol.Progress(total=total))

    def show(self, message: Message) -> None:
        """Show a worker's message."""
        if isinstance(message, protocol.Log):
            self.say(message.text)
        elif isinstance(message, protocol.Progress):
            if message.total is None:
                self.advance(message.done)
            else:
                self.expect(message.total)


class Progress:
    """Shows one line per running phase, for phases of several threads at the same time.

    A process makes one Progress, before anything captures the output.  ``send``: sends the progress
    to another process, which shows it; None: it is shown here.  A console has one live display,
    with a line for every phase.
    """

    def __init__(self, *, quiet: bool = False, send: Show | None = None) -> None:
        self.send = send
        self.lock = threading.Lock()
        if send is None:
            file = output_files.text_stream(os.dup(2))
            weakref.finalize(self, file.close)
            self.console = Console(file=file, quiet=quiet)
            self.bars = bars_on(self.console)

    def say(self, line: str) -> None:
        """Print one line of plain text."""
        if self.send is not None:
            self.send(protocol.Log(line))
        else:
            terminal.say(line, console=self.console)

    def phase(
        self, title: str, *, unit: str = "", total: int | None = None
    ) -> AbstractContextManager[Phase]:
        """Show one phase of ``total`` units while a block runs; None: not known yet."""
        if self.send is not None:
            return self.remote_phase(self.send, title, unit, total)
        return self.local_phase(title, unit, total)

    @contextmanager
    def remote_phase(self, send: Show, title: str, unit: str, total: int | None) -> Iterator[Phase]:
        """Send the progress of a phase to the process that shows it."""
        send(protocol.Progress(phase=title, unit=unit, total=total))
        phase = Phase(self.say, send)
        yield phase
        phase.flush()
        send(protocol.Progress(phase=""))

    @contextmanager
    def local_phase(self, title: str, unit: str, total: int | None) -> Iterator[Phase]:
        """Show a phase on this console."""
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
                # If nothing is drawn (``disable``), rich 13 would print an empty line.
                if not (self.bars.tasks or self.bars.disable):
                    self.bars.stop()
        # A download of nothing, because all files are on this machine, prints no line.
        if phase.done or unit != "bytes":
            elapsed_s = time.perf_counter() - began
            amount = units_in_words(unit, phase.done)
            if amount:
                amount += " in "
            self.say(f"{title}: {amount}{elapsed_s:.1f} s")


def bars_on(console: Console) -> rich_progress.Progress:
    """Return the live display of a console, which draws nothing unless it is a terminal."""
    uncut = Column(no_wrap=True)  # only titles are cut
    columns: list[rich_progress.ProgressColumn] = []
    if console.width >= WIDTH_FOR_BAR:
        columns.append(rich_progress.BarColumn(BAR_WIDTH, table_column=uncut))
        columns.append(rich_progress.TimeElapsedColumn(uncut))
    columns.append(Counter(uncut))
    columns.append(RemainingTime(compact=True, table_column=uncut))
    return rich_progress.Progress(
        rich_progress.SpinnerColumn(table_column=uncut),
        Title(),
        *columns,
        console=console,
        transient=True,
        # If rich redirected these, engines would print above the bar, not into logs.
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not console.is_terminal,
    )


@contextmanager
def message_display(progress: Progress) -> Iterator[Show]:
    """Yield a function that shows the messages of another process's ``Progress``."""
    with ExitStack() as phases:
        running: Phase | None = None

        def show(message: Message) -> None:
            nonlocal running
            if isinstance(message, protocol.Progress) and message.phase:
                phase = progress.phase(message.phase, unit=message.unit, total=message.total)
                running = phases.enter_context(phase)
            elif isinstance(message, protocol.Progress) and message.phase is not None:
                # An empty name: the phase has ended.
                phases.close()
            elif isinstance(message, protocol.Log):
                progress.say(message.text)
            elif running is not None:
                running.show(message)

        yield show
