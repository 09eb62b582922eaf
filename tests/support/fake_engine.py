"""A closed-form engine: its perplexity is known in advance, to test the driver without a model.

Set ``$COMPARE_Q_ENGINES`` to ``LOCATION``, so that workers know the engine too.

``load_fn: "fake"``; ``engine`` options: ``nan_windows`` (windows whose first scored position is
NaN), ``seconds`` (per window), ``meet`` (a folder: scoring waits until two models have written
there), ``fail`` (number of windows before it fails), ``noise`` (normal, of ``NOISE``), ``random``
(noise that differs between runs), ``shift`` (of the first logit) and ``kernel`` (changes nothing).
The logits are ``boost`` for the target and 0 for all others, so that log p = boost - ln(exp(boost)
+ V - 1) at every position: with boost 0 the model is uniform, and PPL = V exactly.
"""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np
from pydantic import Field, PositiveInt

from compare_q.backends.base import Capabilities, Layer, PlannedModel, Window
from compare_q.backends.common.engine_options import EngineOptions
from compare_q.backends.common.errors import ModelError
from compare_q.backends.logits_engine import LogitsEngine

if TYPE_CHECKING:
    import pytest
    import torch


LOCATION = f"{__name__}:FakeEngine"
MEETING_SECONDS = 120.0
NOISE = 1e-3


class FakeOptions(EngineOptions, strict=True):
    """The fake engine's ``engine`` object."""

    vocab_size: PositiveInt = 1000
    boost: float = 0.0
    fail: int | None = None
    failure: Literal["error", "memory", "abort", "silence"] = "error"
    seconds: float = Field(0.0, ge=0)
    meet: str | None = None
    nan_windows: list[int] = Field(default_factory=list)
    noise: Literal["bf16"] | None = None
    noise_seed: int = 0
    shift: float = 0.0
    random: float = 0.0
    kernel: str = "closed form"
    dtype: Literal["float32"] = "float32"


class FakeEngine(LogitsEngine):
    """See the module's docstring."""

    capabilities = Capabilities(
        load_fns=("fake",),
        fwd_fn="fake",
        packages=(),
        install="nothing to install",
        summary="closed-form logits: PPL known in advance, for tests",
        decodes=512,
        noise=True,
        arithmetic={"kernel": "closed form"},
    )
    options_type = FakeOptions

    def __init__(self, model: PlannedModel) -> None:
        super().__init__(model)
        self.windows_done = 0

    @classmethod
    def versions(cls) -> dict[str, str]:
        return {}

    def load(self) -> None:
        """Nothing to load."""

    def pieces(self, window: Window) -> Iterator[torch.Tensor]:
        import torch

        options = self.options
        if options.fail is not None and self.windows_done >= options.fail:
            self._fail()
        if options.meet is not None and not self.windows_done:
            _meet(Path(options.meet))
        self.windows_done += 1
        time.sleep(options.seconds)
        logits = torch.zeros(len(window.token_ids), options.vocab_size)
        targets = torch.from_numpy(window.token_ids[1:]).long()
        logits[torch.arange(len(targets)), targets] = options.boost
        logits[:, 0] += options.shift
        if options.noise:
            # By the digest, so that a window has the same noise in every run and order.
            seed = (options.noise_seed, int(window.digest, 16))
            logits += NOISE * normal_numbers(logits, seed)
        if options.random:
            logits += options.random * normal_numbers(logits, None)
        if window.index in options.nan_windows:
            # The logits at a position predict the next token.
            logits[window.spans[0][0] - 1] = float("nan")
        yield logits

    def _fail(self) -> NoReturn:
        import torch

        if self.options.failure == "abort":
            os.abort()
        while self.options.failure == "silence":
            time.sleep(1)
        if self.options.failure == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        raise ModelError(f"told to fail after {self.options.fail} windows")

    def layers(self) -> tuple[Layer, ...]:
        return (Layer("logits", "float32", "float32", "closed form"),)

    def provenance(self) -> dict[str, Any]:
        return {"visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES")}


def normal_numbers(logits: torch.Tensor, seed: tuple[int, int] | None) -> torch.Tensor:
    """Return one normal number per logit; other numbers in each call without a seed."""
    import torch

    numbers = np.random.default_rng(seed).standard_normal(logits.shape, np.float32)
    return torch.from_numpy(numbers)


def windows_asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which each window that is scored from now on adds its number."""
    numbers: list[int] = []
    pieces = FakeEngine.pieces

    def noted(engine: FakeEngine, window: Window) -> Iterator[torch.Tensor]:
        numbers.append(window.index)
        return pieces(engine, window)

    monkeypatch.setattr(FakeEngine, "pieces", noted)
    return numbers


def digests_asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Return a list to which each window scored from now on adds (model's label, digest)."""
    digests: list[tuple[str, str]] = []
    pieces = FakeEngine.pieces

    def noted(engine: FakeEngine, window: Window) -> Iterator[torch.Tensor]:
        digests.append((engine.planned.label, window.digest))
        return pieces(engine, window)

    monkeypatch.setattr(FakeEngine, "pieces", noted)
    return digests


def _meet(folder: Path) -> None:
    """Wait until two processes have written into ``folder``; ModelError if that takes too long."""
    folder.mkdir(exist_ok=True)
    (folder / str(os.getpid())).touch()
    last = time.monotonic() + MEETING_SECONDS
    while len(list(folder.iterdir())) < 2:
        if time.monotonic() > last:
            raise ModelError(f"no other model came to {folder} within {MEETING_SECONDS:.0f} s")
        time.sleep(0.05)


MADE = f"{__name__}:MadeEngine"
IMPORT = "MADE_IMPORT"
LONG_S = 600


class MadeEngine(FakeEngine):
    """A fake engine that misbehaves in real processes.

    Its import does as in ``$MADE_IMPORT``, its load as in its label.
    """

    @classmethod
    def import_engine(cls, *, verbose: bool) -> None:
        super().import_engine(verbose=verbose)
        match os.environ.get(IMPORT):
            case "thread":
                threading.Thread(target=time.sleep, args=(LONG_S,), daemon=True).start()
            case "long":
                made("importing")
                time.sleep(LONG_S)
            case "death":
                os.kill(os.getpid(), signal.SIGSEGV)

    def load(self) -> None:
        match self.planned.label:
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            # As the system does when memory is full.
            case "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            case "huge":
                import torch

                # 4 PiB in float32, more than any machine has.
                torch.empty(1 << 50)
            case "thread":
                # Not a daemon: a normal exit of Python would wait for it.
                threading.Thread(target=time.sleep, args=(LONG_S,)).start()
            case "child":
                child = subprocess.Popen(
                    [sys.executable, "-c", f"import time; time.sleep({LONG_S})"]
                )
                made("child").write_text(str(child.pid))
            # vLLM's queues have such files (psm_*), which a killed worker leaves behind.
            case "queue":
                file = Path(f"/dev/shm/psm_{os.getpid()}")
                file.write_bytes(bytes(mmap.PAGESIZE))
                with file.open("r+b") as stream:
                    self.memory = mmap.mmap(stream.fileno(), 0)
                made("queue").write_text(str(file))


ENDLESS = f"{__name__}:EndlessOutputs"
OUTPUTS = b"outputs of modules"


class EndlessOutputs(FakeEngine):
    """A fake engine that writes ``OUTPUTS`` into the file of its modules, and does not end."""

    capabilities = replace(FakeEngine.capabilities, outputs=True)

    def record_outputs(self, window: Window, file: Path) -> None:
        file.write_bytes(OUTPUTS)
        time.sleep(LONG_S)


def made(name: str) -> Path:
    """Create a file of this name in the cache, and return its path."""
    file = Path(os.environ["COMPARE_Q_CACHE"]) / name
    file.touch()
    return file
