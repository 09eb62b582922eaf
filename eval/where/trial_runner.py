"""Score trials in a worker that has both models loaded; scores that the cache has are not repeated.

The worker starts when the first score or the modules are missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...backends.base import Layer, QuantizedModule, Trial, TrialScore, Window
from ...backends.common import storage
from ...backends.common.errors import ModelError
from ...backends.common.message_text import amount
from ...backends.layers import groups
from ...backends.worker import trial_scores
from ...backends.worker.protocol import (
    ReferenceCommand,
    TrialsCommand,
    write_windows,
)
from ...backends.worker.trial_scores import Place
from ..common.progress import Phase
from ..run.loaded_worker import loaded_worker
from ..run.run_config import RunConfig
from ..run.run_model import RunModel
from ..run.workers import Worker
from . import trial_file
from .results import Module
from .trial_file import Facts


class TrialRunner:
    """Scores trials of two models, which are on this machine.

    ``file``: the file of their scores; ``key``: its key; ``resources``: ends the worker, and gives
    its GPUs back.
    """

    def __init__(
        self,
        config: RunConfig,
        reference: RunModel,
        quantized: RunModel,
        file: Path,
        key: str,
        resources: ExitStack,
    ) -> None:
        self.config = config
        self.reference = reference
        self.quantized = quantized
        self.file = file
        self.key = key
        self.resources = resources
        self.worker: Worker | None = None
        self.phase: Phase | None = None
        self.expected = 0
        self.scores = trial_scores.read(file)

    def facts(self) -> Facts:
        """Return the facts about the two models, from the file or from the worker."""
        facts = trial_file.facts_in(self.file)
        if facts is None:
            self.started_worker()
            facts = trial_file.facts_in(self.file)
        assert facts is not None
        return facts

    def score_of(self, trial: Trial, window: Window) -> TrialScore:
        """Return the score of a trial in a window; KeyError if it was not scored."""
        return self.scores[Place(trial.digest, window.digest)]

    def missing(
        self, trials: Sequence[Trial], windows: Sequence[Window]
    ) -> dict[tuple[Trial, ...], list[Window]]:
        """Return the trials without a score -> the windows in which exactly these have none."""
        distinct = {window.digest: window for window in windows}
        missing: dict[tuple[Trial, ...], list[Window]] = {}
        for window in distinct.values():
            unscored = []
            for trial in trials:
                if Place(trial.digest, window.digest) not in self.scores:
                    unscored.append(trial)
            if unscored:
                missing.setdefault(tuple(unscored), []).append(window)
        return missing

    def n_missing(self, trials: Sequence[Trial], windows: Sequence[Window]) -> int:
        """Return how many scores of these trials in these windows are missing."""
        count = 0
        for unscored, unscored_windows in self.missing(trials, windows).items():
            count += len(unscored) * len(unscored_windows)
        return count

    def expect(self, n_missing: int) -> None:
        """Note how many scores are missing at most from now on, for the progress."""
        self.expected = n_missing
        if self.phase is not None:
            self.phase.expect(self.phase.done + n_missing)

    def score(self, trials: Sequence[Trial], windows: Sequence[Window]) -> None:
        """Score what is missing; ModelError if that fails."""
        for unscored, unscored_windows in self.missing(trials, windows).items():
            worker = self.started_worker()
            phase = self.started_phase()
            with self.config.cache.scratch() as file:
                with storage.keeping("the windows of a run", file.parent):
                    write_windows(file, unscored_windows)
                command = TrialsCommand(list(unscored), file, self.file)
                with naming(self.label):
                    answer = worker.perform(command, self.config.window_timeout_s, phase.show)
            self.note_what_ran(answer)
        self.scores = trial_scores.read(self.file)
        count = self.n_missing(trials, windows)
        if count:
            raise ModelError(f"{self.label}: {amount(count, 'trial')} got no score")

    def started_phase(self) -> Phase:
        """Return the progress of all scoring, which begins with the first missing score."""
        if self.phase is None:
            title = f"scoring parts of {self.quantized.label}"
            phase = self.config.progress.phase(title, unit="trials", total=self.expected)
            self.phase = self.resources.enter_context(phase)
        return self.phase

    def note_what_ran(self, provenance: Mapping[str, Any]) -> None:
        """Add how the layers ran to the facts; ``provenance``: the value of ``TrialsCommand``."""
        facts = self.facts()
        if facts.activations:
            return
        layers = groups.groups_from_json(provenance.get("layers", ()))
        lines = activation_lines(layers)
        notes = tuple(str(note) for note in provenance.get("notes", ()))
        trial_file.write_facts(self.file, facts.updated(activations=tuple(lines), notes=notes))

    @property
    def label(self) -> str:
        """The labels of both models."""
        return f"{self.quantized.label} and {self.reference.label}"

    def started_worker(self) -> Worker:
        """Return the worker that has both models loaded; start it if there is none.

        Writes the facts about the models to the file.
        """
        if self.worker is not None:
            return self.worker
        config = self.config
        config.cache.check_writable()
        n_gpus = max(self.quantized.n_gpus, self.reference.n_gpus)
        label = self.quantized.label
        with naming(label):
            worker = self.resources.enter_context(
                loaded_worker(config, self.quantized, self.key, label, n_gpus)
            )
        label = self.reference.label
        with naming(label), config.progress.phase(f"loading {label}") as phase:
            command = ReferenceCommand(self.reference.planned)
            modules = worker.perform(command, config.load_timeout_s, phase.show)
        self.worker = worker
        if trial_file.facts_in(self.file) is None:
            trial_file.write_facts(self.file, self.facts_from(modules))
        return worker

    def facts_from(self, answer: Sequence[dict[str, Any]]) -> Facts:
        """Return the facts in the worker's answer to ``ReferenceCommand``.

        ModelError without modules: the weights of both models are the same.
        """
        modules = [QuantizedModule(**fields) for fields in answer]
        if not modules:
            raise ModelError(
                f"{self.label}: no weights differ, so that no part can have a share; is the second "
                "model the quantized one?"
            )
        return Facts(
            label=f"{self.quantized.label}, {self.reference.label}",
            modules=tuple(Module.of(module) for module in modules),
        )


@contextmanager
def naming(label: str) -> Iterator[None]:
    """Run the block, and put the label before the message of its ModelError."""
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{label}: {error}") from None


def activation_lines(layers: Sequence[Layer]) -> list[str]:
    """Return a line for each pair of weights and activations of the layers that ran.

    Unquantized weights are left out.  A line names the activations of the checkpoint's scheme if
    others ran.
    """
    lines: dict[str, None] = {}
    for layer in layers:
        if layer.weights in groups.UNQUANTIZED_FORMATS:
            continue
        line = f"{layer.activations} with {layer.weights} weights"
        if layer.asked:
            line += f", although the checkpoint requests {layer.asked}"
        lines[line] = None
    return list(lines)
