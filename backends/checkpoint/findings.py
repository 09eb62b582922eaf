"""One finding of the doctor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

Severity = Literal["wrong", "warning", "note"]
"""``wrong``: a number or an answer would be wrong; ``warning``: it may be; ``note``: good to know."""


class Finding(NamedTuple):
    """A fault: file and first tensor or layer with it, what it is, how to fix it, and the number of others like it."""

    severity: Severity
    where: str
    what: str
    fix: str
    more: int = 0

    def __str__(self) -> str:
        others = f" (and {self.more:,} more like it)" if self.more else ""
        return f"{self.severity}: {self.where}: {self.what}{others}; {self.fix}"


def one_finding(severity: Severity, where: Iterable[str], what: str, fix: str) -> list[Finding]:
    """One finding for all places with the same fault, which names the first place; none if there is no place."""
    places = list(where)
    return [Finding(severity, places[0], what, fix, len(places) - 1)] if places else []
