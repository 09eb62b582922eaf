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
        except CompareQError as error:
            named = str(error).startswith(str(target))
            self.failures.append(str(error) if named else f"{target}: could not be written: {error}")
        except ModuleNotFoundError as error:
            self.failures.append(f"{target}: could not be written: {error.name} is not installed; {INSTALL}")
        except OSError as error:
            self.failures.append(f"{target}: could not be written: {error.strerror or one_line(error)}; {CURE}")
        except Exception as error:  # a bug, in compare_q or in a library that draws
            self.failures.append(f"{target}: could not be written: {type(error).__name__}: {one_line(error)}")
            if self.verbose:
                traceback.print_exc()
