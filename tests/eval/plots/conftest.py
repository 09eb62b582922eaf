"""What tests of plots do without: placing labels takes up to a second for a figure."""

from __future__ import annotations

import pytest

from compare_q.eval.plots import labels


@pytest.fixture
def unplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels stay on their points."""
    monkeypatch.setattr(labels, "place_labels", lambda *_: None)
