"""Scoring of one model of a run: what is missing of its scores is scored by its workers.

model = downloads.result(model)             on this machine, with the fingerprint of its files
look up its scores                          complete: no lock, no GPU, no worker
claim the missing windows                   waits for another run that scores one of them
look up again, take GPUs, load, score       committed every two seconds, so that a kill loses little
look up the complete scores                 the main thread makes the row of them
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace

from ...backends.common.errors import CompareQError, InputError, ModelError
from ...backends.scoring import segments
from ..common.cache import Cache
from ..text.eval_data import EvalData
from . import plan, reference
from .claims import claimed, short_lock
from .model_workers import Replicas
from .reference import Reference
from .rows import Rows, read
from .run_config import RunConfig
from .run_model import RunModel
from .token_scores import StoredScores, Work

TAG_DIGITS = 16


@dataclass(frozen=True)
class Scored:
    """Result of a model's thread: its complete scores, or the error that its row shows."""

    model: RunModel
    work: Work | None = None
    stored: StoredScores | None = None
    from_cache: bool = False  # an earlier run has made the scores
    recordings: Mapping[str, str] = field(
        default_factory=dict
    )  # of the reference: what its windows are compared with
    error: Exception | None = None


class Downloads:
    """Downloads and fingerprints the models of a run in their order, one model ahead of those that
    score.
    """

    def __init__(self, rows: Rows, loader: Executor) -> None:
        self.config = rows.config
        self.loader = loader
        self.lock = threading.Lock()
        self.models = iter(rows.marked + rows.others)
        self.begun: dict[str, Future[RunModel]] = {}

    def result(self, model: RunModel) -> RunModel:
        """Return a model that is on this machine, and start with the next one; InputError or
        ModelError.
        """
        with self.lock:
            for ahead in self.models:
                is_ahead = model.label in self.begun
                self.begun[ahead.label] = self.loader.submit(plan.fetched, self.config, ahead)
                if is_ahead:
                    break
        return self.begun[model.label].result()


def score_model(rows: Rows, planned: RunModel, downloads: Downloads) -> Scored:
    """Return the scores of one model, or the error of its row.

    Everything is acquired in one order: this thread, the claims, GPUs.  A model that has GPUs waits
    only for its engine, so that two runs never wait for each other.  InputError, which ends the run
    before any model loads, if the store of a reference is another reference's, or damaged.
    """
    config = rows.config
    try:
        model = downloads.result(planned)
        if not plan.is_known(planned):
            plan.raise_all(plan.vocabulary_problems(model, rows.data))
        work = work_of(rows, model)
    except Exception as error:
        return Scored(planned, error=error)
    config.cache.use("scores", work.key, temporary=is_temporary(config, model))
    note_other_rope(rows, work)
    if model.is_reference:
        return score_reference(rows, work)
    return score_work(rows, work, frozenset())


def score_reference(rows: Rows, work: Work) -> Scored:
    """Return the scores of the reference, after its store has the windows that other models need."""
    work.store = reference.of_model(rows.config, work.model, rows.data)
    rows.config.check_reference(work.store.content, rows.data)
    rows.config.cache.use(
        "references", work.store.key, temporary=is_temporary(rows.config, work.model)
    )
    recordings = agreed_recordings(rows, work.store)
    required = required_windows(rows, work.store, recordings)
    return replace(score_work(rows, work, required), recordings=recordings)


def is_temporary(config: RunConfig, model: RunModel) -> bool:
    """Return True if no later run uses the scores of a model in this run: each pass of a gate has
    its own key.
    """
    return config.is_temporary and model.spec.repeat is not None


def score_work(rows: Rows, work: Work, required: frozenset[str]) -> Scored:
    """Return the scores of a model; ``required``: windows that its store must have, if it is the
    reference.
    """
    if not rows.config.clear and not required:
        # Complete scores need no claim: another run may hold one while it scores for hours.
        scored = read_or_error(rows, work)
        if scored is not None:
            return scored
    try:
        return score_missing(rows, work, required)
    except ModelError as error:  # of scores in the cache that do not belong together
        return Scored(work.model, error=error)


def work_of(rows: Rows, model: RunModel) -> Work:
    """Return the key and the tag of a model's scores; InputError if its files are damaged."""
    key = Cache.key("scores", plan.identity(rows.config, model))
    return Work(model, key, tag_of(model, rows.reference), rows.reference)


def tag_of(model: RunModel, against: Reference | None) -> str:
    """Return the tag of a model's scores: the reference's key, or ``ALONE`` for scores without a
    reference.
    """
    if against is None or model.is_reference or not model.capabilities.compares:
        return segments.ALONE
    return against.key[:TAG_DIGITS]


def read_or_error(rows: Rows, work: Work, *, from_cache: bool = True) -> Scored | None:
    """Return complete scores, or the error of reading them; None if windows are missing."""
    try:
        lookup = read(rows, work)
    except Exception as error:
        return Scored(work.model, error=error)
    if lookup.stored is None:
        return None
    return Scored(work.model, work, lookup.stored, from_cache)


def score_missing(rows: Rows, work: Work, required: frozenset[str]) -> Scored:
    """Score the missing windows of a model, and record those that its store must have
    (``required``).
    """
    config = rows.config
    wanted = rows.data.digests
    if not config.clear:
        wanted = read(rows, work).missing | lacking_in_store(work.store, required)
    while True:
        with claims(rows, work, wanted, required):
            if config.clear and work.key not in rows.cleared:
                forget(rows, work)
            if required and work.store is not None and work.store.exists and not work.store.is_pack:
                reference.verify(config, work.store, required)
            to_record = lacking_in_store(work.store, required)
            if to_record:
                config.cache.check_writable()
            lookup = read(rows, work, delete_damaged=True)
            if lookup.missing | to_record <= wanted:
                forget_outdated(rows, work, lookup.missing)
                return score_claimed(rows, work, lookup.missing, to_record)
        wanted = (
            lookup.missing | to_record
        )  # a damaged file was found, or another run has forgotten windows


def score_claimed(
    rows: Rows, work: Work, missing: frozenset[str], to_record: frozenset[str]
) -> Scored:
    """Score windows that this run has claimed; return the complete scores, or the error of the
    model's row.
    """
    config = rows.config
    try:
        if missing or to_record:
            count = max(work.model.n_gpus, 1) * work.model.replicas
            with (
                config.gpus.take(count, config.workers.check) as gpus,
                closing(Replicas(rows, work, gpus)) as replicas,
            ):
                replicas.score(missing, to_record)
        scored = read_or_error(rows, work, from_cache=not (missing or to_record))
        if scored is None:
            raise ModelError(
                f"{config.cache.path('scores', work.key, '')}: vanished during the run"
            )
        return scored
    except Exception as error:
        return Scored(work.model, error=error)


@contextmanager
def claims(
    rows: Rows, work: Work, wanted: frozenset[str], required: frozenset[str]
) -> Iterator[None]:
    """Claim windows of the model's scores, then those that its store lacks
    (``eval/run/claims.py``).
    """
    config = rows.config

    def waits() -> None:
        config.progress.say(
            f"{work.model.label}: another run is scoring it; this one waits for that"
        )

    with ExitStack() as held:
        folder = config.cache.path("scores", work.key, "")
        held.enter_context(claimed(config.cache, folder, wanted, config.workers.check, waits))
        to_record = lacking_in_store(work.store, required)
        if config.clear:
            to_record = required
        if work.store is not None and not work.store.is_pack and to_record:
            claim = claimed(config.cache, work.store.path, to_record, config.workers.check, waits)
            held.enter_context(claim)
        yield


def forget_outdated(rows: Rows, work: Work, missing: frozenset[str]) -> None:
    """Delete scores of missing windows that were compared with other numbers of the reference."""
    config = rows.config
    if missing and work.tag != segments.ALONE:
        folder = config.cache.path("scores", work.key, "")
        with short_lock(config.cache, folder, config.workers.check):
            segments.forget_outdated(folder, work.tag, missing, rows.recordings)


def forget(rows: Rows, work: Work) -> None:
    """Delete the cached scores of the run's windows, and their part of the model's store (``-cc``)."""
    config = rows.config
    folder = config.cache.path("scores", work.key, "")
    with short_lock(config.cache, folder, config.workers.check):
        segments.forget(folder, rows.data.digests)
    left = segments.committed(folder, segments.ALONE) & rows.data.digests
    if left:
        raise InputError(f"{folder}: cannot be deleted; are its files yours?")
    if work.store is not None:
        reference.forget(config, work.store, rows.data.digests)
    rows.cleared.add(work.key)


def required_windows(rows: Rows, own: Reference, recordings: Mapping[str, str]) -> frozenset[str]:
    """Return the windows that the reference's store must have: those that a compared model has no
    scores of.

    All windows if the user has named a place for the store, or makes a pack.
    """
    digests = rows.data.digests
    if (
        rows.config.record_all
        or rows.config.logits_file is not None
        or rows.marked[0].out_logits is not None
    ):
        return digests
    required = set[str]()
    for model in rows.others:
        required |= lacking_scores(rows, model, own, recordings)
    return frozenset(required)


def lacking_in_store(own: Reference | None, required: frozenset[str]) -> frozenset[str]:
    """Return those of the required windows that the reference's store does not have."""
    if own is None or not required:
        return frozenset()
    return required - own.windows


def key_of(rows: Rows, model: RunModel) -> str | None:
    """Return the key of a model's scores; None if the model is not on this machine yet, or its
    files are wrong.
    """
    try:
        planned = model.files.cached()
        if planned is None:
            return None
        local_model = replace(model, planned=planned)
        return Cache.key("scores", plan.identity(rows.config, local_model))
    except CompareQError:  # the model's own row reports it
        return None


def lacking_scores(
    rows: Rows, model: RunModel, against: Reference, recordings: Mapping[str, str]
) -> frozenset[str]:
    """Return the windows that a compared model still has to score; all of them if this is not
    known.
    """
    digests = rows.data.digests
    tag = tag_of(model, against)
    if tag == segments.ALONE:
        return frozenset()
    key = key_of(rows, model)
    if rows.config.clear or key is None:
        return digests
    return digests - segments.committed(rows.config.cache.path("scores", key, ""), tag, recordings)


def agreed_recordings(rows: Rows, against: Reference) -> Mapping[str, str]:
    """Return which numbers of the reference each window is compared with in this run.

    The recordings in the store; for windows that are no longer in the store, those that most models
    were compared with.
    """
    digests = rows.data.digests
    counts = defaultdict[str, Counter[str]](Counter)
    for model in rows.others:
        key = key_of(rows, model)
        if key is None:
            continue
        folder = rows.config.cache.path("scores", key, "")
        for window, recordings in segments.recordings(
            folder, tag_of(model, against), digests
        ).items():
            counts[window].update(recordings)
    agreed = {}
    for window, counter in counts.items():
        most = max(counter.values())
        agreed[window] = min(recording for recording, count in counter.items() if count == most)
    agreed.update(against.recordings(digests))
    return agreed


def note_other_rope(rows: Rows, work: Work) -> None:
    """Print a line if the model's windows were scored with the other rotary factors, and are scored
    again.
    """
    config = rows.config
    identity = plan.identity(config, work.model)
    if "long_rope" not in identity:
        return
    other = Cache.key("scores", {**identity, "long_rope": not identity["long_rope"]})
    digests = rows.data.digests
    scored = segments.committed(config.cache.path("scores", other, ""), segments.ALONE) & digests
    if scored - segments.committed(config.cache.path("scores", work.key, ""), segments.ALONE):
        config.progress.say(
            f"{work.model.label}: the longest window of this run changes the model's rotary factors; "
            "windows that were scored with the other factors are scored again"
        )


def use_given_store(config: RunConfig, rows: Rows, data: EvalData) -> None:
    """Make the store that the user named the reference of all models; every byte is checked if a
    model needs it.
    """
    assert config.logits_file is not None
    against = reference.of_store(config.logits_file, data)
    config.cache.use("references", against.key)
    rows.reference = against
    rows.recordings = agreed_recordings(rows, against)
    required = set[str]()
    for model in rows.others:
        required |= lacking_scores(rows, model, against, rows.recordings)
    if required:
        reference.verify(config, against, required)
