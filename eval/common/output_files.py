"""Write files in the user's folders whole or not at all; keep a run alive if its streams fail."""

from __future__ import annotations

import io
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
from typing import Any, TextIO

from ...backends.common import json_files, storage
from ...backends.common.errors import CompareQError
from ...backends.common.message_text import one_line, printable, with_class

INSTALL_MATPLOTLIB = "install what compare_q needs to draw: pip install matplotlib"
CURE = "free space or name another place, and run again: what was measured is kept"


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a temporary path; its file replaces the target if the block succeeds.

    The new file has the mode of the old one.  A link is followed.  A device or pipe is written
    into; otherwise root would replace /dev/null.  A file that may be written but not replaced, such
    as a mount point of ``docker -v``, is also written into.  OSError if the target cannot be
    written.
    """
    if is_device(target):
        with tempfile.TemporaryDirectory(prefix="compare_q.") as folder:
            temporary = Path(folder) / "content"
            yield temporary
            target.write_bytes(temporary.read_bytes())
        return
    real = Path(os.path.realpath(target))
    storage.sweep(real.parent)  # left by a killed run
    with storage.temporary_next_to(real) as temporary:
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
    """Replace a file's content by a text, whose line ends are kept.

    Bytes that are not UTF-8 are written as escapes.
    """
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace", newline="")


def is_device(target: Path) -> bool:
    """True if the target exists and is not a regular file."""
    return json_files.exists(target) and not json_files.is_file(target)


def is_writable(target: Path) -> bool:
    """True if ``replacing`` can probably write the target."""
    if json_files.is_folder(target):
        return False
    if json_files.exists(target) and not os.access(target, os.W_OK):
        return False
    if is_device(target):
        return True
    real = os.path.realpath(target)
    if not os.access(Path(real).parent, os.W_OK):
        return False
    return not os.path.islink(real)  # a link to itself


def file_names(labels: Sequence[str]) -> list[str]:
    """Return a safe file name without suffix for each label.

    No two are equal, even if case is ignored, as some file systems do.
    """
    names: list[str] = []
    used = set[str]()
    for label in labels:
        # A dot first would hide the file.
        safe_label = re.sub(r"^\.|[^\w.-]", "_", label)[:50]
        name = safe_label
        number = 2
        while name.casefold() in used:
            name = f"{safe_label}-{number}"
            number += 1
        used.add(name.casefold())
        names.append(name)
    return names


@dataclass
class Outputs:
    """The outputs of one run; a failed output does not affect the others.

    ``verbose``: print the traceback of an error that the user did not cause.  ``failures``: one
    line per failed output.
    """

    verbose: bool = False
    failures: list[str] = field(default_factory=list)

    @contextmanager
    def writing(self, target: Path | str) -> Iterator[None]:
        """Run a block that writes ``target``; its error becomes one of the ``failures``."""
        try:
            yield
        except Exception as error:
            if self.verbose and not is_explained(error):
                lines = traceback.format_exc().splitlines()
                print(*[printable(line) for line in lines], sep="\n", file=sys.stderr)
            reason = failure_reason(error, target)
            self.failures.append(f"{target}: could not be written: {reason}")


def is_explained(error: Exception) -> bool:
    """Return False for a bug, in this project or in a library that draws."""
    return isinstance(error, CompareQError | ModuleNotFoundError | OSError)


def failure_reason(error: Exception, target: Path | str) -> str:
    """Return why an output could not be written, without the name of the output."""
    if isinstance(error, CompareQError):
        reason = str(error).removeprefix(f"{target}: ")
        return reason.removeprefix("could not be written: ")
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; {INSTALL_MATPLOTLIB}"
    if isinstance(error, OSError):
        cause = error.strerror or one_line(error)
        return f"{cause}; {CURE}"
    return with_class(error)


class LossyStream(io.FileIO):
    """A stream that drops what cannot be written.

    ``error``: the first reason, empty if only the reader of a pipe has gone (``| head``).
    """

    error = ""

    def write(self, data: Any) -> int:
        """Return the bytes that were written or dropped."""
        try:
            return super().write(data) or 0
        except OSError as error:
            if not isinstance(error, BrokenPipeError):
                self.error = self.error or error.strerror or str(error)
            # The buffer above would write again what is reported as not written.
            return memoryview(data).nbytes


def text_stream(descriptor: int, encoding: str = "utf-8") -> io.TextIOWrapper:
    """Return a text stream to a descriptor; characters that cannot be encoded are escaped."""
    raw = LossyStream(descriptor, "w", closefd=descriptor > 2)
    is_line_buffered = descriptor != 1 or raw.isatty()
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding, "backslashreplace", line_buffering=is_line_buffered
    )


def protect_standard_streams() -> None:
    """Replace stdout and stderr by streams whose errors do not end a run.

    A stream that the user has closed (``>&-``) becomes /dev/null.
    """
    # A file that is opened gets the lowest free descriptor.  Without this the next file of the run
    # would become its standard stream, and get what is printed.
    descriptor = os.open(os.devnull, os.O_RDWR)
    while descriptor <= 2:
        os.set_inheritable(descriptor, True)
        descriptor = os.open(os.devnull, os.O_RDWR)
    os.close(descriptor)
    sys.stdout = text_stream(1, encoding_of(sys.stdout))
    sys.stderr = text_stream(2, encoding_of(sys.stderr))


def encoding_of(stream: TextIO | None) -> str:
    """Return the encoding of a standard stream, which is None if the user has closed it."""
    if stream is None:
        return "utf-8"
    return stream.encoding


def stdout_error() -> str:
    """Return why output on stdout was dropped; empty if none was, or if its reader has gone."""
    sys.stdout.flush()
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if isinstance(raw, LossyStream):
        return raw.error
    return ""  # in a test or a notebook
