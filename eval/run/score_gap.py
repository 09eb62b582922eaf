"""The windows that a model lacks, and the claims under which a run scores them.

Inside the claims the gap is looked up again, because another run may have scored some windows, or
deleted some.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

from ...backends.common.errors import InputError
from ...backends.scoring import segments
from . import reference
from .claims import claimed, short_lock
from .run_scoring import Scoring
from .score_target import ScoreTarget
from .stored_scores import Lookup, StoredScores, look_up


class Gap(NamedTuple):
    """The missing scores of a model; windows by their digests."""

    # Of all windows; None if one is missing, or if nothing was looked up.
    scores: StoredScores | None
    # Windows without scores.
    to_score: frozenset[str]
    # Required windows that the store of the reference lacks.
    to_record: frozenset[str]

    @property
    def windows(self) -> frozenset[str]:
        """All windows that the model must compute, which a run claims."""
        return self.to_score | self.to_record


def look_up_target(
    scoring: Scoring, target: ScoreTarget, *, delete_damaged: bool = False
) -> Lookup:
    """Look up a model's scores of the run's windows.

    ``delete_damaged``, under a claim on the windows: damaged files are deleted and reported.
    """
    progress = None
    if delete_damaged:
        progress = scoring.config.progress
    return look_up(
        scoring.config.cache,
        target.key,
        target.tag,
        scoring.data,
        target.recordings,
        progress,
    )


def gap_of(scoring: Scoring, target: ScoreTarget) -> Gap:
    """Return what a model lacks, looked up without a claim.

    With ``-cc`` it lacks everything, and nothing is looked up.
    """
    if scoring.config.clear:
        return Gap(None, scoring.data.digests, target.required)
    lookup = look_up_target(scoring, target)
    return Gap(lookup.scores, lookup.missing, target.unrecorded)


def gap_under_claim(scoring: Scoring, target: ScoreTarget) -> Gap:
    """Return what a model lacks, after what cannot be used was deleted.

    InputError, which ends the run, if a required window of the store is damaged, or if a file
    cannot be deleted or written.
    """
    config = scoring.config
    if config.clear and target.key not in scoring.cleared:
        forget(scoring, target)
    store = target.store
    # The other models are compared with these windows. A pack was verified by its engine's check.
    if target.required and store is not None and store.exists and not store.is_pack:
        reference.verify(config, store, target.required)
    to_record = target.unrecorded
    if to_record:
        config.cache.check_writable()
    lookup = look_up_target(scoring, target, delete_damaged=True)
    return Gap(lookup.scores, lookup.missing, to_record)


@contextmanager
def claims_on(scoring: Scoring, target: ScoreTarget, windows: frozenset[str]) -> Iterator[None]:
    """Claim windows of the model's scores, then those that its store lacks (``claims.py``)."""
    config = scoring.config

    def note_wait() -> None:
        # The models after it need not wait.
        scoring.order.note_start(target.model)
        config.progress.say(
            f"{target.model.label}: another run is scoring it; this one waits for that"
        )

    def claim(folder: Path, windows: frozenset[str]) -> AbstractContextManager[None]:
        return claimed(config.cache, folder, windows, config.workers.check, note_wait)

    with ExitStack() as claims:
        claims.enter_context(claim(target.folder, windows))
        # Only now, because another run may have recorded some of them until here.
        to_record = target.unrecorded
        if config.clear:
            to_record = target.required
        store = target.store
        if store is not None and not store.is_pack and to_record:
            claims.enter_context(claim(store.path, to_record))
        yield


def forget(scoring: Scoring, target: ScoreTarget) -> None:
    """Delete the cached scores of the run's windows, and their part of the model's store (``-cc``).

    InputError, which ends the run, if a file cannot be deleted.
    """
    config = scoring.config
    digests = scoring.data.digests
    with short_lock(config.cache, target.folder, config.workers.check):
        segments.forget(target.folder, digests)
    undeleted = segments.committed(target.folder, segments.ALONE) & digests
    if undeleted:
        raise InputError(f"{target.folder}: cannot be deleted; are its files yours?")
    if target.store is not None:
        reference.forget(config, target.store, digests)
    scoring.cleared.add(target.key)


def forget_outdated(scoring: Scoring, target: ScoreTarget, windows: frozenset[str]) -> None:
    """Delete scores of these windows that were compared with other numbers of the reference."""
    config = scoring.config
    if windows and target.tag != segments.ALONE:
        with short_lock(config.cache, target.folder, config.workers.check):
            segments.forget_outdated(target.folder, target.tag, windows, target.recordings)
