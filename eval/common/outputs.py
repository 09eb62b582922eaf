"""Writing what a run was asked for: an output that fails is one line, and takes no other output with it."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from compare_q.backends.common.errors import CompareQError
from compare_q.backends.common.messages import one_line

INSTALL = "install what compare_q needs to draw: pip install matplotlib"
CURE = "free space or name another place, and run again: what was measured is kept"


@dataclass
class Outputs:
    """The outputs of one run; ``failures`` has a line for each that could not be written.

    ``verbose``: an error of another kind than a user can cause prints its traceback too.
    """

    verbose: bool = False
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def writing(self, target: Path | str) -> Iterator[None]:
        """A block that writes ``target``; if it fails, the run goes on behind the block."""
        try:
            yield
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(error)}"  # a bug, in compare_q or in a library that draws
            if isinstance(error, CompareQError):
                reason = str(error).removeprefix(f"{target}: ").removeprefix("could not be written: ")
            elif isinstance(error, ModuleNotFoundError):
                reason = f"{error.name} is not installed; {INSTALL}"
            elif isinstance(error, OSError):
                reason = f"{error.strerror or one_line(error)}; {CURE}"
            elif self.verbose:
                traceback.print_exc()
            self.failures.append(f"{target}: could not be written: {reason}")
