"""The memory that scoring a toy's window takes, in a separate process: ``python -m
tests.support.long_window ...``.

The window is recorded as a reference and compared with it by one thread, in chunks much smaller
than compare_q's own, so that a small model behaves like a large one.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from compare_q import backends
from compare_q.backends import logits_engine
from compare_q.backends.base import ScoreRequest, Window
from compare_q.backends.hf import transformers_engine as hf
from compare_q.backends.logits_engine import LogitsEngine
from compare_q.backends.reference import comparison, store
from tests.support import ROOT
from tests.support.toy import planned

VOCAB, SHORT, LONG = 16_384, 512, 4_096
LOGITS = (LONG - SHORT) * VOCAB * 4
"""Additional bytes of the long window's logits, compared with the short window: 235 MB in float32.
"""


def growth(load_fn: str, model: Path) -> int:
    """Return the difference in peak memory (bytes) between a process with the long window and one
    with the short.
    """
    command = [sys.executable, "-m", __name__, load_fn, str(model)]
    short, long = (
        int(
            subprocess.run(
                [*command, str(length)], stdout=subprocess.PIPE, check=True, cwd=ROOT, text=True
            ).stdout
        )
        for length in (SHORT, LONG)
    )
    return long - short


def main(load_fn: str, model: str, tokens: str) -> None:
    logits_engine.PIECE_ELEMENTS = hf.PIECE_ELEMENTS = comparison.CHUNK_ELEMENTS = 1 << 21
    comparison.PIECE_BYTES, comparison.AHEAD_BYTES = 1 << 22, 1 << 23
    torch.set_num_threads(1)
    engine_class, length = backends.resolve(load_fn, None)[1], int(tokens)
    options: dict[str, Any] = {"dtype": "float32"} if load_fn == "transformers" else {}
    engine = engine_class(planned("toy", load_fn, model, length, options))
    assert isinstance(engine, LogitsEngine)
    engine.load()
    window = Window.scored_from(
        0, np.random.default_rng(0).integers(0, VOCAB, length).astype(np.int32)
    )
    with tempfile.TemporaryDirectory() as name:
        list(engine.score([window], ScoreRequest(record=Path(name))))
        store.seal(Path(name), {}, [window.digest])
        (scores,) = engine.score([window], ScoreRequest(reference=Path(name)))
    assert scores.kld is not None
    assert np.abs(scores.kld).max() < 1e-6
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    print(int(peak[1]) * 1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
