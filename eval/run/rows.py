"""The rows of a run: one for each model, with its scores or with the reason why they are missing."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from ...backends.common.errors import CompareQError, InputError, StoppedError
from ...backends.common.message_text import with_class
from ..results import ModelResult, RunResult
from ..stats.temperature import scale_note
from ..text.eval_data import EvalData
from . import checkpoint_notes, reference, token_scores
from .reference import Reference
from .run_config import RunConfig
from .run_model import RunModel
from .slice_masks import slices_of
from .token_scores import StoredScores, Work, of_scores, row_of


class Rows:
    """The rows of a run, and the reference that its models are compared with.

    ``marked``: the model that is the reference, if there is one.  ``recordings``: which numbers of
    the reference each window is compared with (``Reader.recording``), by the windows' digests; all
    models of a run are compared with the same numbers.
    """

    def __init__(self, config: RunConfig, models: Sequence[RunModel], data: EvalData) -> None:
        self.config = config
        self.models = models
        self.data = data
        self.marked = [model for model in models if model.is_reference]
        self.others = [model for model in models if not model.is_reference]
        self.rows: dict[str, ModelResult] = {}
        self.reference: Reference | None = None
        self.recordings: Mapping[str, str] = {}
        self.reference_scores: StoredScores | None = None
        self.cleared: set[str] = (
            set()
        )  # keys of scores that this run has deleted (``-cc``); two models may share one
        self.lock = threading.Lock()  # rows are added by the main thread, failures by any thread

    def title_of(self, model: RunModel) -> str:
        """Return the label of a model with its number in the run, for titles."""
        if len(self.models) == 1:
            return model.label
        labels = [each.label for each in self.marked + self.others]
        return f"{model.label} (model {labels.index(model.label) + 1} of {len(labels)})"

    def add(
        self,
        work: Work,
        stored: StoredScores,
        *,
        from_cache: bool,
        recordings: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Add the row of a model whose scores are complete.

        ``from_cache``: an earlier run has made the scores.  ``recordings``: which of the
        reference's numbers each window was compared with before the reference was scored.
        """
        try:
            row = of_scores(
                work, stored, self.data, has_reference=bool(self.marked), from_cache=from_cache
            )
            row = row.updated(
                slices=slices_of(stored, self.data, is_reference=work.model.is_reference)
            )
            marked = self.marked[0] if self.marked else None
            of_files = checkpoint_notes.notes(row, work.model, marked, self.data.tokenizer)
            row = row.updated(notes=(*row.notes, *self.scale_notes(stored), *of_files))
        except Exception as error:
            self.fail(work.model, error)
            return
        if work.store is not None and not work.unkept:
            self.reference = work.store
            self.recordings = {**recordings, **work.store.recordings(self.data.digests)}
        if work.model.is_reference:
            self.reference_scores = stored
        self.put(row)

    def scale_notes(self, stored: StoredScores) -> list[str]:
        """Return a note if a server's scores, which have no KLD, look like the reference's at
        another temperature.
        """
        if self.reference_scores is None or "kld" in stored.columns:
            return []
        note = scale_note(self.reference_scores.columns, stored.columns["logprob"])
        return [note] if note else []

    def fail(self, model: RunModel, error: Exception) -> None:
        """Add a row with the error, so that one failure does not affect the other rows.

        InputError, which ends the run, if the reference is a pack: no other row can be compared
        without the reference.
        """
        reason = str(error) if isinstance(error, CompareQError) else with_class(error)
        if model.is_reference and model.files.is_store and not isinstance(error, StoppedError):
            raise InputError(f"{model.label}: {reason}")
        if self.config.verbose and not isinstance(
            error, CompareQError
        ):  # a bug, in compare_q or in an engine
            traceback.print_exception(error)
        self.config.progress.say(f"{model.label}: failed")
        self.put(row_of(model, error=reason))

    def put(self, row: ModelResult) -> None:
        """Add a row and report it."""
        with self.lock:
            self.rows[row.label] = row
            self.config.on_row(row)

    def result(self) -> RunResult:
        """Return the results of the run, in the order of the models; a model without a row was not
        finished.
        """
        rows = []
        for model in self.models:
            row = self.rows.get(model.label)
            rows.append(row or row_of(model, error=str(StoppedError())))
        facts = None
        if self.reference is not None:
            facts = reference.as_json(self.reference, self.data)
        return RunResult(
            data=self.data.as_json(),
            subtitle=self.data.subtitle,
            models=tuple(rows),
            reference=facts,
        )


def read(rows: Rows, work: Work, *, delete_damaged: bool = False) -> token_scores.Lookup:
    """Look up a model's scores of the run's windows; with its claim, damaged files are deleted and
    reported.
    """
    progress = rows.config.progress if delete_damaged else None
    return token_scores.look_up(
        rows.config.cache, work.key, work.tag, rows.data, rows.recordings, progress
    )
