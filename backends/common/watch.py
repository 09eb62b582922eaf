"""Who is told how far a download is: the bars of a run, or nobody."""

from __future__ import annotations

from typing import Protocol


class Watch(Protocol):
    """An object that is told of one download; calls may come from several threads, one call at a time."""

    def expect(self, total: int) -> None:
        """``total`` bytes will come."""

    def advance(self, amount: int = 1) -> None:
        """``amount`` more bytes have come; negative where some have to come again."""

    def say(self, text: str) -> None:
        """One line for the user."""


class Silent:
    """A Watch that tells nobody."""

    def expect(self, total: int) -> None:
        pass

    def advance(self, amount: int = 1) -> None:
        pass

    def say(self, text: str) -> None:
        pass


SILENT = Silent()
