"""Where the seconds of a row went: when its worker did what, and how long each part took."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

PARTS = ("load", "first_step", "scoring", "close")
"""The parts of a worker's life in their order.

``load``: from the moment at which the driver asked for the worker; if nothing had imported the engine before, with the
import; ``first_step``: from the start of scoring to the first scored window; ``scoring``: from then on to the last
window.
"""

FIRST = ("started", "first_window")
LAST = ("loaded", "score_began", "last_window")
"""Moments that every run has: of its replicas the first one's, and the last one's."""


@dataclass(frozen=True)
class Timing:
    """When a row's worker did what, in seconds since 1970, by its machine's clock.

    ``closed``: None if that is not known.  From one row's ``last_window`` to the ``first_window`` of the next one goes
    what is no scoring.
    """

    started: float
    loaded: float
    score_began: float
    first_window: float
    last_window: float
    closed: float | None = None

    @property
    def moments(self) -> list[float]:
        """What is known of them, in their order."""
        return [each for field in fields(self) if (each := getattr(self, field.name)) is not None]

    @property
    def scoring_seconds(self) -> float:
        """Seconds of scoring, above 0."""
        return max(self.last_window - self.score_began, 1e-9)

    @property
    def seconds(self) -> dict[str, float | None]:
        """The seconds of each of the ``PARTS``."""
        return {
            "load": self.loaded - self.started,
            "first_step": self.first_window - self.score_began,
            "scoring": self.last_window - self.first_window,
            "close": None if self.closed is None else self.closed - self.last_window,
        }


def of_records(found: Sequence[Mapping[str, Any]]) -> Timing | None:
    """The timing of a run from the moments in its sessions' records, one a replica; None if a record lacks some.

    A run begins with the first of its replicas, and ends with the last one.
    """
    if not found or any(name not in moments for moments in found for name in (*FIRST, *LAST)):
        return None
    first = {name: min(float(moments[name]) for moments in found) for name in FIRST}
    last = {name: max(float(moments[name]) for moments in found) for name in LAST}
    if all(moments["started"] == moments["loaded"] for moments in found):  # loaded for a text before this one
        first["started"] = last["loaded"]
    closed = [float(moments["closed"]) for moments in found if moments.get("closed") is not None]
    return Timing(**first, **last, closed=max(closed) if len(closed) == len(found) else None)
