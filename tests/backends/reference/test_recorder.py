"""What is left behind as a reference: states where the head can be recomputed, logits elsewhere, by one rule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backends.common.head import Head, head_logits
from backends.reference.recorder import Recorder
from tests.support.stores import numbers

HEAD = Head(50, "float32")
NEVER: Any = lambda: pytest.fail("there is no head to compare states with")  # noqa: E731


def test_states_are_kept_where_the_head_makes_the_engines_logits_of_them(tmp_path: Path) -> None:
    """Up to four spacings of the largest logit; the comparison is of the first 64 rows."""
    states, weight = numbers(80, 4), numbers(50, 4, seed=1)
    logits = head_logits(HEAD, states, weight, None)
    near, far = logits.clone(), logits.clone()
    near[3, 7] += 3 * 2**-14 * logits[:64].abs().max()
    far[3, 7] += 5 * 2**-14 * logits[:64].abs().max()
    later = logits.clone()
    later[64:] += 1
    for given, contents in ((logits, "states"), (near, "states"), (far, "logits"), (later, "states")):
        recorder = Recorder.of_engine(tmp_path, (weight, None, HEAD), given, lambda: states)
        assert (recorder.writer.contents, bool(recorder.writer.reason)) == (contents, contents == "logits")
        assert recorder.chosen(given, lambda: states) is (states if contents == "states" else given)


def test_the_reason_of_an_engine_without_a_head_is_kept(tmp_path: Path) -> None:
    recorder = Recorder.of_engine(tmp_path, "its head is a Strange", numbers(3, 50), NEVER)
    assert (recorder.writer.contents, recorder.writer.reason) == ("logits", "its head is a Strange")


def test_states_without_a_head_are_an_error(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, "states")
    recorder.write(0, recorder.chosen(numbers(3, 50), lambda: torch.zeros(3, 4)))
    with pytest.raises(RuntimeError, match="its head is quantized"):
        recorder.write_head("its head is quantized")
