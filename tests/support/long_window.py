"""The memory that scoring a toy's window takes, in a separate process.

``python -m tests.support.long_window LOAD_FN MODEL TOKENS`` prints it.  The window is recorded as a
reference and compared with it by one thread, in chunks much smaller than compare_q's own, so that a
small model behaves like a large one.
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

VOCAB = 16_384
SHORT = 512
LONG = 4_096
LOGITS = (LONG - SHORT) * VOCAB * 4
"""Additional bytes of the long window's logits, compared with the short window: 235 MB in float32.
"""


def growth(load_fn: str, model: Path) -> int:
    """Return how many bytes more the peak memory is with the long window than with the short."""
    return peak_memory(load_fn, model, LONG) - peak_memory(load_fn, model, SHORT)


def peak_memory(load_fn: str, model: Path, length: int) -> int:
    """Return the peak memory (bytes) of a process that scores a window of this length."""
    command = [sys.executable, "-m", __name__, load_fn, str(model), str(length)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT, text=True)
    return int(ended.stdout)


def main(load_fn: str, model: str, tokens: str) -> None:
    """Score a window, and print the peak memory of this process."""
    # 2^21 logits are 128 rows of ``VOCAB``.  With compare_q's own limit, 2^28, both windows would
    # be one chunk.
    logits_engine.PIECE_ELEMENTS = 1 << 21
    hf.PIECE_ELEMENTS = 1 << 21
    comparison.CHUNK_ELEMENTS = 1 << 21
    comparison.PIECE_BYTES = 1 << 22
    comparison.AHEAD_BYTES = 1 << 23
    torch.set_num_threads(1)
    engine_class = backends.resolve(load_fn, None)[1]
    length = int(tokens)
    options: dict[str, Any] = {}
    if load_fn == "transformers":
        options["dtype"] = "float32"
    engine = engine_class(planned("toy", load_fn, model, length, options))
    assert isinstance(engine, LogitsEngine)
    engine.load()
    token_ids = np.random.default_rng(0).integers(0, VOCAB, length).astype(np.int32)
    window = Window.scored_from(0, token_ids)
    with tempfile.TemporaryDirectory() as name:
        list(engine.score([window], ScoreRequest(record=Path(name))))
        store.seal(Path(name), {}, [window.digest])
        (scores,) = engine.score([window], ScoreRequest(reference=Path(name)))
    assert scores.kld is not None
    # The model is its own reference.
    assert np.abs(scores.kld).max() < 1e-6
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    print(int(peak[1]) * 1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
