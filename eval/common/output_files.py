"""Files in the user's folders, which are replaced whole or not at all, and standard streams that
cannot end a run.
"""

from __future__ import annotations

import io
import itertools
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...backends.common import json_files, storage
from ...backends.common.errors import CompareQError
from ...backends.common.message_text import one_line, printable, with_class

INSTALL = "install what compare_q needs to draw: pip install matplotlib"
CURE = "free space or name another place, and run again: what was measured is kept"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path; its file replaces the target if the block succeeds, with the mode of
    the old file.

    A link is followed.  A device or pipe is written into; otherwise root would replace /dev/null.
    A file that may be written but not replaced, such as a mount point of ``docker -v``, is also
    written into.  OSError if the target cannot be written.
    """
    if is_device(target):
        with tempfile.TemporaryDirectory(prefix="compare_q.") as folder:
            temporary = Path(folder) / "content"
            yield temporary
            target.write_bytes(temporary.read_bytes())
        return
    real = Path(os.path.realpath(target))
    storage.sweep(real.parent)  # left by a killed run
    with storage.beside(real) as temporary:
        yield temporary
        with suppress(OSError):  # the old file may not exist
            shutil.copymode(real, temporary)
        try:
            os.replace(temporary, real)
        except OSError:
            if not json_files.is_file(real):
                raise
            real.write_bytes(temporary.read_bytes())


def write_text(target: Path, text: str) -> None:
    """Replace a file's content by a text with its line ends; bytes that are not UTF-8 are written
    as escapes.
    """
    with replacing(target) as part:
        part.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def is_device(target: Path) -> bool:
    """True if the target exists and is not a regular file."""
    return json_files.exists(target) and not json_files.is_file(target)


def is_writable(target: Path) -> bool:
    """True if ``replacing`` can probably write the target."""
    real = os.path.realpath(target)
    if json_files.exists(target) and (
        json_files.is_folder(target) or not os.access(target, os.W_OK)
    ):
        return False
    return is_device(target) or (
        os.access(Path(real).parent, os.W_OK) and not os.path.islink(real)
    )  # a link to itself


def file_names(labels: Sequence[str]) -> list[str]:
    """Return a safe file name without suffix for each label; no two are equal even if case is
    ignored.
    """
    names: list[str] = []
    for label in labels:
        safe = re.sub(r"^\.|[^\w.-]", "_", label)[:50]  # a dot first would hide the file
        candidates = itertools.chain([safe], map(f"{safe}-{{}}".format, itertools.count(2)))
        taken = {name.casefold() for name in names}
        names.append(next(name for name in candidates if name.casefold() not in taken))
    return names


@dataclass
class Outputs:
    """The outputs of one run; a failed output does not affect the others."""

    verbose: bool = False  # print the traceback of an error that the user did not cause
    failures: list[str] = field(default_factory=list)  # one line per failed output

    @contextmanager
    def writing(self, target: Path | str) -> Iterator[None]:
        """Run a block that writes ``target``; its error becomes one of the ``failures``."""
        try:
            yield
        except Exception as error:
            reason = with_class(error)  # a bug, here or in a library that draws
            if isinstance(error, CompareQError):
                reason = (
                    str(error).removeprefix(f"{target}: ").removeprefix("could not be written: ")
                )
            elif isinstance(error, ModuleNotFoundError):
                reason = f"{error.name} is not installed; {INSTALL}"
            elif isinstance(error, OSError):
                reason = f"{error.strerror or one_line(error)}; {CURE}"
            elif self.verbose:
                print(
                    *map(printable, traceback.format_exc().splitlines()), sep="\n", file=sys.stderr
                )
            self.failures.append(f"{target}: could not be written: {reason}")


class LossyStream(io.FileIO):
    """A stream that drops what cannot be written; ``error`` is the reason, unless only the reader
    has gone.
    """

    error = ""

    def write(self, data: Any) -> int:
        """Return the bytes that were written or dropped."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.error = self.error or error.strerror or str(error)
            return memoryview(data).nbytes


def text_stream(descriptor: int, encoding: str = "utf-8") -> io.TextIOWrapper:
    """Return a text stream to a descriptor; characters that cannot be encoded are escaped."""
    raw = LossyStream(descriptor, "w", closefd=descriptor > 2)
    by_line = descriptor != 1 or raw.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=by_line
    )


def protect_standard_streams() -> None:
    """Replace stdout and stderr by streams whose errors do not end a run, even if one was closed
    (``>&-``).
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = text_stream(1, sys.stdout.encoding if sys.stdout else "utf-8")
    sys.stderr = text_stream(2, sys.stderr.encoding if sys.stderr else "utf-8")


def stdout_error() -> str:
    """Return why some output on stdout was dropped; empty if none was, or if its reader has gone."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    return raw.error if isinstance(raw, LossyStream) else ""
