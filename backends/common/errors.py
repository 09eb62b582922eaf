"""The errors of compare_q that a user can cause or must know about."""

from __future__ import annotations

from .message_text import printable

MEMORY_TOO_SMALL = "out of memory"
"""In the text of a ModelError: the memory of a GPU or of the machine was too small."""


class CompareQError(Exception):
    """An error that a user can cause or must know about.

    The text has one line per problem: what, where, what to do.  Control characters that it quotes
    are escaped, except line feeds.
    """

    def __init__(self, text: str) -> None:
        lines = [printable(line) for line in text.split("\n")]
        super().__init__("\n".join(lines))


class InputError(CompareQError):
    """The specs, files or flags are wrong; nothing was measured with them."""


class ModelError(CompareQError):
    """One model could not be loaded or scored; the others are still measured."""


class LostWorkerError(ModelError):
    """The machine of a worker is lost; another machine may continue."""


class StoppedError(CompareQError):
    """The run was interrupted while a model was running; committed scores are kept."""

    def __init__(
        self, text: str = "interrupted before all its windows were scored; run again to go on"
    ) -> None:
        super().__init__(text)
