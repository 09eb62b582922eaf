"""The scores of one model: their key, and what they are compared with.

The key of scores depends on the model, its engine and its hardware (``model_identity``).  The tag
names the reference that they are compared with.  A reference must record the windows that a
compared model has no scores of (``required_windows``).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from ...backends.common.errors import CompareQError
from ...backends.scoring import segments
from ..common.cache import Cache
from . import model_identity, reference
from .reference import Reference, RunReference, reference_of_model, reference_of_store
from .run_config import RunConfig
from .run_model import RunModel
from .run_scoring import Scoring

TAG_DIGITS = 16


@dataclass(frozen=True)
class ScoreTarget:
    """The scores of one model: where they are, and what they depend on, except the windows."""

    model: RunModel
    # Of the folder of scores, as ``tag`` (``backends/scoring/segments.py``).
    key: str
    tag: str
    folder: Path
    # What the model is compared with; None for the reference, and in a run without one.
    reference: RunReference | None
    # The reference that the model is.
    store: Reference | None = None
    # Windows (digests) that its store must have.
    required: frozenset[str] = frozenset()
    # If it is the reference: the recordings that compared models agree on.
    agreed_recordings: Mapping[str, str] = field(default_factory=dict)

    @property
    def recordings(self) -> Mapping[str, str]:
        """Which numbers of the reference each window is compared with, by digest."""
        if self.reference is None:
            return {}
        return self.reference.recordings

    @property
    def unrecorded(self) -> frozenset[str]:
        """The required windows that its store does not have now."""
        if self.store is None or not self.required:
            return frozenset()
        return self.required - self.store.windows


def target_of(scoring: Scoring, model: RunModel, run_reference: RunReference | None) -> ScoreTarget:
    """Return the key and the tag of a model's scores; InputError if its files are damaged."""
    key = Cache.key("scores", model_identity.identity(scoring.config, model))
    store = None
    if run_reference is not None:
        store = run_reference.store
    tag = tag_of(model, store)
    folder = scoring.config.cache.path("scores", key, "")
    return ScoreTarget(model, key, tag, folder, run_reference)


def tag_of(model: RunModel, store: Reference | None) -> str:
    """Return the tag of a model's scores: the reference's key, or ``ALONE`` without a reference."""
    if store is None or model.is_reference or not model.capabilities.compares:
        return segments.ALONE
    return store.key[:TAG_DIGITS]


def is_temporary(config: RunConfig, model: RunModel) -> bool:
    """Return True if no later run uses the scores of a model in this run.

    Only a gate sets ``repeat`` in a spec, to the name of a pass; it is part of the scores' key.
    """
    return config.is_temporary and model.spec.repeat is not None


def note_use(scoring: Scoring, target: ScoreTarget) -> None:
    """Mark the scores as used, so that no run deletes them, and note changed rotary factors."""
    config = scoring.config
    config.cache.use("scores", target.key, temporary=is_temporary(config, target.model))
    note_changed_rotary_factors(scoring, target)


def note_changed_rotary_factors(scoring: Scoring, target: ScoreTarget) -> None:
    """Print a line if windows that were scored with the other rotary factors are scored again.

    Some models have two sets of factors: those for long windows are used if the longest window of
    the run exceeds a limit of the model.  Which set was used (``long_rope``) is part of the scores'
    key.
    """
    config = scoring.config
    identity = model_identity.identity(config, target.model)
    if "long_rope" not in identity:
        return
    other_identity = {**identity, "long_rope": not identity["long_rope"]}
    other_folder = config.cache.path("scores", Cache.key("scores", other_identity), "")
    # With ``ALONE``, windows count whether or not they were compared with a reference.
    scored_otherwise = segments.committed(other_folder, segments.ALONE) & scoring.data.digests
    scored_already = segments.committed(target.folder, segments.ALONE)
    if scored_otherwise - scored_already:
        config.progress.say(
            f"{target.model.label}: the longest window of this run changes the model's rotary "
            "factors; windows that were scored with the other factors are scored again"
        )


def with_store(scoring: Scoring, target: ScoreTarget) -> ScoreTarget:
    """Return the target of the reference with its store and the windows that it must record.

    InputError, which ends the run before any model loads, if the store is another reference's.
    """
    config = scoring.config
    store = reference_of_model(config, target.model, scoring.data)
    config.check_reference(store.content, scoring.data)
    config.cache.use("references", store.key, temporary=is_temporary(config, target.model))
    recordings = agreed_recordings(scoring, store)
    # Decided once, before any claim: other scores may change while this model waits.
    required = required_windows(scoring, store, recordings)
    return replace(target, store=store, required=required, agreed_recordings=recordings)


def store_of_user(scoring: Scoring, path: Path) -> RunReference:
    """Return the reference of a run whose store the user named (``--logits_file``).

    Every byte is checked if a model needs it; InputError.
    """
    config = scoring.config
    store = reference_of_store(path, scoring.data)
    config.cache.use("references", store.key)
    recordings = agreed_recordings(scoring, store)
    required = windows_of_compared_models(scoring, store, recordings)
    if required:
        reference.verify(config, store, required)
    return RunReference(store, recordings)


def required_windows(
    scoring: Scoring, store: Reference, recordings: Mapping[str, str]
) -> frozenset[str]:
    """Return the windows that the reference's store must have.

    Those that a compared model has no scores of.  All windows if the user has named a place for the
    store, or makes a pack.
    """
    config = scoring.config
    has_place = config.logits_file is not None or scoring.reference_models[0].out_logits is not None
    if config.record_all or has_place:
        return scoring.data.digests
    return windows_of_compared_models(scoring, store, recordings)


def windows_of_compared_models(
    scoring: Scoring, store: Reference, recordings: Mapping[str, str]
) -> frozenset[str]:
    """Return the windows that at least one compared model still has to score."""
    required: set[str] = set()
    for model in scoring.compared_models:
        required |= unscored_windows(scoring, model, store, recordings)
    return frozenset(required)


def unscored_windows(
    scoring: Scoring, model: RunModel, store: Reference, recordings: Mapping[str, str]
) -> frozenset[str]:
    """Return the windows that a compared model still has to score; all if this is not known."""
    digests = scoring.data.digests
    tag = tag_of(model, store)
    if tag == segments.ALONE:
        return frozenset()
    key = key_without_download(scoring, model)
    if scoring.config.clear or key is None:
        return digests
    folder = scoring.config.cache.path("scores", key, "")
    return digests - segments.committed(folder, tag, recordings)


def key_without_download(scoring: Scoring, model: RunModel) -> str | None:
    """Return the key of a model's scores.

    None if the model is not on this machine yet, or its files are wrong.
    """
    try:
        planned = model.files.cached()
        if planned is None:
            return None
        local_model = replace(model, planned=planned)
        return Cache.key("scores", model_identity.identity(scoring.config, local_model))
    except CompareQError:
        # The model's own row reports it.
        return None


def agreed_recordings(scoring: Scoring, store: Reference) -> Mapping[str, str]:
    """Return which numbers of the reference each window is compared with in this run, by digest.

    The recordings in the store; for windows that are no longer in the store, those that most models
    were compared with.
    """
    digests = scoring.data.digests
    counts = defaultdict[str, Counter[str]](Counter)
    for model in scoring.compared_models:
        key = key_without_download(scoring, model)
        if key is None:
            continue
        folder = scoring.config.cache.path("scores", key, "")
        recordings_of_model = segments.recordings(folder, tag_of(model, store), digests)
        for window, recordings in recordings_of_model.items():
            counts[window].update(recordings)
    agreed = {}
    for window, counter in counts.items():
        highest_count = max(counter.values())
        most_frequent = [
            recording for recording, count in counter.items() if count == highest_count
        ]
        # The smallest of several, so that each run chooses the same one.
        agreed[window] = min(most_frequent)
    agreed.update(store.recordings(digests))
    return agreed
