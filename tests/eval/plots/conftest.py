"""Tests of plots skip the placement of labels, which takes up to a second per figure."""

from __future__ import annotations

import pytest

from compare_q.eval.plots import labels


@pytest.fixture
def unplaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Labels stay on their points."""
    monkeypatch.setattr(labels, "place_labels", lambda *_: None)
