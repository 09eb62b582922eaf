"""Progress with an ETA: a bar on a terminal, one line a finished phase elsewhere.

Everything goes to a copy of the standard error that is made at the start, so that bars stay visible while an engine's
own output is captured (``backends/capture.py``).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import BarColumn, Progress as RichProgress, ProgressColumn, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text


class EtaColumn(ProgressColumn):
    """Time left: from the speed so far, or from how long the phase is expected to take."""

    def render(self, task: Task) -> Text:
        left = task.time_remaining
        expected = task.fields.get("expected")
        if expected is not None and task.elapsed is not None:
            left = max(expected - task.elapsed, 0.0)
        if left is None:
            return Text("ETA -:--:--", style="dim")
        minutes, seconds = divmod(int(left), 60)
        return Text(f"ETA {minutes // 60}:{minutes % 60:02d}:{seconds:02d}", style="cyan")


class Bar(BarColumn):
    """A bar that follows the clock where only the expected duration is known."""

    def render(self, task: Task):  # type: ignore[no-untyped-def]  # rich's own return type
        expected = task.fields.get("expected")
        if expected and task.elapsed is not None and not task.finished:
            task.total, task.completed = expected, min(task.elapsed, 0.99 * expected)
        return super().render(task)


@dataclass
class Phase:
    """One running phase; ``seconds`` is set when it ends."""

    unit: str
    rich: RichProgress | None = None
    task: int = 0
    done: int = 0
    seconds: float = 0.0
    started: float = field(default_factory=time.perf_counter)

    def advance(self, amount: int = 1) -> None:
        """``amount`` more units are done."""
        self.done += amount
        if self.rich is not None:
            self.rich.advance(self.task, amount)  # type: ignore[arg-type]  # rich's TaskID is an int


class Progress:
    """Draws phases; make one a process, before anything captures the output."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(file=os.fdopen(os.dup(2), "w", encoding="utf-8"), quiet=quiet)

    def say(self, text: str) -> None:
        """One line of plain text."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def phase(
        self, title: str, *, unit: str = "", total: int | None = None, expected: float | None = None
    ) -> Iterator[Phase]:
        """Show one phase.  ``total`` counts units; ``expected`` is its likely duration in seconds, if only that is known."""
        phase = Phase(unit)
        if not self.console.is_terminal:
            yield phase
        else:
            columns = (SpinnerColumn(), TextColumn("{task.description}"), Bar(), TextColumn("{task.fields[counter]}"),
                       TimeElapsedColumn(), EtaColumn())  # fmt: skip
            with RichProgress(*columns, console=self.console, transient=True) as phase.rich:
                phase.task = phase.rich.add_task(title, total=total, expected=expected, counter=unit)
                yield phase
        phase.seconds = time.perf_counter() - phase.started
        amount = f"{phase.done} {unit} in " if unit else ""
        self.say(f"{title}: {amount}{phase.seconds:.1f} s")
