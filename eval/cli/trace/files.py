"""The files of a trace: prompts that are read, answers as they come, and the trace that has all of them.

A ``.jsonl`` file of prompts has an object a line: ``prompt`` (text), or ``messages`` (and perhaps ``tools``), as
``"dataset": "chat"`` reads them, up to what is to be answered.  Of any other file each line that is not blank is a
prompt.  Answers are added to a file beside the trace as they come, and the trace appears when it has all of them.

That file, with ``.partial`` behind the trace's name, is JSON lines: first ``{"compare_q_trace": 1, "made": ...}``, then
a record an answer, each line with its checksum.  ``made`` (JSON types) says by what model and how the answers were
made; those of two runs are mixed only where it is the same.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from compare_q.backends.common import json_files, storage
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable, shortened
from compare_q.eval.common.files import write_text
from compare_q.eval.common.progress import Progress
from compare_q.eval.text import conversations, vocabulary
from compare_q.eval.text.conversations import LARGEST_TRACE, Conversation, Template

MARK = "compare_q_trace"
NOT_COMPARED = ("compare_q", "versions", "model", "revision", "stamp")
"""Of ``made``: what may differ between two runs that make one trace.  ``stamp`` is compared on its own."""
TOKENS = ("turn", "input_ids", "response_ids", "finish_reason")
"""What a row has in a trace of tokens, beside its number and the key of its prompt."""
Same = Callable[[str, str], bool]
"""Whether two stamps are of one model."""


# Prompts.


@dataclass(frozen=True)
class Prompt:
    """A conversation up to its answer; ``key``: of its content, and which of several with the same content it is."""

    key: str
    talk: Conversation

    @property
    def turn(self) -> int:
        """How many answers stand in it."""
        return sum(message["role"] == "assistant" for message in self.talk.messages)


def read_prompts(file: Path) -> list[Prompt]:
    """The prompts of a file; InputError that names the line of the first that is malformed."""
    name = printable(file)
    try:
        lines = json_files.read_bytes(file).decode().removeprefix("\ufeff").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}: cannot be read: not UTF-8 text: {error.reason} at byte {error.start:,}") from None
    is_json = file.suffix.lower() == ".jsonl"
    if file.suffix.lower() in (".json", ".parquet", ".csv"):
        raise InputError(f"{name}: prompts are read from .jsonl, or from plain text with a prompt a line")
    asked, seen = [], Counter[str]()
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{name}: line {number}"
            talk = from_json(line, where) if is_json else Conversation((by_user(line.strip()),), (), where)
            digest = hashlib.sha256(json.dumps([talk.messages, talk.tools], sort_keys=True).encode()).hexdigest()[:16]
            seen[digest] += 1
            asked.append(Prompt(digest if seen[digest] == 1 else f"{digest}-{seen[digest]}", talk))
    if not asked:
        raise InputError(f"{name}: no prompts in it")
    return asked


def by_user(text: str) -> dict[str, Any]:
    """A message of the user."""
    return {"role": "user", "content": text}


def from_json(line: str, where: str) -> Conversation:
    """A line of JSON as a conversation up to its answer."""
    row = json_files.parsed(line.encode(), where)
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise InputError(f"{where}: must be an object with prompt, or with messages")
    given = [by_user(row["prompt"])] if "prompt" in row else row["messages"]
    talk = conversations.conversation_of(given, row.get("tools"), where, f"{where}: messages")
    if not talk.messages or talk.messages[-1]["role"] in ("assistant", "system"):
        last = f"ends with the {talk.messages[-1]['role']}" if talk.messages else "is empty"
        raise InputError(f"{where}: messages: {last}; a prompt ends with what is to be answered, of user or tool")
    return talk


def tokenized_prompts(
    file: str, folder: str, trusted: bool, variables: Mapping[str, Any], progress: Progress
) -> dict[str, Any]:
    """The prompts of ``file`` by the tokenizer in ``folder``: what a model is shown, and what ends its answers.

    ``ids``: of each prompt, up to the header of the answer; ``template``: its digest; ``vocab_size``: one more than
    the largest id; ``stop``: [id, token].  Imports Transformers, and so is called apart.
    """
    tokenizer = vocabulary.load_tokenizer(Path(folder), trust_remote_code=trusted)
    template, ids = Template(tokenizer, variables), []
    asked = read_prompts(Path(file))
    with progress.phase(f"tokenizing {Path(file).name}", unit="prompts", total=len(asked)) as phase:
        for prompt in asked:
            text = template.rendered(prompt.talk.messages, prompt.talk, prompt=True)
            conversations.check_written(prompt.talk, len(prompt.talk.messages), text)
            ids.append(tokenizer(text, add_special_tokens=False)["input_ids"])
            phase.advance()
    stop = answer_ends(Path(folder), tokenizer)
    names = [[number, str(tokenizer.convert_ids_to_tokens(number))] for number in stop]
    size = 1 + max(tokenizer.get_vocab().values())
    return {"ids": ids, "template": template.digest, "vocab_size": size, "stop": names}


def answer_ends(folder: Path, tokenizer: Any) -> Sequence[int]:
    """The ids that end an answer: of the model's generation config, or else its config, and the tokenizer's own.

    vLLM stops at all of these.
    """
    named: list[Any] = []
    for name in ("generation_config.json", "config.json"):
        config = json_files.read_object(folder / name, strict=False) if json_files.is_file(folder / name) else {}
        inside = config.get("text_config")
        given = config.get("eos_token_id", inside.get("eos_token_id") if isinstance(inside, dict) else None)
        if given is not None:
            named = given if isinstance(given, list) else [given]
            break
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [each for each in dict.fromkeys([*named, *own]) if type(each) is int and each >= 0]


# Answers, and the trace.


def check_output(output: Path, *, extend: bool) -> None:
    """InputError for a trace that could not be written, or that is there already and is not to be extended."""
    name = printable(output)
    if output.suffix.lower() not in (".json", ".jsonl"):
        raise InputError(f"-o: {name}: must end in .json (tokens, qbench's format) or .jsonl (messages)")
    if not json_files.is_folder(output.absolute().parent):
        raise InputError(f"-o: {name}: cannot be written: there is no such folder")
    if extend and output.suffix.lower() == ".jsonl":
        raise InputError("--extend: goes with a trace of tokens (.json); of messages make a second file")
    if json_files.exists(output) and not extend:
        raise InputError(f"-o: {name}: is there already; move it away, or add to it with --extend")


def differences(one: Mapping[str, Any], other: Mapping[str, Any], same_model: Same) -> str:
    """What of two ``made`` is not the same, in words; empty if answers of both may stand in one trace."""
    others = []
    for key in sorted((one.keys() | other.keys()) - set(NOT_COMPARED)):
        if one.get(key) != other.get(key):
            values = (shortened(json.dumps(made.get(key), ensure_ascii=False), 60) for made in (one, other))
            others.append(f"{key}: {', not '.join(values)}")
    mine, theirs = one.get("stamp"), other.get("stamp")
    is_same = mine == theirs or (isinstance(mine, str) and isinstance(theirs, str) and same_model(mine, theirs))
    return "; ".join(others) or ("" if is_same else "the model's weights")


class Partial:
    """The answers so far: ``records`` by the key of their prompt, in the order in which the trace will have them."""

    def __init__(self, output: Path, stream: IO[bytes], made: Mapping[str, Any], *, extends: bool) -> None:
        self.output, self.stream, self.made, self.extends = output, stream, dict(made), extends
        self.records: dict[str, dict[str, Any]] = {}
        self.n_found = 0

    def add(self, key: str, record: Mapping[str, Any]) -> None:
        """Take an answer, which is on disk afterwards."""
        self.write({"key": key, **record})
        self.records[key] = dict(record)

    def write(self, line: Mapping[str, Any]) -> None:
        """Add one line; OSError if the disk is full."""
        self.stream.write(storage.dump(line))
        self.stream.flush()

    def take(self, source: Path, made: Any, records: Mapping[str, dict[str, Any]], same: Same) -> None:
        """Take the answers of a file; InputError if they were made otherwise."""
        if other := differences(made, self.made, same):
            raise InputError(
                f"{printable(source)}: has {len(records)} answers that were made otherwise ({other}); go on as they "
                "were made, or move it away"
            )
        self.records |= records

    def resume(self, file: Path, same: Same) -> None:
        """Take what an interrupted run has left, without a line that it has not finished; begin if that is nothing."""
        self.stream.seek(0)
        content = self.stream.read()
        whole = content[: content.rfind(b"\n") + 1]
        lines = []
        for number, line in enumerate(whole.splitlines(keepends=True), 1):
            try:
                lines.append(storage.load(line))
            except ValueError:
                raise InputError(f"{printable(file)}: line {number}: is damaged; move it away") from None
        if lines:
            self.take(file, lines[0]["made"], {record.pop("key"): record for record in lines[1:]}, same)
            self.stream.truncate(len(whole))
        elif content:
            raise InputError(f"{printable(file)}: was not written by compare-q trace; move it away")
        else:
            self.write({MARK: 1, "made": self.made})

    def check_asked(self, keys: Sequence[str], prompts: Path) -> None:
        """InputError if an interrupted run has left answers to other prompts, which the trace would not have."""
        if others := set(list(self.records)[self.n_found :]) - set(keys):
            raise InputError(
                f"{printable(partial_of(self.output))}: has {len(others)} answers to prompts that are not in "
                f"{printable(prompts)}; give the same prompts, another -o, or move it away"
            )

    def check_output(self) -> None:
        """InputError if another program has written the trace's file since the run began."""
        if not self.extends and json_files.exists(self.output):
            name = printable(self.output)
            raise InputError(f"-o: {name}: has appeared meanwhile; move it away and run again: the answers are kept")

    def finish(self, keys: Sequence[str], vocab_size: int | None) -> list[dict[str, Any]]:
        """Write the trace: what it had before, then the answers to the prompts of ``keys``, in their order.

        Returns its records.
        """
        self.check_output()
        order = [*list(self.records)[: self.n_found], *keys]
        records = [{"prompt": key, **self.records[key]} for key in dict.fromkeys(order)]
        as_text = self.output.suffix.lower() == ".jsonl"
        text = as_messages(self.made, records) if as_text else as_qbench(self.made, records, vocab_size)
        write_text(self.output, text)
        partial_of(self.output).unlink(missing_ok=True)
        return records


def partial_of(output: Path) -> Path:
    """Where the answers are until the trace has all of them."""
    return output.with_name(f"{output.name}.partial")


@contextmanager
def opened(output: Path, made: Mapping[str, Any], same: Same, *, extends: bool) -> Iterator[Partial]:
    """The answers that a trace has, to be added to; InputError if they were made otherwise, or are no trace's."""
    file = partial_of(output)
    with file.open("a+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(f"{printable(file)}: another compare-q trace is writing it; wait for it") from None
        partial = Partial(output, stream, made, extends=extends)
        was_new = stream.tell() == 0
        try:
            partial.check_output()
            if json_files.is_file(output):
                partial.take(output, *read_trace(output), same)
                partial.n_found = len(partial.records)
            partial.resume(file, same)
            yield partial
        finally:
            if was_new and len(partial.records) == partial.n_found:  # nothing to go on from
                file.unlink(missing_ok=True)


def read_trace(file: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(``made``, records) of a finished trace; InputError for one that others made."""
    trace = json_files.parsed(json_files.read_bytes(file, LARGEST_TRACE), printable(file))
    try:
        return dict(trace["made"]), {row["prompt"]: {key: row[key] for key in TOKENS} for row in trace["rows"]}
    except (TypeError, KeyError, ValueError):
        raise InputError(f"{printable(file)}: was not written by compare-q trace; move it away") from None


def as_qbench(made: Mapping[str, Any], records: Sequence[Mapping[str, Any]], vocab_size: int | None) -> str:
    """The content of a trace of tokens, as qbench_prompts.py writes it, and ``made``, ``prompt``, ``finish_reason``."""
    rows = [{"conversation": number, **record} for number, record in enumerate(records)]
    sizes = [sum(len(row[key]) for row in rows) for key in ("input_ids", "response_ids")]
    counts = {"rows": len(rows), "input_tokens": sizes[0], "output_tokens": sizes[1]}
    head = {"model": made["model"], "template_vars": made["template_vars"], "meta": counts, "made": made}
    known = {} if vocab_size is None else {"vocab_size": vocab_size}
    return json.dumps({**head, **known, "rows": rows}) + "\n"


def as_messages(made: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> str:
    """The content of a trace of messages.

    Answers that did not end are left out: in a chat template every answer ends, and the end would be scored.
    """
    by = {"model": made["model"], "sampling": made["sampling"]}
    rows = [
        {"messages": [*record["messages"], record["message"]], "tools": record["tools"], "made": by}
        for record in records if record["finish_reason"] != "length"
    ]  # fmt: skip
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
