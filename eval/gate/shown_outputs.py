"""Run one window of each variant that differs, to find the module where it begins to differ.

The first variant writes what its modules return into a temporary file, about 1.5 GB for an 8B
model.  A copy of it with other roundings, and the variants, compare their modules with the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ...backends.base import ModuleDifference, Window
from ...backends.common import storage
from ...backends.common.errors import CompareQError, StoppedError
from ...backends.module_differences import differences_from_json
from ...backends.worker.protocol import OutputsCommand, write_windows
from ..run import plan, stored_scores
from ..run.loaded_worker import loaded_worker
from ..run.run_config import RunConfig
from ..specs.spec_types import ModelSpec
from ..text.eval_data import EvalData
from .floor import Floor
from .places import NOT_KNOWN, where_in_words
from .variants import PREFILL, Variant
from .verdicts import Row

SHOWN = "outputs"
"""Name of the pass in which a variant shows its outputs."""


@dataclass(frozen=True)
class ShownOutputs:
    """Runs windows and compares outputs; ``max_tokens``: length of the gate's longest window."""

    config: RunConfig
    first: Variant
    max_tokens: int

    def places(self, windows: Sequence[tuple[Variant, Window]]) -> list[str]:
        """Return where each variant begins to differ from the first one in its window, in words.

        It is not known if a variant cannot show its outputs, or if a run fails: a reason is
        returned then, and no error is raised.
        """
        reason = self.why_not(self.first)
        if reason:
            return [f"{NOT_KNOWN}{reason}"] * len(windows)
        # Variants with the same window are compared with the same file.
        distinct = {window.digest: window for _, window in windows}
        with ExitStack() as files:
            file_of_digest: dict[str, Path] = {}
            for digest in distinct:
                file_of_digest[digest] = files.enter_context(self.config.cache.scratch())
            try:
                roundings = self.roundings(distinct, file_of_digest)
            except StoppedError:
                raise
            except CompareQError as error:
                return [f"{NOT_KNOWN}{error}"] * len(windows)
            words = []
            for variant, window in windows:
                file = file_of_digest[window.digest]
                words.append(self.place(variant, window, file, roundings[window.digest]))
        return words

    def roundings(
        self, windows: Mapping[str, Window], files: Mapping[str, Path]
    ) -> dict[str, list[ModuleDifference]]:
        """Write the files of the first variant; return the differences of its copy.

        ``windows`` and ``files``: by the windows' digests.
        """
        window_list = list(windows.values())
        file_list = [files[digest] for digest in windows]
        self.run(self.eager_spec(self.first), window_list, file_list, compare=False)
        copy = self.first.copy_with_noise(1)
        differences = self.run(copy, window_list, file_list, compare=True)
        return dict(zip(windows, differences, strict=True))

    def place(
        self, variant: Variant, window: Window, file: Path, roundings: Sequence[ModuleDifference]
    ) -> str:
        """Return where one variant begins to differ."""
        reason = self.why_not(variant)
        if reason:
            return f"{NOT_KNOWN}{reason}"
        try:
            (differences,) = self.run(self.eager_spec(variant), [window], [file], compare=True)
        except StoppedError:
            raise
        except CompareQError as error:
            return f"{NOT_KNOWN}{error}"
        same_engine = variant.engine == self.first.engine
        return where_in_words(differences, roundings, same_engine=same_engine)

    def why_not(self, variant: Variant) -> str:
        """Return why a variant cannot show its outputs; "" if it can."""
        if not variant.capabilities.outputs:
            return f"{variant.spec.load_fn} does not show its layers"
        if not self.config.workers.is_local:
            return "models run on other machines"
        return ""

    def eager_spec(self, variant: Variant) -> ModelSpec:
        """Return the spec of a variant without compilation: compiled graphs run no hooks."""
        return variant.copied(SHOWN, variant.capabilities.eager)

    def run(
        self, spec: ModelSpec, windows: Sequence[Window], files: Sequence[Path], *, compare: bool
    ) -> list[list[ModuleDifference]]:
        """Load a model and run windows; return the differences of each from its file.

        Without ``compare``, the files are written.
        """
        config = self.config
        (model,) = plan.plan_models(config, [spec], self.max_tokens)
        model = plan.fetched(config, model)
        key = config.cache.key("logs", {"repeat": spec.repeat})
        title = f"outputs of {model.label}"
        with (
            config.cache.scratch() as window_file,
            loaded_worker(config, model, key, model.label) as worker,
            config.progress.phase(title, unit="windows", total=len(windows)) as phase,
        ):
            with storage.keeping("the windows of a run", window_file.parent):
                write_windows(window_file, windows)
            command = OutputsCommand(window_file, list(files), compare)
            answers = worker.perform(command, config.window_timeout_s, phase.show)
        return [differences_from_json(answer) for answer in answers]


def worst_row(rows: Sequence[Row], floors: Mapping[str, Floor]) -> Row | None:
    """Return the row in prefill that is the furthest above its floor.

    None if the variant differs only in decode.  ``rows``: of a variant that differs.
    """
    prefill_rows = []
    is_above_in_prefill = False
    is_above_in_decode = False
    for row in rows:
        is_above = bool(row.model.kld_non_finite) or row.kld > floors[row.text].limit
        if row.pass_name == PREFILL and row.tokens is not None:
            prefill_rows.append(row)
            is_above_in_prefill = is_above_in_prefill or is_above
        else:
            is_above_in_decode = is_above_in_decode or is_above
    if not prefill_rows or (is_above_in_decode and not is_above_in_prefill):
        return None
    return max(
        prefill_rows,
        key=lambda row: (row.model.kld_non_finite, row.kld / (floors[row.text].limit or 1.0)),
    )


def worst_window(config: RunConfig, row: Row, data: EvalData) -> Window:
    """Return the window of a row with the largest mean KLD, or with one that is not finite.

    ``data``: the windows of the row's text.
    """
    scores = stored_scores.scores_of_row(config.cache, row.model.scores_key, data)
    # A variant that differs has scores.
    assert scores is not None
    klds = scores.columns["kld"].astype(np.float64)
    klds = np.where(np.isfinite(klds), klds, np.inf)
    sums = np.bincount(scores.window, weights=klds, minlength=len(data.windows))
    counts = np.bincount(scores.window, minlength=len(data.windows))
    means = sums / np.maximum(counts, 1)
    return data.windows[int(np.argmax(means))]
