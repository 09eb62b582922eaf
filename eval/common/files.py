"""Files in the user's folders that a reader finds old or new, never half-written; devices and pipes stay.

One that a run was asked for and that cannot be written is one line, and takes no other with it (``Outputs``).
"""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from compare_q.backends.common import json_files, storage
from compare_q.backends.common.errors import CompareQError
from compare_q.backends.common.messages import one_line

INSTALL = "install what compare_q needs to draw: pip install matplotlib"
CURE = "free space or name another place, and run again: what was measured is kept"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """A temporary path, whose file replaces the target when the block ends well and else vanishes.

    What a link leads to is replaced, and not the link; the mode of the old file is kept.  A device or a pipe is not
    replaced, but gets the content: if root renamed a file over /dev/null, every program would write into that.  So does
    a file that may be written and not replaced: a mount point, as of ``docker -v``, or another user's in /tmp.  OSError
    if the target is a folder or cannot be written.
    """
    if json_files.is_file(target) or not json_files.exists(target):
        real = Path(os.path.realpath(target))
        storage.sweep(real.parent)  # what a killed run left there
        with storage.beside(real) as temporary:
            yield temporary
            with suppress(OSError):  # there is none yet
                shutil.copymode(real, temporary)
            try:
                os.replace(temporary, real)
            except OSError:
                if not json_files.is_file(real):
                    raise
                real.write_bytes(temporary.read_bytes())
        return
    with tempfile.TemporaryDirectory(prefix="compare_q.") as folder:
        temporary = Path(folder) / "content"
        yield temporary
        target.write_bytes(temporary.read_bytes())


def write_text(target: Path, text: str) -> None:
    """Let a text, line ends as they are, replace what a file holds; bytes that are not UTF-8 are written as escapes."""
    with replacing(target) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def is_writable(target: Path) -> bool:
    """Whether ``replacing`` may write the target, as far as that can be told before."""
    if json_files.exists(target) and (json_files.is_folder(target) or not os.access(target, os.W_OK)):
        return False
    if json_files.is_file(target) or not json_files.exists(target):
        real = os.path.realpath(target)
        return os.access(Path(real).parent, os.W_OK) and not os.path.islink(real)  # as one that leads to itself is
    return True


def file_names(labels: Sequence[str]) -> list[str]:
    """A file name without suffix for each label, in order: safe, and no two equal even where case does not count."""
    names: list[str] = []
    for label in labels:
        safe = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in label)[:50]
        safe = f"_{safe[1:]}" if safe.startswith(".") else safe  # a hidden file
        name, number = safe, 1
        while name.casefold() in (taken.casefold() for taken in names):
            number += 1
            name = f"{safe}-{number}"
        names.append(name)
    return names


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
