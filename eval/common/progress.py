"""Progress with an ETA where one is known: a bar on a terminal; elsewhere one line for each finished phase.

Everything goes to a copy of the standard error that is made at the start, so that bars stay visible while an engine's
own output is captured (``backends/common/process.py``).
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.progress import BarColumn, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from compare_q.backends.common.messages import bytes_in_words, printable
from compare_q.backends.worker import messages
from compare_q.backends.worker.messages import Message
from compare_q.eval.common import files

EVERY_S = 0.1
"""Seconds between two messages about one phase: a data set has millions of rows."""
Show = Callable[[Message], None]
"""Shows a ``Progress`` or ``Log`` of another process, or sends it to the process that shows it."""


class EtaColumn(ProgressColumn):
    """Time left by the speed so far, where that is known."""

    def render(self, task: Task) -> Text:
        seconds_left = task.time_remaining
        if seconds_left is None or seconds_left < 1:  # it is done but for its end
            return Text("")
        minutes, seconds = divmod(int(seconds_left), 60)
        return Text(f"ETA {minutes // 60}:{minutes % 60:02d}:{seconds:02d}", style="cyan")


class Counter(ProgressColumn):
    """``3/16 windows``, or without the total where that is not known."""

    def render(self, task: Task) -> Text:
        total = "" if task.total is None else f"/{task.total:.0f}"
        unit = task.fields["unit"]
        if unit == "bytes":
            total = "" if task.total is None else f"/{bytes_in_words(task.total)}"
            return Text(f"{bytes_in_words(task.completed)}{total}")
        return Text(f"{task.completed:.0f}{total} {unit}" if unit else "")


class Bars(RichProgress):
    """The bars of all phases, and below them what ``below`` gives."""

    below: RenderableType | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        if self.below is not None:
            yield self.below


@dataclass
class Phase:
    """One running phase; ``say`` prints one line above the bar, ``seconds`` is set when it ends."""

    say: Callable[[str], None]
    bars: RichProgress
    task: TaskID
    done: int = 0
    seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def advance(self, amount: int = 1) -> None:
        """Add ``amount`` finished units; from any thread."""
        with self.lock:
            self.done += amount
            self.bars.advance(self.task, amount)

    def expect(self, total: int) -> None:
        """Set the ``total`` number of units, which was not known at the start."""
        self.bars.update(self.task, total=total)

    def show(self, message: Message) -> None:
        """Show a worker's message; from any thread."""
        if isinstance(message, messages.Log):
            self.say(message.text)
        elif isinstance(message, messages.Progress) and message.total is not None:
            self.expect(message.total)
        elif isinstance(message, messages.Progress):
            self.advance(message.done)


class Progress:
    """Draws phases, a line for each that goes on; models in work at the same time have a phase each, in threads.

    A process makes one Progress, before anything captures the output.  ``below``: what a terminal shows below the bars;
    ``models``: how many models the run has.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        file = files.text_stream(os.dup(2))
        weakref.finalize(self, file.close)
        self.console = Console(file=file, quiet=quiet)
        self.lock = threading.Lock()
        self.bars: Bars | None = None
        self.below: RenderableType | None = None
        self.models = 1

    def numbered(self, title: str, place: int) -> str:
        """The title of a phase of a model, whose ``place`` in the run is counted from 0."""
        return f"{title} (model {place + 1} of {self.models})" if self.models > 1 else title

    def say(self, line: str) -> None:
        """Print one line of plain text."""
        self.console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(self, title: str, *, unit: str = "", total: int | None = None) -> Iterator[Phase]:
        """Show one phase, of ``total`` units where that is known."""
        with self.lock:  # a console shows one live display, which has a line for every phase
            self.bars = bars = self.bars or self._begun()
            phase = Phase(self.say, bars, bars.add_task(title, total=total, unit=unit))
        try:
            yield phase
        finally:
            with self.lock:
                bars.refresh()  # a short phase is seen too
                bars.remove_task(phase.task)
                if not bars.tasks:
                    self.bars = None
                    if not bars.disable:  # rich 13 would print an empty line
                        bars.stop()
        phase.seconds = time.perf_counter() - phase.started
        amount = bytes_in_words(phase.done) if unit == "bytes" else f"{phase.done} {unit}"
        amount = f"{amount} in " if unit else ""
        if phase.done or unit != "bytes":  # nothing was left to fetch
            self.say(f"{title}: {amount}{phase.seconds:.1f} s")

    def _begun(self) -> Bars:
        """A live display, which shows nothing where there is no terminal."""
        columns = (
            SpinnerColumn(), TextColumn("{task.description}", markup=False),
            BarColumn(), Counter(), TimeElapsedColumn(), EtaColumn(),
        )  # fmt: skip
        # Redirected, sys.stdout and sys.stderr would print above the bar what an engine says, past its log file: 36
        # lines of three models (vLLM's logging, bars of Transformers and tqdm).
        bars = Bars(
            *columns, console=self.console, transient=True, redirect_stdout=False, redirect_stderr=False,
            disable=not self.console.is_terminal,
        )  # fmt: skip
        bars.below = self.below
        bars.start()
        return bars


class RemotePhase(Phase):
    """A phase that another process shows; its progress is sent at most every ``EVERY_S`` seconds."""

    def __init__(self, send: Show) -> None:
        self.say = lambda line: send(messages.Log(line))
        self.send, self.waiting, self.last = send, 0, 0.0

    def advance(self, amount: int = 1) -> None:
        self.waiting += amount
        if (now := time.monotonic()) > self.last + EVERY_S:
            self.flush()
            self.last = now

    def flush(self) -> None:
        """Send the progress that was not sent yet."""
        self.send(messages.Progress(self.waiting))
        self.waiting = 0

    def expect(self, total: int) -> None:
        self.send(messages.Progress(total=total))


class RemoteProgress(Progress):
    """Progress that another process shows, to which ``send`` sends it."""

    def __init__(self, send: Show) -> None:
        self.send = send

    def say(self, line: str) -> None:
        self.send(messages.Log(line))

    @contextmanager
    def phase(self, title: str, *, unit: str = "", total: int | None = None) -> Iterator[Phase]:
        self.send(messages.Progress(phase=title, unit=unit, total=total))
        phase = RemotePhase(self.send)
        yield phase
        phase.flush()
        self.send(messages.Progress(phase=""))


@contextmanager
def shown(progress: Progress | None) -> Iterator[Show]:
    """Yield a function that shows the messages of a ``RemoteProgress``; without progress it shows nothing."""
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
