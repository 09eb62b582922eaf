"""A closed-form engine that exchanges modules: every share is known in advance.

Add ``LOCATION`` to ``$COMPARE_Q_ENGINES``.  ``load_fn: "restoring"``; a model with ``losses`` is
quantized, and the one without is its reference.  The KLD of a trial in a window is, at each token,

    sum over quantized modules m of losses[m] * (1 + wobble * z), z normal, of window and module,

and ``joint`` more if all modules that have a loss are quantized.  ``losses`` has names of modules,
or of kinds, and modules without a loss have the KLD 0.  ``whole_layers``: only whole decoder layers
are exchanged, by the losses of their names.  ``nan``: a module whose restoration gives NaN.
``fail``: number of trials before an error, or before the process is killed (``killed``);
``seconds``: of each trial.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import Field

from compare_q.backends.base import (
    Capabilities,
    Engine,
    Layer,
    QuantizedModule,
    Trial,
    TrialScore,
    Window,
)
from compare_q.backends.checkpoint.folder import HuggingFaceFolder
from compare_q.backends.common.errors import ModelError
from tests.support.fake_engine import FakeEngine, FakeOptions
from tests.support.toy import Ran

Where = Callable[..., Ran]
"""The fixture ``where``: flags and options -> the outcome of ``compare-q where``."""
LOCATION = f"{__name__}:RestoringEngine"
LAYERS = 3
KINDS = ("q", "down")
N_WEIGHTS = {"q": 100, "down": 300}
BITS = 4.5
LOSSES = {"q": 0.01, "down": 0.05, "layers.1.mlp.down_proj": 0.2}
"""Losses for tests.  By layer: 0.06, 0.21, 0.06, in all 0.33, and none of lm_head."""
LOG = "RESTORING_LOG"
"""Environment variable with a file that gets a line for each trial in each window."""


class RestoringOptions(FakeOptions, strict=True):
    """The engine's options."""

    losses: dict[str, float] = Field(default_factory=dict)
    wobble: float = 0.0
    joint: float = 0.0
    whole_layers: bool = False
    nan: str = ""
    killed: bool = False


class RestoringEngine(FakeEngine):
    """See the module's docstring."""

    capabilities = Capabilities(
        load_fns=("restoring",),
        fwd_fn="restoring",
        packages=(),
        install="nothing to install",
        summary="closed-form shares of modules, for tests",
        restores=True,
    )
    options_type = RestoringOptions
    files = HuggingFaceFolder

    def modules(self) -> list[QuantizedModule]:
        """Return the modules of the model."""
        modules = []
        for layer in range(LAYERS):
            if self.options.whole_layers:
                modules.append(module(f"layers.{layer}", layer, sum(N_WEIGHTS.values())))
                continue
            modules.append(module(f"layers.{layer}.self_attn.q_proj", layer, N_WEIGHTS["q"]))
            modules.append(module(f"layers.{layer}.mlp.down_proj", layer, N_WEIGHTS["down"]))
        modules.append(module("lm_head", None, 50))
        return modules

    def loss(self, name: str) -> float:
        """Return the KLD that a module causes."""
        kind = name.split(".")[-1].removesuffix("_proj")
        losses: dict[str, float] = self.options.losses
        return losses.get(name, losses.get(kind, 0.0))

    def exchangeable(self, reference: Engine) -> tuple[QuantizedModule, ...]:
        if not self.options.losses:
            return ()
        return tuple(self.modules())

    def kld(self, quantized: set[str], window: Window) -> float:
        """Return the KLD of each token of a window, if these modules are quantized."""
        total = 0.0
        with_loss = {each.name for each in self.modules() if self.loss(each.name)}
        for name in sorted(quantized):
            wobble = 0.0
            if self.options.wobble:
                seed = int(window.digest, 16) + sum(name.encode())
                wobble = self.options.wobble * np.random.default_rng(seed).standard_normal()
            total += self.loss(name) * (1 + wobble)
        if with_loss <= quantized:
            total += self.options.joint
        return total

    def trials(
        self, reference: Engine, windows: Sequence[Window], trials: Sequence[Trial]
    ) -> Iterator[TrialScore]:
        names = {each.name for each in self.modules()}
        for window in windows:
            for number, trial in enumerate(trials):
                self.count()
                time.sleep(self.options.seconds)
                exchanged = set(trial.modules)
                assert exchanged <= names
                quantized = exchanged
                if trial.base == "quantized":
                    quantized = names - exchanged
                kld = self.kld(quantized, window) * window.n_scored
                non_finite = 0
                if self.options.nan in exchanged:
                    non_finite = 2
                note(trial, window)
                yield TrialScore(
                    number, window.index, kld, window.n_scored - non_finite, non_finite
                )

    def count(self) -> None:
        """Fail after the number of trials of the options."""
        options = self.options
        if options.fail is not None and self.windows_done >= options.fail:
            if options.killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ModelError(f"told to fail after {options.fail} trials")
        self.windows_done += 1

    def layers(self) -> tuple[Layer, ...]:
        return (Layer("layers.*.q_proj", "int4 g32", "bfloat16", "dequantized"),)


def module(name: str, layer: int | None, n_weights: int) -> QuantizedModule:
    """Return a module in 4.5 bits, of a reference in 16."""
    return QuantizedModule(name, layer, n_weights, "int4 g32", BITS * n_weights, 16.0 * n_weights)


def note(trial: Trial, window: Window) -> None:
    """Add a line on a trial to the file that ``LOG`` names."""
    file = os.environ.get(LOG)
    if file:
        with Path(file).open("a") as stream:
            stream.write(f"{trial.base} {','.join(trial.modules)} {window.digest}\n")


def scored(file: Path) -> list[str]:
    """Return the lines of the file, and empty it."""
    if not file.exists():
        return []
    lines = file.read_text().splitlines()
    file.unlink()
    return lines


def word(label: str, folder: Path, **options: Any) -> str:
    """Return the word of the command line for a model of this engine."""
    text = f"{label}={folder}@restoring"
    if options:
        pairs = [f"{name}={json.dumps(value)}" for name, value in options.items()]
        text += f":{','.join(pairs)}"
    return text
