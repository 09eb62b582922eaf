"""What the doctor finds: one line each, with what is wrong, where, and what to do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Severity = Literal["wrong", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("wrong", "warning", "note")
"""``wrong``: a number or an answer would be wrong; ``warning``: it may be; ``note``: good to know."""


@dataclass(frozen=True)
class Finding:
    """One finding.

    ``where``: a file, and the first tensor or layer that it is about; ``what``: what is wrong there; ``cure``: what to
    do; ``more``: how many others are like it.
    """

    severity: Severity
    where: str
    what: str
    cure: str
    more: int = 0

    def __str__(self) -> str:
        others = f" (and {self.more:,} more like it)" if self.more else ""
        return f"{self.severity}: {self.where}: {self.what}{others}; {self.cure}"


def gathered(severity: Severity, where: Sequence[str], what: str, cure: str) -> list[Finding]:
    """One finding for all places that have the same fault, which names the first; none where there is no place."""
    return [Finding(severity, where[0], what, cure, len(where) - 1)] if where else []


def by_severity(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """The findings, the worst first, else in their order."""
    return tuple(sorted(findings, key=lambda found: SEVERITIES.index(found.severity)))
