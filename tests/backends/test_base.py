"""The contract with engines: the smallest one, which the contract's docstring shows, runs as it stands there."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import pytest

from compare_q.backends import base, logits_engine
from compare_q.backends.base import ScoreRequest
from tests.support.planned import planned
from tests.support.toy import toy_windows


def test_the_engine_in_the_docstring_is_whole() -> None:
    """Each of its 1,000 tokens has the probability 1 / 1,000."""
    assert logits_engine.__doc__ is not None
    shown = logits_engine.__doc__[logits_engine.__doc__.index("    class ") :]
    names: dict[str, Any] = dict(vars(base)) | dict(vars(logits_engine))
    exec(f"from __future__ import annotations\n{textwrap.dedent(shown)}", names)
    request = planned("uniform", "uniform", "none", 100)
    engine = names["UniformEngine"](request)
    engine.check(request)
    engine.load()
    windows = toy_windows(2, 50)
    for scores in engine.score(windows, ScoreRequest()):
        np.testing.assert_allclose(scores.logprob, -np.log(1000), rtol=1e-6)
    engine.close()
    assert engine.files(request).storage().vram_bits is None
    assert "torch" in engine.versions()


def test_a_planned_model_is_changed_in_a_copy_and_only_in_fields_that_it_has() -> None:
    model = planned("m", "transformers", "folder", 100)
    assert (model.updated(stamp="s").stamp, model.stamp) == ("s", "")
    with pytest.raises(TypeError, match="stmp"):
        model.updated(stmp="s")
