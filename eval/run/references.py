"""A text of a run, and its reference: whose it is, where its store lies, and whether it is the right one and whole.

A store belongs to one text, tokenizer, set of windows, model, engine and version of the recording.  In the cache, and
in a folder that ``out_logits`` names, the store lies under a key of them all; at a path that the user gives, what the
store says of them is checked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compare_q.backends.common.errors import CompareQError, InputError
from compare_q.backends.reference import store as reference_store
from compare_q.backends.reference.store import MANIFEST, Reader, holds_upstreams_logits, is_free, open_reference
from compare_q.backends.scoring import segments
from compare_q.backends.scoring.segments import DIVERGENCES_SUFFIX
from compare_q.eval.common.cache import Cache, Lock, NoLock
from compare_q.eval.results import ModelResult
from compare_q.eval.run import jobs
from compare_q.eval.run.hosts import Job, Session
from compare_q.eval.text.windows import EvalData

TAG_DIGITS = 16
RECORDING_VERSION = 4
"""Version of the recording; a change that moves numbers, or that older code cannot read, raises it.

1: hidden states and one head, or logits in float16 where the head cannot be recomputed.
2: float32 logits less their row's maximum, since float16 has steps of 1/32 at llama.cpp's logits of 38.
3: logits bit for bit in the dtype that the engine gave.
4: files that carry their checksum; stores of the layout before, which are not read, keep their place in the cache.
"""
MEANING = {
    "vocabulary": "was made with another tokenizer",
    "series": "was made of other windows: another text, method, eval_len, eval_stride, warm-up or score_every",
    "model": "was made by another model",
    "engine": "was made by another engine",
    "options": "was made with other engine options",
    "decode": "was made in another phase, or in other steps",
    "versions": "was made by other versions of the engine",
    "hardware": "was made on other hardware",
}


@dataclass(frozen=True)
class Reference:
    """What models are compared with: ``key`` stands for it in the keys of scores, at ``path`` its store will lie.

    ``identity``: everything that the store depends on; ``job``: the model, fetched, that makes a missing store;
    ``divergences``: models are compared with it by the divergences that have to be asked for, too.
    """

    key: str
    path: Path
    label: str
    identity: Mapping[str, Any]
    job: Job | None = None
    divergences: bool = False

    @property
    def exists(self) -> bool:
        """Whether there is a store, right or wrong."""
        return (self.path / MANIFEST).is_file()

    def has(self, n_windows: int) -> bool:
        """Whether there is a store that has so many windows."""
        return self.exists and open_reference(self.path).n_windows >= n_windows

    def lock(self, cache: Cache) -> Lock:
        """Held while the store is made, checked or deleted; none where nothing can be written.

        It lies beside the store, since runs with other caches may have the same path; under a key, as the cache's own.
        """
        folder, name = os.path.split(os.path.abspath(self.path))
        file = Path(folder, f"{name}.lock" if name == self.key else f".{name}.lock")
        return cache.lock_at(file) if os.access(folder, os.W_OK) else NoLock()


@dataclass(eq=False)
class TextRun:
    """A text of a run; ``name`` tells several texts apart, and is empty for the only one.

    ``marked``: a model of the run is to be its reference, which is ``own`` once that is known; ``records``: others need
    the store of that.  ``rows``: by the models' labels.  ``reference``: as it is in the end, None without one.
    ``scores_keys``: of the models, by their labels, whose turn has come.
    """

    name: str
    data: EvalData
    marked: bool = False
    rows: dict[str, ModelResult] = field(default_factory=dict)
    reference: Future[Reference | None] = field(default_factory=Future)
    own: Reference | None = None
    records: bool = False
    scores_keys: dict[str, str] = field(default_factory=dict)

    @property
    def lacks_windows(self) -> bool:
        """Whether the reference has to run although its scores may be there, for windows that its store lacks."""
        return self.records and self.own is not None and not self.own.has(len(self.data.windows))

    def set_reference(self, reference: Reference | None) -> None:
        """Say which reference the text has in the end, unless that was said before."""
        if not self.reference.done():
            self.reference.set_result(reference)

    def of(self, job: Job) -> str:
        """A model in messages, with the text that it scores where there are several."""
        return f"{job.request.label} on {self.name}" if self.name else job.request.label


def tag_for(reference: Reference | None, job: Job) -> str:
    """Under which tag a model's scores lie: of what they are compared with, or of scores that depend on no reference.

    Nothing does where there is no reference, for the reference itself, and in an engine that cannot be compared.
    """
    if reference is None or job.spec.is_reference or not job.engine_class.capabilities.compares:
        return segments.ALONE
    return reference.key[:TAG_DIGITS] + (DIVERGENCES_SUFFIX if reference.divergences else "")


def is_stored(session: Session, job: Job, text: TextRun, reference: Reference | None) -> bool:
    """Whether a model's scores of all windows may be taken from the cache; False if it has to be downloaded."""
    request = job.files.cached()
    if session.clear or request is None:
        return False
    key = text.scores_keys.get(job.request.label)
    key = key or Cache.key("scores", jobs.identity(replace(job, request=request), text.data, session))
    there = segments.committed(session.cache.path("scores", key, ""), tag_for(reference, job))
    return {window.index for window in text.data.windows} <= there


def all_stored(session: Session, some: Sequence[Job], text: TextRun, reference: Reference) -> bool:
    """Whether the scores of all these models are in the cache; False also where that cannot be told yet."""
    try:
        return all(is_stored(session, job, text, reference) for job in some)
    except CompareQError:  # the model's own row of the table will say it
        return False


def is_pending(session: Session, job: Job, text: TextRun) -> bool:
    """Whether the model still has to score this text, as far as is known."""
    reference = text.reference.result() if text.reference.done() else text.own
    return (job.spec.is_reference and text.lacks_windows) or not is_stored(session, job, text, reference)


def given_store(session: Session, path: Path, others: Sequence[Job], text: TextRun) -> Reference:
    """The reference that is a store without a model; every byte is checked if any of the others needs it."""
    reference = of_store(path, text.data, session)
    session.cache.use("references", reference.path.name)
    if not all_stored(session, others, text, reference):
        verify(session, reference)
    return reference


def prepare(session: Session, job: Job, text: TextRun, others: Sequence[Job]) -> None:
    """Say which reference a model is; if any of the others needs its store, and it is there, every byte is checked.

    InputError, before anything loads, if there is a store and it is another reference's or damaged.
    """
    text.own = reference = of_model(job, text.data, session)
    session.cache.use("references", reference.key)
    if session.clear:
        with session.hosts.held(reference.lock(session.cache)):
            reference_store.discard(reference.path)
    wanted = session.logits_file is not None or job.spec.out_logits is not None
    text.records = not all_stored(session, others, text, reference) or (wanted and not reference.exists)
    if reference.exists and (text.records or not is_stored(session, job, text, reference)):
        verify(session, reference)
    if text.lacks_windows:  # before anything loads
        session.cache.check_writable()


def verify(session: Session, reference: Reference) -> None:
    """Check every byte of a store; InputError names a damaged file."""
    store = open_reference(reference.path)
    with (
        session.hosts.held(reference.lock(session.cache)),
        session.progress.phase(f"checking reference {reference.label}", unit="files") as phase,
    ):
        store.verify(session.hosts.stoppable(phase).advance)


def of_model(job: Job, data: EvalData, session: Session) -> Reference:
    """The reference that a fetched model is; InputError if a path that the user gave holds another one.

    With the session's ``clear`` a store under the reference's own key is about to be deleted, and may be damaged.
    """
    logits_file = session.logits_file
    identity = {**jobs.identity(job, data, session), "vocabulary": data.vocabulary, "reference": RECORDING_VERSION}
    key = Cache.key("reference", identity)
    folder = job.spec.out_logits
    in_cache = session.cache.path("references", key, "")
    path = logits_file or (Path(job.spec.locate(folder)) / key if folder else in_cache)
    reference = Reference(key, path, job.request.label, identity, job, session.divergences)
    key_name = "--logits_file" if logits_file is not None else "out_logits"
    if reference.exists:
        if not (session.clear and logits_file is None):
            check(open_reference(path), {"decode": None, **identity})
    elif path != in_cache and not is_free(path):
        what = (
            "logits that ExLlamaV3's compare_q kept" if holds_upstreams_logits(path) else "no store of this compare_q"
        )
        raise InputError(f"{key_name}: {path}: holds {what}; name another path")
    if path == in_cache or (reference.has(len(data.windows)) and not session.clear):
        return reference
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK):
        raise InputError(f"{key_name}: {path.parent}: cannot be written")
    return reference


def of_store(path: Path, data: EvalData, session: Session) -> Reference:
    """A reference from a store alone; InputError if it is of another text, tokenizer or version, or too short."""
    store = open_reference(path)
    check(store, {"series": data.series, "vocabulary": data.vocabulary, "reference": RECORDING_VERSION})
    if store.n_windows < len(data.windows):
        raise InputError(
            f"{path}: has {store.n_windows} windows, window {store.n_windows} of {len(data.windows)} is missing; "
            f"use -r {store.n_windows if data.answers is None else data.answers.requests.question[store.n_windows]}"
        )
    if store.head.vocab_size <= data.top_id:
        raise InputError(f"{path}: has {store.head.vocab_size} logits, the tokenizer reaches id {data.top_id}")
    identity = {name: value for name, value in store.identity.items() if name != "label"}
    key = Cache.key("reference", identity)
    return Reference(key, path, str(store.identity.get("label")), identity, divergences=session.divergences)


def check(store: Reader, expected: Mapping[str, Any]) -> None:
    """InputError that says in what a store's identity differs from the ``expected`` entries."""
    for name in sorted(expected, key=lambda name: list(MEANING).index(name) if name in MEANING else len(MEANING)):
        if store.identity.get(name) != expected[name]:
            meaning = MEANING.get(name, "was made by another version of compare_q")
            raise InputError(f"{store.path}: the reference {meaning}; delete it or give another path")


def as_json(reference: Reference, n_tokens: int) -> dict[str, Any]:
    """The reference for results.json, with the bytes that its store takes for each of ``n_tokens`` scored tokens."""
    known: dict[str, Any] = {"label": reference.label, "key": reference.key, **reference.identity}
    if reference.job is not None:
        known["content"] = reference.job.files.content()
    try:
        store = open_reference(reference.path)
    except InputError:  # the scores came from the cache, and the store has been deleted since
        return known
    return {
        **known, "contents": store.contents, "contents_reason": store.reason, "vocab_size": store.head.vocab_size,
        "head_dtype": store.head.dtype, "bytes": store.stored_bytes,
        "bytes_a_token": round(store.stored_bytes / n_tokens, 1),
    }  # fmt: skip
