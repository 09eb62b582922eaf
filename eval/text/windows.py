"""Build the windows of a run from a data spec, and describe them for titles, ``check`` and results.json.

A text is tokenized once, as a whole, with BOS if the tokenizer adds it (``lm_eval``: each document separately).  It is
cut by one of the methods in ``eval/text/cutting.py``; the default is the method of exllamav3's compare_q.  Each
conversation and each answer to a question is a window.  Without ``max_rows``, or with 0 or null, all windows are used.

With ``chat_template`` the tokenizer's template (an empty system message, a user who says "Say something.", the
generation prompt) precedes each window.  Its tokens and the first token of the window are not scored.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from compare_q.backends import hub
from compare_q.backends.base import Spans, Window, abbreviated
from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.packages import builds
from compare_q.eval.common import processes
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs import reading, types
from compare_q.eval.specs.types import DataSpec
from compare_q.eval.text import conversations, corpus, cutting, hub_datasets, tasks, tokens
from compare_q.eval.text.tokens import TOKENS_VERSION, Chat, Requests, Tokens

CHAT_VERSION = 2
"""Version of the tokens of conversations.  Raise it when something else is rendered or scored."""
TOKENIZING = (
    "transformers", "tokenizers", "datasets", "pyarrow", "jinja2", "sentencepiece", "tiktoken", "mistral-common",
)  # fmt: skip
"""Packages that may influence how a text is read and tokenized."""
LONG_IN_WORDS = {"truncate": "cut off there", "split": "split", "skip": "left out"}
"""``long`` -> how a conversation of more than ``eval_len`` tokens is treated."""


@dataclass(frozen=True)
class TextSize:
    """Bytes and words of the scored tokens of a run.  If windows overlap, a token counts each time.

    ``n_bytes``: UTF-8 bytes; bits per byte = nats / ln 2 / ``n_bytes``.  ``n_words``: the same share of the words,
    separated by white space as in lm-eval; for a whole text it equals lm-eval's count.  If the text was detokenized,
    both are counted in the original, as in lm-eval's ``wikitext``.
    """

    n_bytes: int
    n_words: float


@dataclass(frozen=True)
class Conversations:
    """Facts about the windows of a run whose text is conversations.

    ``begins``: text index of the first token of each window's conversation.  ``total``: conversations of the data set;
    ``unscored``: how many have no scored token; ``too_long``: how many exceed ``eval_len``.  ``found_by``,
    ``across`` and ``template``: see ``compare_q.eval.text.tokens.Chat``.
    """

    begins: tuple[int, ...]
    total: int
    unscored: int
    too_long: int
    found_by: str
    across: int
    template: str

    @property
    def scored(self) -> int:
        """Number of conversations that have a window."""
        return len(set(self.begins))

    def subtitle(self, data: EvalData) -> str:
        """Return the line below a title, e.g. ``ultrachat, 200 conversations, 61,234 scored tokens of the user``."""
        split = "" if len(data.windows) == self.scored else f" in {len(data.windows):,} windows"
        whose = " and ".join(f"the {role}" for role in data.spec.score_roles)
        turns = ", last turn" if data.spec.score_turns == "last" else ""
        name = corpus.display_name(data.spec)
        return f"{name}, {self.scored:,} conversations{split}, {data.n_scored:,} scored tokens of {whose}{turns}"

    def in_words(self, data: EvalData) -> str:
        """Return the line that ``check`` prints."""
        lost = f"; {self.unscored:,} without a scored token left out" if self.unscored else ""
        lost += f"; {self.too_long:,} longer ones {LONG_IN_WORDS[data.spec.long]}" if self.too_long else ""
        return (
            f"{self.scored:,} of {self.total:,} conversations in {len(data.windows):,} windows, "
            f"{data.n_scored:,} scored tokens ({', '.join(data.spec.score_roles)}; found by {self.found_by}){lost}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the values for results.json, next to the spec."""
        return {
            "conversations": self.total,
            "scored": self.scored,
            "without_scored_tokens": self.unscored,
            "longer_than_eval_len": self.too_long,
            "turns_told_by": self.found_by,
            "tokens_across_edges": self.across,
            "chat_template_sha256": self.template,
        }


@dataclass(frozen=True)
class Answers:
    """Facts about the windows of a run whose text is answers to questions.

    ``requests``: one per window.  ``begins``: text index of the first token of each window's question.  ``total``:
    questions of the task.  ``cut_off``: windows that lost the beginning of their context.
    """

    requests: Requests
    begins: tuple[int, ...]
    total: int
    cut_off: int

    @property
    def questions(self) -> int:
        """Number of questions that have a window."""
        return int(self.requests.question[-1]) + 1

    def subtitle(self, data: EvalData) -> str:
        """Return the line below a title, e.g. ``arc_easy, 2,376 questions, 0-shot, 9,501 answers``."""
        name = corpus.display_name(data.spec)
        return f"{name}, {self.questions:,} questions, {self.requests.num_fewshot}-shot, {len(data.windows):,} answers"

    def in_words(self, data: EvalData) -> str:
        """Return the line that ``check`` prints."""
        lost = f"; {self.cut_off:,} lost the beginning of their context" if self.cut_off else ""
        return (
            f"{self.questions:,} of {self.total:,} questions, {self.requests.num_fewshot}-shot, "
            f"{len(data.windows):,} answers, {data.n_scored:,} scored tokens{lost}"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the values for results.json, next to the spec."""
        asked = self.requests
        key = json.dumps([column.tolist() for column in (asked.question, asked.right, asked.chars)])
        return {
            "task": asked.task,
            "num_fewshot": asked.num_fewshot,
            "questions": self.questions,
            "questions_of_the_task": self.total,
            "key_sha256": hashlib.sha256(key.encode()).hexdigest(),
            "longer_than_eval_len": self.cut_off,
        }


@dataclass(frozen=True)
class EvalData:
    """The windows of a run.

    ``digest``: identifies the windows by content.  ``series``: identifies all windows of the text; a run may use only
    the first ones.  ``n_tokens``: tokens of the whole text.  ``vocabulary``: identifies the tokenizer by content;
    ``tokenizer``: its folder.  ``starts[window] + position``: index of a token in the whole text, documents one
    after the other.  ``available``: windows of the whole text.  ``text_size``: None if unknown, with the reason in
    ``text_note``.
    """

    spec: DataSpec
    windows: tuple[Window, ...]
    n_tokens: int
    top_id: int
    digest: str
    series: str
    vocabulary: str
    tokenizer: Path
    starts: tuple[int, ...]
    available: int
    text_size: TextSize | None
    text_note: str = ""
    conversations: Conversations | None = None
    answers: Answers | None = None

    @property
    def documents(self) -> Conversations | Answers | None:
        """Facts about conversations or answers; None for a text."""
        return self.conversations or self.answers

    def text_index(self, window: NDArray[Any], position: NDArray[Any]) -> NDArray[np.int64]:
        """Return the index in the whole tokenized text of each token, int64 [N], from its window and position [N]."""
        return np.asarray(np.asarray(self.starts)[window] + position)

    def begins(self, window: NDArray[Any]) -> NDArray[np.int64] | None:
        """Return the text index of the first token of each window's conversation or question [N]; None for a text."""
        return None if self.documents is None else np.asarray(self.documents.begins, np.int64)[window]

    @property
    def max_rows(self) -> int:
        """Number of questions or windows, whichever ``max_rows`` of a data spec counts."""
        return self.answers.questions if self.answers else len(self.windows)

    @property
    def is_spread(self) -> bool:
        """True if the windows are a sample that is spread over the text."""
        return self.spec.sample == "spread" and len(self.windows) < self.available

    @cached_property
    def seen(self) -> frozenset[int]:
        """Token ids in windows of conversations, whose special tokens the model must share; empty for a text."""
        ids = [window.token_ids for window in self.windows if self.conversations is not None]
        return frozenset(np.unique(np.concatenate(ids)).tolist()) if ids else frozenset()

    @property
    def length(self) -> int:
        """Number of tokens in the longest window, including the chat prefix."""
        return max(len(window.token_ids) for window in self.windows)

    @property
    def n_scored(self) -> int:
        """Number of scored tokens in all windows.  If windows overlap, a token counts each time."""
        return sum(window.n_scored for window in self.windows)


# Tokens -> windows.


def cut(text: Tokens, spec: DataSpec, max_rows: int | None, tokenizer: Path) -> EvalData:
    """Cut a tokenized text into windows; InputError if the text is too short for one."""
    talks = asked = None
    if text.chat is not None:
        every, talks = conversation_cuts(text, text.chat, spec, max_rows)
    elif text.requests is not None:
        every, asked = answer_cuts(text, text.requests, spec, max_rows)
    else:
        every = cutting.by_method(text, spec)
    taken = every[: max_rows or None] if asked is None else every[: len(asked.begins)]
    if not taken and talks is not None:
        longer = f", and {talks.too_long:,} are longer than eval_len" if talks.too_long else ""
        what = f"{talks.total:,} conversations has a token of {', '.join(spec.score_roles)} in a window"
        raise InputError(f"score_roles: none of {what}{longer}")
    if not taken:
        least = cutting.least_tokens(spec.method, spec.eval_len)
        raise InputError(f"eval_len: the text has {len(text.ids)} tokens, one window takes {least}; shorten eval_len")
    before = len(text.prefix)
    windows = tuple(
        Window(index, np.concatenate((text.prefix, window.token_ids)), shifted(window.spans, before))
        for index, window in enumerate(taken)
    )
    starts = tuple(window.start - before for window in taken)
    top_id = max(text.top_id, max(int(window.token_ids.max()) for window in windows))
    return EvalData(
        spec, windows, len(text.ids), top_id, digest_of(windows, starts, spec.windows),
        series_of(text, every, spec.windows), text.vocabulary, tokenizer, starts,
        len(every), *scored_size(text, taken), talks, asked,
    )  # fmt: skip


def conversation_cuts(
    text: Tokens, chat: Chat, spec: DataSpec, max_rows: int | None
) -> tuple[list[cutting.Cut], Conversations]:
    """Return all windows of conversations, and facts about the windows that a run uses."""
    cuts, too_long, unscored = cutting.chat(text.ids, chat.scored, text.ends, spec.eval_len, spec.long)
    starts = np.array([window.start for window in cuts[: max_rows or None]], np.int64)
    begins = np.concatenate(([0], text.ends))[np.searchsorted(text.ends, starts, side="right")]
    return cuts, Conversations(
        tuple(begins.tolist()), len(text.ends), unscored, too_long, chat.found_by, chat.across, chat.template
    )


def answer_cuts(
    text: Tokens, requests: Requests, spec: DataSpec, max_questions: int | None
) -> tuple[list[cutting.Cut], Answers]:
    """Return all windows of the requests, and facts about the first ``max_questions`` questions (0 and None: all)."""
    question = requests.question
    if (longest := int(requests.scored.max())) > spec.eval_len:
        number = int(question[requests.scored.argmax()]) + 1
        raise InputError(f"eval_len: an answer to question {number:,} has {longest:,} tokens; set eval_len above that")
    total, lengths = int(question[-1]) + 1, np.diff(text.ends, prepend=0)
    taken = int(np.searchsorted(question, min(max_questions or total, total)))
    first = np.searchsorted(question, question[:taken])
    n_cut_off = int((lengths[:taken] > spec.eval_len + 1).sum())
    known = Answers(requests.first(taken), tuple((text.ends - lengths)[first].tolist()), total, n_cut_off)
    return cutting.answers(text.ids, text.ends, requests.scored, spec.eval_len), known


def shifted(spans: Spans, by: int) -> Spans:
    """Return the spans with ``by`` added to every position."""
    return tuple((begin + by, end + by) for begin, end in spans)


def series_of(text: Tokens, every: Sequence[cutting.Cut], method: types.Windows) -> str:
    """Return the SHA-256 of all windows of a text: its tokens, and the start, length and spans of each window."""
    digest = hashlib.sha256(f"{method} {text.lead} {len(text.prefix)} ".encode())
    digest.update(np.ascontiguousarray(text.prefix, dtype="<i4").tobytes())
    digest.update(np.ascontiguousarray(text.ids, dtype="<i4").tobytes())
    for window in every:
        length = len(window.token_ids)
        digest.update(np.asarray([window.start, length, *abbreviated(window.spans, length)], dtype="<i8").tobytes())
    return digest.hexdigest()


def digest_of(windows: Sequence[Window], starts: Sequence[int], method: types.Windows) -> str:
    """Return the SHA-256 of the method and of the start, length, spans and tokens of each window.

    The lengths are needed: otherwise 4 windows of 128 tokens and 8 of 64 over the same text would be equal.
    """
    digest = hashlib.sha256(method.encode())
    for window, start in zip(windows, starts, strict=True):
        digest.update(f" {start} {len(window.token_ids)} {window.what_is_scored} ".encode())
        digest.update(window.token_ids.tobytes())
    return digest.hexdigest()


def scored_size(text: Tokens, taken: Sequence[cutting.Cut]) -> tuple[TextSize | None, str]:
    """Return (bytes and words of the scored tokens by their share of the text or None, the reason if None)."""
    if text.requests is not None:
        return None, "bytes and words are not counted in answers"
    if text.sizes is None and text.chat is not None:
        return None, "bytes and words are not known: the text came as tokens"
    if text.sizes is None:
        return None, "bytes and words are not known: this tokenizer does not return the offsets of its tokens"
    spans = [span for window in taken for span in shifted(window.spans, window.start)]
    scored = sum(int(text.sizes[begin:end].sum()) for begin, end in spans)
    if not scored:
        return None, "bytes and words are not known: the scored tokens have no text"
    read = int(text.sizes.sum())  # not the original's bytes where the text was detokenized
    return TextSize(round(text.n_bytes * scored / read), text.n_words * scored / read), ""


# A data spec -> tokens, in the cache.


def build(spec: DataSpec, n_windows: int | None, cache: Cache, progress: Progress, *, clear: bool = False) -> EvalData:
    """Return the windows of a data spec; the tokens come from the cache if nothing they depend on has changed.

    ``n_windows``: the number of windows of this run, 0 for all; None: the spec's ``max_rows``.
    """
    folder = tokenizer_folder(spec, progress)
    key = cache.key("tokens", identity(spec, folder))
    cache.use("tokens", key)
    if clear:
        cache.clear("tokens", key)
    text = tokens.load(cache, key)
    if text is None:
        with cache.write("tokens", key, ".npz") as file:
            what = f"tokenizing {corpus.display_name(spec)}"
            keys = {"spec": reading.packed(spec), "tokenizer": str(folder), "file": str(file)}
            processes.run_in_subprocess(make, what, progress, **keys)
        text = tokens.load(cache, key)
    if text is None:
        raise InputError(f"{cache.path('tokens', key, '.npz')}: vanished; is the disk full, or the cache not yours?")
    return cut(text, spec, spec.max_rows if n_windows is None else n_windows, folder)


def make(spec: Mapping[str, Any], tokenizer: str, file: str, progress: Progress) -> None:
    """Read the text of a packed ``spec``, tokenize it and write the tokens into ``file``; InputError with the reason.

    ``tokenizer``: its folder.  Runs in a subprocess, because it imports Transformers and ``datasets`` or lm-eval.
    """
    unpacked, folder = reading.unpacked(spec), Path(tokenizer)
    name = corpus.display_name(unpacked)
    if unpacked.is_answers:
        with progress.phase(f"tokenizing {name}", unit="questions"):
            text = tasks.read(unpacked, folder)
    elif corpus.is_trace(unpacked):
        with progress.phase(f"reading {name}", unit="rows"):
            text = conversations.read_trace(unpacked, folder)
    else:
        hub_datasets.fetch(unpacked, progress)
        if unpacked.is_chat:
            text = conversations.tokenize(conversations.read(unpacked, progress), folder, unpacked, progress)
        else:
            text = tokens.tokenize(corpus.load_texts(unpacked, progress), folder, unpacked, progress)
    tokens.save(Path(file), text)


def identity(spec: DataSpec, folder: Path) -> dict[str, Any]:
    """Return everything that the tokens depend on, as JSON types; ``folder``: the tokenizer's."""
    # A default.jinja among the additional templates is the chat template if the folder has no other.
    patterns = [*hub.TOKENIZER_FILES, "additional_chat_templates/*.jinja"]
    digest = hashlib.sha256()
    for file in sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + json_files.read_bytes(file) + b"\0")
    chat = {
        "roles": sorted(set(spec.score_roles)),
        "turns": spec.score_turns,
        "variables": spec.chat_template_kwargs,
        "version": CHAT_VERSION,
    }
    return {
        "version": TOKENS_VERSION,
        "method": spec.method,
        "detokenize": spec.detokenize,
        "text": text_identity(spec),
        "tokenizer": digest.hexdigest(),
        "chat_template": spec.chat_template,
        **({"chat": chat} if spec.is_chat else {}),
        "trust_remote_code": spec.trust_remote_code,
        "versions": builds(TOKENIZING),
    }


def text_identity(spec: DataSpec) -> dict[str, Any]:
    """Return everything the text or the questions depend on, as JSON types; InputError that names a missing file."""
    return tasks.identity(spec) if spec.is_answers else corpus.identity(spec)


def paths_of(spec: DataSpec) -> list[Path]:
    """Return the files and folders on this machine from which the text or the questions are read."""
    return tasks.paths_of(spec) if spec.is_answers else corpus.paths_of(spec)


def would_fetch(spec: DataSpec, cache: Cache, *, tokenizer_is_here: bool) -> str:
    """Describe the download of the text; empty if the text is on this machine or its tokens are in the cache."""
    if tasks.is_here(spec) if spec.is_answers else corpus.is_here(spec):
        return ""
    if tokenizer_is_here and are_stored(spec, cache):
        return ""
    return f"the data set of the task {spec.task}, by lm-eval" if spec.is_answers else corpus.would_fetch(spec)


def are_stored(spec: DataSpec, cache: Cache) -> bool:
    """Return True if the tokenized text is in the cache; the tokenizer must be on this machine."""
    folder = hub.resolve(spec.locate(spec.tokenizer_dir), spec.tokenizer_revision, tokenizer_only=True, download=False)
    return cache.path("tokens", cache.key("tokens", identity(spec, folder)), ".npz").is_file()


def tokenizer_folder(spec: DataSpec, progress: Progress) -> Path:
    """Return the tokenizer's folder; download it from the hub if necessary."""
    name = spec.locate(spec.tokenizer_dir)
    if not hub.is_hub_id(name):
        return hub.resolve(name, spec.tokenizer_revision, tokenizer_only=True)
    with progress.phase(f"fetching the tokenizer of {name}", unit="bytes") as phase:
        return hub.resolve(name, spec.tokenizer_revision, tokenizer_only=True, watch=phase)


# Descriptions of the windows.


def subtitle(data: EvalData) -> str:
    """The line below a plot's title, e.g. ``wikitext2, 141 × 2048 tokens``."""
    if data.documents is not None:
        return data.documents.subtitle(data)
    spec = data.spec
    count = spec.display_rows or len(data.windows)
    length = spec.display_eval_len or spec.eval_len - spec.warmup_tokens
    mixed = len({len(window.token_ids) for window in data.windows}) > 1
    size = f"{count} windows of up to {length} tokens" if mixed else f"{count} × {length} tokens"
    parts = [f"{corpus.display_name(spec)}, {size}"]
    if spec.warmup_tokens:
        parts.append(f"{spec.warmup_tokens} tokens warm-up")
    if spec.score_every:
        parts.append(f"of each {spec.score_every} the last {spec.score_last} scored")
    if spec.chat_template:
        parts.append("formatted")
    if spec.method != "exllamav3":
        parts.append(f"method {spec.method}")
    if data.is_spread:
        parts.append(f"spread over the text's {data.available:,}")
    return ", ".join(parts)


def in_words(spec: DataSpec, data: EvalData | None) -> str:
    """Return the line that ``check`` prints; ``data``: None if text or tokenizer are not downloaded yet."""
    what, whole = f"method {spec.method}, windows of {spec.eval_len} every {spec.stride} tokens", "text"
    if spec.is_chat:
        what, whole = f"conversations, windows of up to {spec.eval_len} tokens", "conversations"
    elif spec.is_answers:
        what, whole = f"questions, windows of up to {spec.longest} tokens", "task"
    what = f"{corpus.display_name(spec)}, {what}"
    if data is None:
        return f"{what}; their number is known after {whole} and tokenizer are downloaded"
    if data.documents is not None:
        return f"{what}: {data.documents.in_words(data)}"
    spread = f" spread over the text's {data.available:,}" if data.is_spread else ""
    counted = f"{len(data.windows):,} windows{spread}, {data.n_scored:,} scored tokens"
    return f"{what}: {counted}, of a text of {data.n_tokens:,} tokens"


def data_json(data: EvalData) -> dict[str, Any]:
    """Return the data of a run for results.json."""
    return {
        "spec": json.loads(data.spec.model_dump_json(exclude_unset=True)),
        "spec_sha256": data.spec.digest(),
        "windows_sha256": data.digest,
        "vocabulary_sha256": data.vocabulary,
        "text_tokens": data.n_tokens,
        "method": data.spec.windows,
        "windows": len(data.windows),
        **({"windows_of_the_text": data.available} if data.is_spread else {}),
        "window_length": data.length,
        "scored_tokens": data.n_scored,
        "bytes": data.text_size and data.text_size.n_bytes,
        "words": data.text_size and data.text_size.n_words,
        **({"text_note": data.text_note} if data.text_note else {}),
        **({"conversations": data.conversations.as_json()} if data.conversations else {}),
        **({"answers": data.answers.as_json()} if data.answers else {}),
    }
