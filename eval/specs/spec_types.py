"""The data spec and the model spec.

Both have ExLlamaV3's compare_q keys with the same meaning, and compare_q's own keys.
``eval/specs/spec_files.py`` reads them from files.  Options of engines are checked by the engine,
data sets by ``eval/text``.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, model_validator

from ...backends.common.json_files import exists, expanded
from ...backends.common.message_text import CONTROL, is_secret, nearest, redacted, shortened

Method = Literal["exllamav3", "llamacpp", "lm_eval", "gptq", "once"]
"""Methods of cutting a text into windows; ``eval/text/cutting.py`` implements them."""
Long = Literal["truncate", "split", "skip"]
"""How a conversation of more than ``eval_len`` tokens is shortened."""
CHAT_PREFIX = 'with dataset "chat":'
"""Begins the description of keys of conversations."""
PROMPT_TOKENS = 64
"""Tokens of a window of sampled text that are from a text, and not scored."""
Phase = Literal["prefill", "decode"]
Sample = Literal["first", "spread"]
"""Which windows of a text ``max_rows`` takes."""
MOST_STEP = 16
"""Largest number of tokens per decode step."""
MOST_ROLES = 127
"""Largest number of roles of a text; a token's role is stored as int8."""
Length = Annotated[int, Field(gt=0)]
Count = Annotated[int, Field(ge=0)]
Amount = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Bits = Annotated[float, Field(ge=0, allow_inf_nan=False)]
LATER_KEYS = {
    "method",
    "noise_floor",
    "group",
    "detokenize",
    "python",
    "gpus",
    "replicas",
    "resources",
    "score_roles",
    "score_turns",
    "long",
    "chat_template_kwargs",
    "sample",
    "phase",
    "step",
    "batch",
    "score_last",
    "score_every",
    "repeat",
    "pack",
    "seed",
}
"""Keys that were added after the first results.

A default is left out of a spec's digest, so that digests of older specs stay valid.
"""
ONLY_WITH_CHAT = {"score_roles", "score_turns", "long", "chat_template_kwargs"}
"""Keys that are valid with dataset "chat" alone."""
OF_CUT_TEXTS = {
    "method",
    "sample",
    "eval_stride",
    "warmup_tokens",
    "chat_template",
    "detokenize",
    "display_rows",
    "display_eval_len",
    "score_last",
    "score_every",
}
"""Keys of texts that are cut into windows: not of conversations, and not of sampled text."""
OF_DATA_SETS = {
    "revision",
    "dataset_path",
    "dataset_name",
    "dataset_split",
    "split",
    "dataset_data_files",
    "text_column",
    "max_text_rows",
    "max_dataset_rows",
}
"""Keys of data sets, and of the rows of a file."""
NOT_SWEPT = ": this key cannot have several values"
"""Follows an axis that cannot be swept; ``spec_files.fault_of`` looks for it to add a hint."""
LM_EVAL_RUNS_TASKS = (
    "compare_q scores no tasks; run them with lm_eval --log_samples, "
    "and compare the samples with compare-q flips"
)
"""For the keys and the word that named a task of lm-eval."""
ENGINE = "engine."
"""Prefix of the axes of a sweep that are options of the engine."""
NEVER_SWEPT = {
    "load_fn",
    "fwd_fn",
    "label",
    "group",
    "model_dir",
    "engine",
    "reference",
    "noise_floor",
    "out_logits",
    "sweep",
}
"""Keys that cannot be an axis of a sweep."""
MOST_ROWS = 256
"""Largest number of models that one spec with a sweep may stand for."""
RESERVED_VARIABLES = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "conversations",
    "documents",
    "kwargs",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "self",
    "strftime_now",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}
"""Names that ``chat_template_kwargs`` cannot have.

They are arguments of Transformers' ``apply_chat_template``, and the date, which
``eval/text/conversations.py`` sets.
"""


class Spec(BaseModel):
    """Base of both specs: strict types, no unknown keys, and the file that the spec is from."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    _folder: Path = PrivateAttr(default_factory=Path)
    _place: str = PrivateAttr("")
    _places: dict[str, str] = PrivateAttr(default_factory=dict)
    _later: ClassVar[set[str]] = LATER_KEYS

    @model_validator(mode="after")
    def _names_of_one_line(self) -> Self:
        for key, value in self:
            check_printable(key, value)
            check_no_secret(key, value)
        return self

    def digest(self) -> str:
        """Return the SHA-256 of the spec as canonical JSON with defaults.

        Equal specs have equal digests.  A key of ``_later`` was added after digests had been
        stored: it is left out at its default.
        """
        later_defaults = {}
        for key, field in type(self).model_fields.items():
            if key in self._later:
                later_defaults[key] = field.get_default(call_default_factory=True)
        keys = {}
        for key, value in self.model_dump(mode="json").items():
            if key not in later_defaults or value != later_defaults[key]:
                keys[key] = value
        canonical = json.dumps(keys, sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def blamed(self, reason: object) -> str:
        """Return a line with the place of the spec and what is wrong with it."""
        return f"{self._place}{reason}"

    def locate(self, name: str) -> str:
        """Return the path of ``name`` if it exists next to the spec, or else ``name``.

        ``name``: a path, a pattern of paths, a hub id or a URL.
        """
        path = expanded(name)
        if not path.is_absolute():
            path_next_to_spec = self._folder / path
            if exists(path_next_to_spec) or matches_files(path_next_to_spec, name):
                return os.path.normpath(path_next_to_spec)
        if name.startswith("~"):
            return str(path)
        # Not ``path``: a URL would lose a slash, and ./a/b would become a/b, which is a hub id.
        return name


def matches_files(path: Path, name: str) -> bool:
    """Return True if ``name`` has wildcards, and files match ``path``, which ends with it."""
    return glob.has_magic(name) and bool(glob.glob(str(path)))


def check_printable(key: str, value: Any) -> None:
    """ValueError for a blank name, and for control characters outside of ``engine``."""
    is_blank = key in ("label", "group") and isinstance(value, str) and not value.strip()
    has_control = key != "engine" and any(CONTROL.search(text) for text in strings_in(value))
    if is_blank or has_control:
        raise ValueError(f"{key}: must be one line of printable text")


def check_no_secret(key: str, value: Any) -> None:
    """ValueError for a secret in a key whose value results and the cache keep."""
    if key not in ("label", "engine", "model_dir"):
        return
    place = secret_in(value, key)
    if place:
        why = "results and the cache would keep it; set it in the environment, as HF_TOKEN"
        raise ValueError(f"{place}: holds a secret: {why}")


def first_key(keys: Iterable[str]) -> str:
    """Return the alphabetically first key; empty if there is none."""
    return min(keys, default="")


def secret_in(value: Any, place: str) -> str:
    """Return the place of the first secret in JSON types; empty if there is none.

    ``place``: of ``value``, begins the places of what is in it.
    """
    # A server's URL is checked by its engine.
    if isinstance(value, str) and "://" not in value:
        if redacted(value) != value:
            return place
        return ""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, item in items:
        item_place = f"{place}.{key}"
        if is_secret(str(key), item):
            return item_place
        secret_place = secret_in(item, item_place)
        if secret_place:
            return secret_place
    return ""


def strings_in(value: Any) -> list[str]:
    """Return every string in JSON types, except the keys of objects."""
    if isinstance(value, str):
        return [value]
    items: Iterable[Any] = ()
    if isinstance(value, dict):
        items = value.values()
    elif isinstance(value, list):
        items = value
    texts = []
    for item in items:
        texts += strings_in(item)
    return texts


class DataSpec(Spec):
    """A text, its tokenizer, and how it is cut into windows."""

    _later: ClassVar[set[str]] = LATER_KEYS | {"label"}

    label: str | None = Field(
        None, description="name of the text among several. Default: the name of the data"
    )
    tokenize_fn: Literal["transformers"] = Field(
        "transformers", description="only Transformers' tokenizers"
    )
    tokenizer_dir: str = Field(min_length=1, description="folder or hub id of the tokenizer")
    tokenizer_revision: str | None = Field(None, description="hub revision of the tokenizer")
    trust_remote_code: bool = Field(False, description="let the tokenizer run its own code")
    dataset: str = Field(
        min_length=1,
        description='a known name ("wiki2"), a hub or local data set, "text" with path, "chat", '
        '"sampled", or "rollouts" with path',
    )
    path: str | None = Field(
        None,
        description='.txt, .jsonl or .parquet file, with dataset "text", "chat", "sampled" or '
        '"rollouts"',
    )
    revision: str | None = Field(None, description="hub revision of the data set")
    dataset_path: str | None = Field(None, description="data set path, if it differs from the name")
    dataset_name: str | None = Field(None, description="configuration of the data set")
    dataset_split: str | None = Field(None, description='split, e.g. "test" or "train[:1000]"')
    split: str | None = Field(None, description="same as dataset_split, which comes first")
    dataset_data_files: str | list[str] | dict[str, Any] | None = Field(
        None, description="data_files of load_dataset"
    )
    text_column: str | None = Field(
        None,
        description='column that holds the text (default "text") '
        'or the conversations (default "messages")',
    )
    max_text_rows: Count | None = Field(
        None, description="take only the first rows of the data set; 0: all"
    )
    max_dataset_rows: Count | None = Field(None, description="same as max_text_rows")
    method: Method = Field("exllamav3", description="how windows are cut: the tool it reproduces")
    detokenize: Literal["wikitext"] | None = Field(
        None, description="rewrite each document as lm-eval's task does"
    )
    eval_stride: Length | None = Field(
        None, description="tokens between the starts of two windows; see the methods"
    )
    eval_len: int = Field(ge=2, description="tokens in a window; the first one is never scored")
    max_rows: Count | None = Field(None, description="number of windows; 0, null or absent: all")
    sample: Sample = Field(
        "first", description="which windows max_rows takes: the first, or some spread over the text"
    )
    warmup_tokens: Count = Field(
        0, description="tokens at the start of each window that are not scored"
    )
    score_last: Length | None = Field(
        None, description="with score_every: number of last tokens that are scored"
    )
    score_every: Length | None = Field(
        None,
        description="only the last score_last of each score_every tokens of a window are scored",
    )
    chat_template: bool = Field(
        False, description="put the tokenizer's chat template before each window"
    )
    score_roles: list[str] = Field(
        ["assistant"],
        min_length=1,
        max_length=MOST_ROLES,
        description=f"{CHAT_PREFIX} the roles whose tokens are scored",
    )
    score_turns: Literal["all", "last"] = Field(
        "all", description=f"{CHAT_PREFIX} all turns of these roles, or the last"
    )
    long: Long = Field(
        "truncate", description=f"{CHAT_PREFIX} what is done with more than eval_len"
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description=f"{CHAT_PREFIX} variables for the chat template"
    )
    seed: Count | None = Field(
        None, description='with dataset "sampled": of the random numbers. Default: 0'
    )
    pack: str | None = Field(
        None,
        min_length=1,
        description="reference pack that holds the text, its windows and tokenizer: "
        "no other key is needed",
    )
    dataset_display_name: str | None = Field(None, description="name of the data in titles")
    display_rows: int | str | None = Field(None, description="number of windows in titles")
    display_eval_len: int | str | None = Field(None, description="window length in titles")

    @model_validator(mode="before")
    @classmethod
    def _no_task(cls, keys: Any) -> Any:
        if isinstance(keys, dict) and "task" in keys:
            raise ValueError(f"task: {LM_EVAL_RUNS_TASKS}")
        return keys

    @model_validator(mode="after")
    def _consistent(self) -> DataSpec:
        if self.dataset == "lm_eval":
            raise ValueError(f"dataset: {LM_EVAL_RUNS_TASKS}")
        # The order of the checks decides which of several faults is reported.
        if self.seed is not None and not self.is_sampled:
            raise ValueError('seed: only with dataset "sampled"')
        if self.is_chat:
            self._check_conversations()
        elif self.is_sampled:
            self._check_sampled()
        elif self.is_rollouts:
            self._check_rollouts()
        else:
            self._check_keys_without_chat()
            self._check_windows()
            self._check_score_every()
            self._check_documents()
        return self

    def _check_conversations(self) -> None:
        """ValueError for a fault of a spec of conversations."""
        of_cut_texts = self.model_fields_set & OF_CUT_TEXTS
        if of_cut_texts:
            raise ValueError(
                f'{first_key(of_cut_texts)}: cannot go with dataset "chat"; leave it out'
            )
        if (self.path is None) == (self.dataset_path is None):
            raise ValueError(
                'path: dataset "chat" needs either path, a .jsonl or .parquet file, '
                "or dataset_path, one of the hub"
            )
        reserved = RESERVED_VARIABLES & self.chat_template_kwargs.keys()
        if reserved:
            raise ValueError(
                f"chat_template_kwargs: {first_key(reserved)} is not yours to set; leave it out"
            )

    def _check_sampled(self) -> None:
        """ValueError for a fault of a spec of sampled text."""
        self._check_no_chat_keys()
        of_cut_texts = self.model_fields_set & OF_CUT_TEXTS
        if of_cut_texts:
            raise ValueError(
                f'{first_key(of_cut_texts)}: cannot go with dataset "sampled"; leave it out'
            )
        if (self.path is None) == (self.dataset_path is None):
            raise ValueError(
                'path: dataset "sampled" needs the text of its prompts: either path, a .txt, '
                ".jsonl or .parquet file, or dataset_path, a known name or one of the hub"
            )
        if self.eval_len <= PROMPT_TOKENS:
            raise ValueError(
                f'eval_len: must be above {PROMPT_TOKENS} with dataset "sampled", whose windows '
                f"begin with a prompt of {PROMPT_TOKENS} tokens"
            )

    def _check_rollouts(self) -> None:
        """ValueError for a fault of a spec of rollouts."""
        self._check_no_chat_keys()
        of_other_texts = self.model_fields_set & (OF_CUT_TEXTS | OF_DATA_SETS)
        if of_other_texts:
            raise ValueError(
                f'{first_key(of_other_texts)}: cannot go with dataset "rollouts"; leave it out'
            )
        if self.path is None:
            raise ValueError(
                'path: missing; dataset "rollouts" needs the path of a .jsonl file '
                "(docs/rollouts.md)"
            )

    def _check_no_chat_keys(self) -> None:
        """ValueError for a key of conversations."""
        only_with_chat = self.model_fields_set & ONLY_WITH_CHAT
        if only_with_chat:
            raise ValueError(f'{first_key(only_with_chat)}: only with dataset "chat"')

    def _check_keys_without_chat(self) -> None:
        """ValueError for a key of conversations, and for a warm-up of whole windows."""
        self._check_no_chat_keys()
        # A window's first token is never scored, and one more must be left.
        if self.warmup_tokens > self.eval_len - 2:
            raise ValueError(
                f"warmup_tokens: {self.warmup_tokens} leaves nothing "
                f"of eval_len {self.eval_len} to score"
            )

    def _check_windows(self) -> None:
        """ValueError if stride, length or warm-up do not go with the method of cutting."""
        method = f'with method "{self.method}"'
        stride = self.eval_stride
        if self.method == "exllamav3" and stride is None:
            raise ValueError("eval_stride: missing")
        if self._has_fixed_stride and stride not in (None, self.eval_len):
            raise ValueError(f"eval_stride: {method} windows follow one another; leave it out")
        if self.method == "once" and stride is not None and stride >= self.eval_len:
            raise ValueError(
                f"eval_stride: must be below eval_len {method}, "
                "or tokens between windows are left out"
            )
        if self.method == "llamacpp" and self.eval_len < 3:
            raise ValueError(
                f"eval_len: must be at least 3 {method}, which scores the second half of a window"
            )
        if self.method != "exllamav3" and self.warmup_tokens:
            raise ValueError(f"warmup_tokens: cannot go {method}; leave it out")

    def _check_score_every(self) -> None:
        """ValueError if ``score_every`` and ``score_last`` do not go together or with others.

        Of each ``score_every`` tokens of a window only the last ``score_last`` are scored.
        """
        every = self.score_every
        if every is None:
            if self.score_last is not None:
                raise ValueError("score_every: missing; score_last needs it")
            return
        if self.score_last is None:
            raise ValueError("score_last: missing; score_every needs it")
        if self.method != "exllamav3":
            raise ValueError(f'score_every: cannot go with method "{self.method}"; leave it out')
        if self.warmup_tokens:
            raise ValueError("score_every: cannot go with warmup_tokens; leave one out")
        if every > self.eval_len:
            raise ValueError(
                f"score_every: {every} is more than eval_len {self.eval_len}, "
                "so that nothing would be scored"
            )
        if self.score_last >= every:
            raise ValueError(f"score_last: must be below score_every {every}")

    def _check_documents(self) -> None:
        """ValueError if template, detokenizer or path do not go with the method or the data set.

        Not for dataset "chat", whose path ``_check_chat`` has checked.
        """
        if self._has_fixed_stride and self.chat_template:
            raise ValueError(f'chat_template: cannot go with method "{self.method}"; leave it out')
        if self.detokenize and self.method != "lm_eval":
            raise ValueError(
                'detokenize: rewrites documents, which only method "lm_eval" has; leave it out'
            )
        if self.dataset == "text" and self.path is None:
            raise ValueError(
                'path: missing; dataset "text" needs the path of a .txt, .jsonl or .parquet file'
            )
        if self.dataset != "text" and self.path is not None:
            raise ValueError('path: only with dataset "text", "chat", "sampled" or "rollouts"')

    @property
    def _has_fixed_stride(self) -> bool:
        """True if the method's windows follow one another."""
        return self.method in ("llamacpp", "lm_eval", "gptq")

    @property
    def is_chat(self) -> bool:
        """True if the text is conversations."""
        return self.dataset == "chat"

    @property
    def is_sampled(self) -> bool:
        """True if the reference model of the run samples the text."""
        return self.dataset == "sampled"

    @property
    def is_rollouts(self) -> bool:
        """True if the text is sequences that another program has sampled."""
        return self.dataset == "rollouts"

    @property
    def windows(self) -> str:
        """The kind of the windows: the method, or ``chat``, ``sampled`` or ``rollouts``."""
        if self.is_chat or self.is_sampled or self.is_rollouts:
            return self.dataset
        return self.method

    @property
    def longest(self) -> int:
        """Tokens of the longest window."""
        if self.method == "lm_eval":
            # lm-eval does not count the last token, which is only predicted.
            return self.eval_len + 1
        return self.eval_len

    @property
    def stride(self) -> int:
        """Tokens between the starts of two windows."""
        if self.eval_stride is not None:
            return self.eval_stride
        if self.method == "once":
            return self.eval_len // 2
        return self.eval_len


class ModelSpec(Spec):
    """One model and the engine that runs it."""

    load_fn: str = Field(description="how to load: see compare-q engines")
    fwd_fn: str | None = Field(
        None, description="upstream's second name for the engine; may be left out"
    )
    label: str | None = Field(None, description="name in the table. Default: model_dir")
    group: str | None = Field(
        None, description="colour group in the plots. Default: the format of the weights"
    )
    model_dir: str | list[Any] = Field(
        description="folder or hub id; [dir, options]; or [dir, override_tensors]"
    )
    revision: str | None = Field(None, description="hub revision of the model")
    engine: dict[str, Any] = Field(
        default_factory=dict, description="options of the engine; for vLLM any LLM() argument"
    )
    phase: Phase = Field(
        "prefill",
        description="which kernels score: those that read a prompt, or those that generate",
    )
    step: int = Field(
        1, ge=1, le=MOST_STEP, description='with phase "decode": tokens of a window in a step'
    )
    batch: Length | None = Field(
        None, description='with phase "decode": windows at a time. Default: up to 32'
    )
    python: str | None = Field(
        None, min_length=1, description="Python that runs the engine. Default: compare_q's own"
    )
    gpus: Count | None = Field(
        None, description="GPUs that the model gets, 0 for all. Default: what the engine needs"
    )
    replicas: Length = Field(
        1, description="workers, each with as many GPUs, among which the windows are split"
    )
    resources: dict[str, Amount] = Field(
        default_factory=dict, description="what a node must have, with --ray"
    )
    reference: bool = Field(
        False, description="KL divergence of the other models is measured against this one"
    )
    noise_floor: bool = Field(
        False, description="a row that shows the KLD of a lossless scheme, also drawn as a line"
    )
    out_logits: str | None = Field(
        None, description="as reference, and the folder in which its store is kept"
    )
    repeat: str | None = Field(
        None, description="name of a further run: it is scored again, not read from the cache"
    )
    override_bpw_layer: Bits | None = Field(
        None, description="replaces the measured layer bits per weight"
    )
    override_bpw_head: Bits | None = Field(
        None, description="replaces the measured head bits per weight"
    )
    override_vram_bits: Bits | None = Field(
        None, description="replaces the measured bits of layers and head"
    )

    @model_validator(mode="before")
    @classmethod
    def _path_of_a_file(cls, raw: Any) -> Any:
        """Take ``path`` as another name of ``model_dir``, for a model that is one file."""
        if not isinstance(raw, dict) or "path" not in raw or "model_dir" in raw:
            return raw
        keys = dict(raw)
        keys["model_dir"] = keys.pop("path")
        return keys

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        self._check_model_dir()
        only_in_decode = self.model_fields_set & {"step", "batch"}
        if self.phase == "prefill" and only_in_decode:
            raise ValueError(f'{first_key(only_in_decode)}: only with "phase": "decode"')
        return self

    def _check_model_dir(self) -> None:
        """ValueError unless ``model_dir`` has one of its three forms."""
        if self.model_dir in ("", []):
            raise ValueError("model_dir: is empty; give a folder, a file or a hub id")
        if isinstance(self.model_dir, str):
            return
        if len(self.model_dir) != 2 or not isinstance(self.model_dir[0], str):
            raise ValueError(
                "model_dir: must be a string, [dir, options] or [dir, override_tensors]"
            )
        extra = self._extra
        if isinstance(extra, dict):
            in_both = sorted(extra.keys() & self.engine.keys())
            if in_both:
                raise ValueError(f"model_dir: option {in_both[0]!r} is also in engine")
        elif not is_text_or_texts(extra):
            raise ValueError(
                "model_dir: the second item must be an object (options) "
                "or file names (override tensors)"
            )

    @property
    def _directory(self) -> str:
        if isinstance(self.model_dir, str):
            return self.model_dir
        return str(self.model_dir[0])

    @property
    def _extra(self) -> Any:
        """The second item of ``model_dir``: options, or file names."""
        if isinstance(self.model_dir, list):
            return self.model_dir[1]
        return {}

    @property
    def name(self) -> str:
        """The label; without one, the model_dir."""
        return self.label or self._directory

    @property
    def is_reference(self) -> bool:
        """True if the other models are compared with this one."""
        return self.reference or self.out_logits is not None

    @property
    def located(self) -> str:
        """The folder as a path, or the hub id."""
        return self.locate(self._directory)

    @property
    def options(self) -> dict[str, Any]:
        """``engine`` and the options of ``[dir, options]`` together."""
        options = dict(self.engine)
        if isinstance(self._extra, dict):
            options.update(self._extra)
        return options

    @property
    def override_tensors(self) -> tuple[Path, ...]:
        """The files of ``[dir, override_tensors]``, whose tensors replace the model's.

        For a folder, these are all its safetensors files.
        """
        names: Sequence[str] = ()
        if isinstance(self._extra, str):
            names = [self._extra]
        elif isinstance(self._extra, list):
            names = self._extra
        files: list[Path] = []
        for name in names:
            path = Path(self.locate(name))
            files_in_folder = []
            if exists(path):
                files_in_folder = sorted(path.glob("*.safetensors"))
            if files_in_folder:
                files += files_in_folder
            else:
                files.append(path)
        return tuple(files)

    def blamed(self, reason: object) -> str:
        """Return ``KEY: what is wrong`` with the place of the fault.

        If a ``sweep`` gives the key's value: the value's place in the sweep, instead of the key.
        Otherwise: the model's name, before the key.
        """
        line = str(reason)
        line_with_place = with_sweep_place(line, self._places)
        if line_with_place != line:
            return line_with_place
        return f"{self.name}: {line}"


def is_text_or_texts(value: Any) -> bool:
    """Return True for a string, and for a list of at least one string and nothing else."""
    if isinstance(value, list):
        return bool(value) and all(isinstance(item, str) for item in value)
    return isinstance(value, str)


# The docstrings of specs are descriptions in the JSON schemas, where a broken line would show.
class SweptSpec(ModelSpec):
    """A model spec in a file; with a ``sweep`` it gives several models, one for each choice of values."""  # noqa: E501

    sweep: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        default_factory=dict,
        description='a model for each value: {"engine.kv_cache_dtype": ["auto", "fp8"]}',
    )

    @model_validator(mode="after")
    def _axes(self) -> SweptSpec:
        if self.sweep:
            self._check_not_marked()
        count = math.prod(len(values) for values in self.sweep.values())
        if count > MOST_ROWS:
            raise ValueError(f"sweep: gives {count:,} models; at most {MOST_ROWS} are possible")
        for axis, values in self.sweep.items():
            self._check_axis(axis)
            check_different(axis, values)
        return self

    def _check_not_marked(self) -> None:
        """ValueError if the spec marks a reference or a noise floor, which is one model."""
        if self.reference:
            key = "reference"
        elif self.noise_floor:
            key = "noise_floor"
        elif self.out_logits is not None:
            key = "out_logits"
        else:
            return
        raise ValueError(
            f"{key}: this spec gives several models; mark a model in a spec without sweep"
        )

    def _check_axis(self, axis: str) -> None:
        """ValueError for a key that cannot be swept, or that is also set outside of ``sweep``."""
        option = axis.removeprefix(ENGINE)
        is_option = axis.startswith(ENGINE) and bool(option)
        swept_keys = ModelSpec.model_fields.keys() - NEVER_SWEPT
        if not is_option and axis not in swept_keys:
            names = ", ".join(sorted(swept_keys))
            hint = nearest(axis, swept_keys)
            if not hint:
                hint = f'; name an option ("{ENGINE}NAME"), or one of {names}'
            raise ValueError(f"sweep.{axis}{NOT_SWEPT}{hint}")
        if is_option:
            is_set = option in self.options
        else:
            is_set = axis in self.model_fields_set
        if is_set:
            raise ValueError(f"sweep.{axis}: is also set outside of sweep; remove one of the two")

    def rows(self, keys: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
        """Yield (the keys of a model, places of its values in the ``sweep``) for each choice.

        ``keys``: the keys of the whole spec.  The last axis changes fastest.  Each label names its
        values.
        """
        axes = [list(enumerate(values)) for values in self.sweep.values()]
        for choice in itertools.product(*axes):
            row = dict(keys)
            row.pop("sweep", None)
            places = {}
            label = self.name
            for axis, (number, value) in zip(self.sweep, choice, strict=True):
                places[axis] = f"sweep.{axis}[{number}]"
                option = axis.removeprefix(ENGINE)
                if option == axis:
                    row[axis] = value
                else:
                    row["engine"] = {**row.get("engine", {}), option: value}
                label = f"{label} {option}={shortened(text_of_value(value), 40)}"
                row["label"] = label
            yield row, places


def check_different(axis: str, values: Sequence[Any]) -> None:
    """ValueError if an axis lists a value twice."""
    # As JSON, 1 and true are different values; in Python they are equal.
    texts = [json.dumps(value, sort_keys=True) for value in values]
    for number, text in enumerate(texts):
        if text in texts[:number]:
            raise ValueError(f"sweep.{axis}[{number}]: {shortened(text)} is listed twice")


def text_of_value(value: Any) -> str:
    """Return a value of an axis as it is shown in a label."""
    if isinstance(value, str):
        return value
    return json.dumps(value)


def with_sweep_place(reason: str, places: Mapping[str, str]) -> str:
    """Return ``key: what is wrong``, with the key's place in a ``sweep`` if it has one."""
    for key, place in places.items():
        if reason.startswith((f"{key}:", f"{key}.")):
            return place + reason.removeprefix(key)
    return reason


def json_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of both specs by file name.

    ``python -m compare_q.eval.specs.spec_types`` writes them.
    """
    data: TypeAdapter[Any] = TypeAdapter(DataSpec | list[DataSpec])
    models: TypeAdapter[Any] = TypeAdapter(SweptSpec | list[SweptSpec])
    schemas = {}
    for name, adapter in (("data", data), ("models", models)):
        schema = adapter.json_schema()
        if name == "data":
            # A pack gives all other keys.
            definition = schema["$defs"][DataSpec.__name__]
            definition["anyOf"] = [{"required": definition.pop("required")}, {"required": ["pack"]}]
        else:
            allow_path(schema["$defs"][SweptSpec.__name__])
        for definition in schema["$defs"].values():
            definition["properties"]["$schema"] = {"type": "string"}
        title = f"compare_q spec of {name}: one object or a list of them"
        schemas[f"{name}.schema.json"] = {"title": title, **schema}
    return schemas


def allow_path(definition: dict[str, Any]) -> None:
    """Add to the schema of a model spec the other name of ``model_dir``."""
    definition["properties"]["path"] = {
        "type": "string",
        "description": "another name of model_dir, for a model that is one file",
    }
    definition["required"].remove("model_dir")
    definition["oneOf"] = [{"required": ["model_dir"]}, {"required": ["path"]}]


if __name__ == "__main__":
    for file, content in json_schemas().items():
        target = Path(__file__).parents[1] / "spec" / "schema" / file
        target.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
