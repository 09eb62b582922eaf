"""The errors of compare_q: what a user can cause or must know."""

from __future__ import annotations

from compare_q.backends.common.messages import printable


class CompareQError(Exception):
    """An error that a user can cause or must know; the text has a line a problem: what, where, what to do.

    Whatever the text quotes, a terminal can show it: of the control characters only line feeds stay.
    """

    def __init__(self, text: str) -> None:
        super().__init__("\n".join(map(printable, text.split("\n"))))


class InputError(CompareQError):
    """The specs, files or flags do not fit; nothing was measured with them."""


class ModelError(CompareQError):
    """One model could not be loaded or scored; the others can go on."""


class LostWorkerError(ModelError):
    """The machine of a worker is gone: another one may go on."""


class StoppedError(CompareQError):
    """The run was interrupted while a model was in work; what was committed is kept."""

    def __init__(self, text: str = "interrupted before all its windows were scored; run again to go on") -> None:
        super().__init__(text)
