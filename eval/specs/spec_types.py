"""The data spec and the model spec: ExLlamaV3's compare_q keys with the same meaning, and
compare_q's own keys.

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
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, TypeAdapter, model_validator

from ...backends.common.json_files import exists, expanded
from ...backends.common.message_text import CONTROL, is_secret, nearest, redacted, shortened

Method = Literal["exllamav3", "llamacpp", "lm_eval", "gptq", "once"]
"""Methods of cutting a text into windows; ``eval/text/cutting.py`` implements them."""
Long = Literal["truncate", "split", "skip"]
"""How a conversation of more than ``eval_len`` tokens is shortened."""
CHAT = 'with dataset "chat":'
"""Begins the description of keys of conversations."""
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
}
"""Keys that were added after the first results.  A default is left out of a spec's digest, so that
digests of older specs stay valid."""
ONLY_WITH_CHAT = {"score_roles", "score_turns", "long", "chat_template_kwargs"}
"""Keys that are valid with dataset "chat" alone."""
NOT_WITH_CHAT = {
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
LM_EVAL_RUNS_TASKS = "compare_q scores no tasks; run them with lm_eval --log_samples, and compare the samples with compare-q flips"
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
"""Arguments of Transformers' ``apply_chat_template``, and the date, which
``eval/text/conversations.py`` sets."""


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
            is_blank = key in ("label", "group") and isinstance(value, str) and not value.strip()
            if is_blank or (
                key != "engine" and any(CONTROL.search(text) for text in texts_in(value))
            ):
                raise ValueError(f"{key}: must be one line of printable text")
            if key in ("label", "engine", "model_dir") and (at := secret_in(value, key)):
                why = "results and the cache would keep it; set it in the environment, as HF_TOKEN"
                raise ValueError(f"{at}: holds a secret: {why}")
        return self

    def digest(self) -> str:
        """Return the SHA-256 of the spec as canonical JSON with defaults; equal specs have equal
        digests.
        """
        fields = type(self).model_fields
        defaults = {
            key: fields[key].get_default(call_default_factory=True)
            for key in fields.keys() & self._later
        }
        keys = self.model_dump(mode="json").items()
        canonical = json.dumps(
            {key: value for key, value in keys if (key, value) not in defaults.items()},
            sort_keys=True,
        )
        return hashlib.sha256(canonical.encode()).hexdigest()

    def blamed(self, reason: object) -> str:
        """Return a line with the place of the spec and what is wrong with it."""
        return f"{self._place}{reason}"

    def locate(self, name: str) -> str:
        """Return the path of ``name`` if it exists next to the spec, or else ``name``: a path, a
        hub id or a URL.
        """
        path = expanded(name)
        beside = self._folder / path
        if not path.is_absolute() and (
            exists(beside) or (glob.has_magic(name) and glob.glob(str(beside)))
        ):
            return os.path.normpath(beside)
        return str(path) if name.startswith("~") else name


def first(keys: Iterable[str]) -> str:
    """Return the alphabetically first key; empty if there is none."""
    return min(keys, default="")


def secret_in(value: Any, place: str) -> str:
    """Return the place of the first secret in JSON types, which begins with ``place``; empty if
    there is none.
    """
    if isinstance(value, str) and "://" not in value:  # a server's URL is checked by its engine
        return place if redacted(value) != value else ""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    found = (
        f"{place}.{key}" if is_secret(str(key), each) else secret_in(each, f"{place}.{key}")
        for key, each in items
    )
    return next(filter(None, found), "")


def texts_in(value: Any) -> list[str]:
    """Return every string in JSON types, except the keys of objects."""
    if isinstance(value, dict | list):
        return [
            text
            for item in (value.values() if isinstance(value, dict) else value)
            for text in texts_in(item)
        ]
    return [value] if isinstance(value, str) else []


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
        description='a known name ("wiki2"), a hub or local data set, "text" with path, or "chat"',
    )
    path: str | None = Field(
        None, description='.txt, .jsonl or .parquet file, with dataset "text" or "chat"'
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
        description='column that holds the text (default "text") or the conversations (default "messages")',
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
        None, description="tokens per window, if score_last of them are scored"
    )
    chat_template: bool = Field(
        False, description="put the tokenizer's chat template before each window"
    )
    score_roles: list[str] = Field(
        ["assistant"],
        min_length=1,
        max_length=MOST_ROLES,
        description=f"{CHAT} the roles whose tokens are scored",
    )
    score_turns: Literal["all", "last"] = Field(
        "all", description=f"{CHAT} all turns of these roles, or the last"
    )
    long: Long = Field("truncate", description=f"{CHAT} what is done with more than eval_len")
    chat_template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description=f"{CHAT} variables for the chat template"
    )
    pack: str | None = Field(
        None,
        min_length=1,
        description="reference pack that holds the text, its windows and tokenizer: no other key is needed",
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
        given, method, dataset = (
            self.model_fields_set,
            f'with method "{self.method}"',
            f'dataset "{self.dataset}"',
        )
        fixed, is_text = self.method in ("llamacpp", "lm_eval", "gptq"), not self.is_chat
        absent = given & NOT_WITH_CHAT if self.is_chat else set()
        only = set() if self.is_chat else given & ONLY_WITH_CHAT
        taken = RESERVED_VARIABLES & self.chat_template_kwargs.keys()
        stride, every = self.eval_stride, self.score_every
        rules = (
            (self.dataset == "lm_eval", f"dataset: {LM_EVAL_RUNS_TASKS}"),
            (absent, f"{first(absent)}: cannot go with {dataset}; leave it out"),
            (only, f'{first(only)}: only with dataset "chat"'),
            (
                self.warmup_tokens > self.eval_len - 2,
                f"warmup_tokens: {self.warmup_tokens} leaves nothing of eval_len {self.eval_len} to score",
            ),
            (
                self.is_chat and (self.path is None) == (self.dataset_path is None),
                'path: dataset "chat" needs either path, a .jsonl or .parquet file, or dataset_path, one of the hub',
            ),
            (taken, f"chat_template_kwargs: {first(taken)} is not yours to set; leave it out"),
            (is_text and self.method == "exllamav3" and stride is None, "eval_stride: missing"),
            (
                fixed and stride not in (None, self.eval_len),
                f"eval_stride: {method} windows follow one another; leave it out",
            ),
            (
                self.method == "once" and stride is not None and stride >= self.eval_len,
                f"eval_stride: must be below eval_len {method}, or tokens between windows are left out",
            ),
            (
                self.method == "llamacpp" and self.eval_len < 3,
                f"eval_len: must be at least 3 {method}, which scores the second half of a window",
            ),
            (
                self.method != "exllamav3" and self.warmup_tokens,
                f"warmup_tokens: cannot go {method}; leave it out",
            ),
            (
                every is None and self.score_last is not None,
                "score_every: missing; score_last needs it",
            ),
            (
                every is not None and self.score_last is None,
                "score_last: missing; score_every needs it",
            ),
            (
                every is not None and self.method != "exllamav3",
                f"score_every: cannot go {method}; leave it out",
            ),
            (
                every is not None and self.warmup_tokens,
                "score_every: cannot go with warmup_tokens; leave one out",
            ),
            (
                every is not None and every > self.eval_len,
                f"score_every: {every} is more than eval_len {self.eval_len}, so that nothing would be scored",
            ),
            (
                every is not None and (self.score_last or 0) >= every,
                f"score_last: must be below score_every {every}",
            ),
            (fixed and self.chat_template, f"chat_template: cannot go {method}; leave it out"),
            (
                self.detokenize and self.method != "lm_eval",
                'detokenize: rewrites documents, which only method "lm_eval" has; leave it out',
            ),
            (
                self.dataset == "text" and self.path is None,
                'path: missing; dataset "text" needs the path of a .txt, .jsonl or .parquet file',
            ),
            (
                is_text and self.dataset != "text" and self.path is not None,
                'path: only with dataset "text" or "chat"',
            ),
        )
        for is_broken, message in rules:
            if is_broken:
                raise ValueError(message)
        return self

    @property
    def is_chat(self) -> bool:
        """True if the text is conversations."""
        return self.dataset == "chat"

    @property
    def windows(self) -> str:
        """The kind of the windows: the method, or ``chat``."""
        return "chat" if self.is_chat else self.method

    @property
    def longest(self) -> int:
        """Tokens of the longest window; lm-eval does not count the last token, which is only
        predicted.
        """
        return self.eval_len + (self.method == "lm_eval")

    @property
    def stride(self) -> int:
        """Tokens between the starts of two windows."""
        return self.eval_stride or (self.eval_len // 2 if self.method == "once" else self.eval_len)


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

    @model_validator(mode="after")
    def _consistent(self) -> ModelSpec:
        if self.model_dir in ("", []):
            raise ValueError("model_dir: is empty; give a folder, a file or a hub id")
        if isinstance(self.model_dir, list):
            if not (len(self.model_dir) == 2 and isinstance(self.model_dir[0], str)):
                raise ValueError(
                    "model_dir: must be a string, [dir, options] or [dir, override_tensors]"
                )
            names = self._extra if isinstance(self._extra, list) else [self._extra]
            if not isinstance(self._extra, dict) and not (
                names and all(isinstance(name, str) for name in names)
            ):
                wanted = "an object (options) or file names (override tensors)"
                raise ValueError(f"model_dir: the second item must be {wanted}")
            if isinstance(self._extra, dict) and (
                twice := sorted(self._extra.keys() & self.engine.keys())
            ):
                raise ValueError(f"model_dir: option {twice[0]!r} is also in engine")
        if self.phase == "prefill" and (given := self.model_fields_set & {"step", "batch"}):
            raise ValueError(f'{first(given)}: only with "phase": "decode"')
        return self

    @property
    def _directory(self) -> str:
        return self.model_dir if isinstance(self.model_dir, str) else str(self.model_dir[0])

    @property
    def _extra(self) -> Any:
        """The second item of ``model_dir``: options, or file names."""
        return self.model_dir[1] if isinstance(self.model_dir, list) else {}

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
        return {**self.engine, **(self._extra if isinstance(self._extra, dict) else {})}

    @property
    def override_tensors(self) -> tuple[Path, ...]:
        """The files of ``[dir, override_tensors]``, whose tensors replace the model's; a folder:
        all its files.
        """
        extra = [self._extra] if isinstance(self._extra, str) else self._extra
        paths = [Path(self.locate(name)) for name in extra] if isinstance(extra, list) else []
        inside = (sorted(path.glob("*.safetensors")) if exists(path) else [] for path in paths)
        return tuple(
            file for path, files in zip(paths, inside, strict=True) for file in (files or [path])
        )

    def blamed(self, reason: object) -> str:
        """Return a line with the model's name, or the place of the value in a ``sweep``, and what
        is wrong.
        """
        line = str(reason)
        found = placed(line, self._places)
        return found if found != line else f"{self.name}: {line}"


class SweptSpec(ModelSpec):
    """A model spec in a file; with a ``sweep`` it gives several models, one for each choice of values."""

    sweep: dict[str, Annotated[list[Any], Field(min_length=1)]] = Field(
        default_factory=dict,
        description='a model for each value: {"engine.kv_cache_dtype": ["auto", "fp8"]}',
    )

    @model_validator(mode="after")
    def _axes(self) -> SweptSpec:
        if self.sweep and (self.is_reference or self.noise_floor):
            key = (
                "reference"
                if self.reference
                else "noise_floor"
                if self.noise_floor
                else "out_logits"
            )
            raise ValueError(
                f"{key}: this spec gives several models; mark a model in a spec without sweep"
            )
        if (count := math.prod(map(len, self.sweep.values()))) > MOST_ROWS:
            raise ValueError(f"sweep: gives {count:,} models; at most {MOST_ROWS} are possible")
        for axis, values in self.sweep.items():
            option, known = axis.removeprefix(ENGINE), ModelSpec.model_fields.keys() - NEVER_SWEPT
            in_engine = axis.startswith(ENGINE) and bool(option)
            if not in_engine and axis not in known:
                named = f'; name an option ("{ENGINE}NAME"), or one of {", ".join(sorted(known))}'
                cure = nearest(axis, known) or named
                raise ValueError(f"sweep.{axis}: this key cannot have several values{cure}")
            if option in self.options if in_engine else axis in self.model_fields_set:
                raise ValueError(
                    f"sweep.{axis}: is also set outside of sweep; remove one of the two"
                )
            texts = [json.dumps(value, sort_keys=True) for value in values]
            if twice := next(
                (number for number, text in enumerate(texts) if text in texts[:number]), 0
            ):
                raise ValueError(
                    f"sweep.{axis}[{twice}]: {shortened(texts[twice])} is listed twice"
                )
        return self

    def rows(self, keys: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, str]]]:
        """Yield (the keys of a model, places of its values in the ``sweep``) for each choice of
        values.

        ``keys``: the keys of the whole spec.  The last axis changes fastest.  Each label names its
        values.
        """
        for chosen in itertools.product(*(enumerate(values) for values in self.sweep.values())):
            row: dict[str, Any] = {key: value for key, value in keys.items() if key != "sweep"}
            places = {}
            for axis, (number, value) in zip(self.sweep, chosen, strict=True):
                places[axis] = f"sweep.{axis}[{number}]"
                option = axis.removeprefix(ENGINE)
                row |= (
                    {axis: value}
                    if option == axis
                    else {"engine": {**row.get("engine", {}), option: value}}
                )
                text = value if isinstance(value, str) else json.dumps(value)
                row["label"] = f"{row.get('label') or self.name} {option}={shortened(text, 40)}"
            yield row, places


def placed(reason: str, places: Mapping[str, str]) -> str:
    """Return ``key: what is wrong`` with the key's place in a ``sweep``, if its value is from
    there.
    """
    key = next((key for key in places if reason.startswith((f"{key}:", f"{key}."))), None)
    return reason if key is None else places[key] + reason.removeprefix(key)


def json_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of both specs by file name; ``python -m
    compare_q.eval.specs.spec_types`` writes them.
    """
    data: TypeAdapter[Any] = TypeAdapter(DataSpec | list[DataSpec])
    models: TypeAdapter[Any] = TypeAdapter(SweptSpec | list[SweptSpec])
    found = {}
    for name, kind in (("data", data), ("models", models)):
        schema = kind.json_schema()
        if name == "data":  # a pack gives all other keys
            definition = schema["$defs"][DataSpec.__name__]
            definition["anyOf"] = [{"required": definition.pop("required")}, {"required": ["pack"]}]
        for definition in schema["$defs"].values():
            definition["properties"]["$schema"] = {"type": "string"}
        found[f"{name}.schema.json"] = {
            "title": f"compare_q spec of {name}: one object or a list of them",
            **schema,
        }
    return found


if __name__ == "__main__":
    for file, content in json_schemas().items():
        target = Path(__file__).parents[1] / "spec" / "schema" / file
        target.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
