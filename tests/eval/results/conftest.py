"""What the tests of merged runs share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.two_runs import Write, writer


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a results.json as another machine would."""
    return writer(tmp_path)
