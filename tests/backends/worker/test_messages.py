"""Commands, messages and windows between driver and worker arrive unchanged."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import Decode, ScoreRequest
from compare_q.backends.common import storage
from compare_q.backends.worker import protocol
from tests.support import ROOT
from tests.support.scores import random_windows
from tests.support.toy import planned

REQUEST = planned(
    'Q4 "\n\u2028ü',
    "vllm_score",
    "/models/q4",
    2048,
    {"nested": {"a": [1, 0.1, None, True]}, "ü": "\t"},
    (Path("a.safetensors"), Path("b.safetensors")),
    revision="main",
    stamp='["stamp", 0.1]',
    log_file=Path("/log"),
    decode=Decode(2, 8),
)
SCORE = protocol.ScoreCommand(
    ScoreRequest(reference=Path("/store"), vocab_size=320),
    Path("/windows.npz"),
    Path("/scores"),
    "0123456789abcdef",
    "session",
    {"known": {"gpus": ["NVIDIA H200"]}, "reference": None},
)


@pytest.mark.parametrize(
    ("parse", "sent"),
    [
        (protocol.parse_command, SCORE),
        (
            protocol.parse_command,
            replace(SCORE, request=ScoreRequest(record=Path("/record")), facts={}),
        ),
        (protocol.parse_command, protocol.LoadCommand(REQUEST, ("0", "MIG-1"), (0, 2))),
        (protocol.parse_command, protocol.LoadCommand(REQUEST)),
        (protocol.parse_command, protocol.InspectEngine(planned("fake", "fake", "none", 100))),
        (
            protocol.parse_command,
            protocol.CallCommand("module:function", {"words": ["\u2028", "\ud800"]}),
        ),
        (protocol.parse_command, protocol.SampleCommand([[1, 2], [3, 4]], 5, 2**40)),
        (protocol.parse_message, protocol.Progress(3)),
        (protocol.parse_message, protocol.Progress(total=16, phase="tokenizing", unit="bytes")),
        (protocol.parse_message, protocol.Log("a\nb \u2028")),
        (protocol.parse_message, protocol.Done(["\ud800", None])),
        (protocol.parse_message, protocol.Failed("out of memory\nof two lines")),
        (protocol.parse_message, protocol.Failed(status=-11)),
    ],
    ids=lambda each: getattr(each, "type", ""),
)
def test_commands_and_messages_come_back(parse: Any, sent: Any) -> None:
    assert parse(protocol.encoded(sent)) == sent


@pytest.mark.parametrize("count", [0, 1, 30])
def test_windows_come_back(tmp_path: Path, count: int) -> None:
    """Windows keep their order, numbers and scored positions, and whether they are single.

    Every second one has the sampler's log-probabilities.
    """
    windows = []
    for window in random_windows(count):
        is_single = window.index % 3 == 0
        logprobs = None
        if window.index % 2 == 0:
            logprobs = -np.arange(1, window.n_scored + 1, dtype=np.float32) - window.index
        changes = {"index": 3 * window.index, "is_single": is_single}
        windows.append(replace(window, **changes, sampler_logprobs=logprobs))
    windows.reverse()
    file = tmp_path / "windows.npz"
    protocol.write_windows(file, windows)
    copies = protocol.read_windows(file)
    for copy, window in zip(copies, windows, strict=True):
        assert copy.index == window.index
        assert copy.spans == window.spans
        assert copy.is_single == window.is_single
        np.testing.assert_array_equal(copy.token_ids, window.token_ids, strict=True)
        assert copy.digest == window.digest
        if window.sampler_logprobs is None:
            assert copy.sampler_logprobs is None
        else:
            np.testing.assert_array_equal(
                copy.sampler_logprobs, window.sampler_logprobs, strict=True
            )


def test_windows_hold_no_pickle(tmp_path: Path) -> None:
    file = tmp_path / "windows.npz"
    # NumPy pickles arrays of objects, and unpickling can run any code.
    storage.write_arrays(file, ids=np.array([{}], object), shapes="[]")
    with pytest.raises(ValueError, match="allow_pickle"):
        protocol.read_windows(file)


FORKED = """
import os
from multiprocessing import Pipe
from compare_q.backends.worker import worker
ours, theirs = Pipe()
ours.send_bytes(b"")
worker.serve(theirs, 0.0)
child = os.fork()
if child == 0:
    print("closed" if theirs.closed else "open", flush=True)
    os._exit(0)
os.waitpid(child, 0)
print("closed" if theirs.closed else "open")
"""


def test_a_fork_of_a_worker_does_not_keep_its_channel_open() -> None:
    """vLLM's ranks are such forks: the driver would not notice the worker's end."""
    ran = subprocess.run(
        [sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert ran.stdout.split() == ["closed", "open"]
