"""A trace on disk: answers are added to a file beside it as they come, and the trace appears when it has all of them.

That file, with ``.partial`` behind the trace's name, is JSON lines: first ``{"compare_q_trace": 1, "made": ...}``, then
a record an answer, each line with its checksum.  ``made`` (JSON types) says by what model and how the answers were
made; those of two runs are mixed only where it is the same.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from backends.common import json_files, storage
from backends.common.errors import InputError
from backends.common.messages import printable, shortened
from eval.common.files import replacing
from eval.text.conversations import LARGEST_TRACE

MARK = "compare_q_trace"
NOT_COMPARED = ("compare_q", "versions", "model", "revision", "stamp")
"""Of ``made``: what may differ between two runs that make one trace.  ``stamp`` is compared on its own."""
TOKENS = {"turn": int, "input_ids": list, "response_ids": list, "finish_reason": str}
MESSAGES = {"messages": list, "tools": list, "message": dict, "finish_reason": str}
"""What a record has, in a trace of tokens and in one of messages."""
Same = Callable[[str, str], bool]
"""Whether two stamps are of one model."""


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


def differences(one: Mapping[str, Any], other: Mapping[str, Any], same: Same) -> str:
    """What of two ``made`` is not the same, in words; empty if answers of both may stand in one trace."""
    found = []
    for key in sorted((one.keys() | other.keys()) - set(NOT_COMPARED)):
        if one.get(key) != other.get(key):
            mine, theirs = (shortened(json.dumps(each.get(key), ensure_ascii=False), 60) for each in (one, other))
            found.append(f"{key}: {mine}, not {theirs}")
    stamps = one.get("stamp"), other.get("stamp")
    if not found and stamps[0] != stamps[1] and not (all(isinstance(each, str) for each in stamps) and same(*stamps)):  # type: ignore[arg-type]
        found.append("the model's weights")
    return "; ".join(found)


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
        if not isinstance(made, dict):
            raise InputError(f"{printable(source)}: was not written by compare-q trace; move it away")
        if other := differences(made, self.made, same):
            raise InputError(
                f"{printable(source)}: has {len(records)} answers that were made otherwise ({other}); go on as they "
                "were made, or move it away"
            )
        self.records |= records

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

    def finish(self, content: Callable[[list[dict[str, Any]]], str], keys: Sequence[str]) -> list[dict[str, Any]]:
        """Write the trace: what it had before, then the answers to the prompts of ``keys``, in their order.

        Returns its records.
        """
        self.check_output()
        order = [*list(self.records)[: self.n_found], *keys]
        records = [{"prompt": key, **self.records[key]} for key in dict.fromkeys(order)]
        text = content(records)
        with replacing(self.output) as file:
            file.write_text(text, encoding="utf-8")
        partial_of(self.output).unlink(missing_ok=True)
        return records


def partial_of(output: Path) -> Path:
    """Where the answers are until the trace has all of them."""
    return output.with_name(f"{output.name}.partial")


@contextmanager
def opened(output: Path, made: Mapping[str, Any], same: Same, *, extends: bool) -> Iterator[Partial]:
    """The answers that a trace has, to be added to; InputError if they were made otherwise, or are no trace's."""
    file = partial_of(output)
    if json_files.exists(file) and not json_files.is_file(file):
        raise InputError(f"{printable(file)}: is no regular file; move it away")
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
                partial.take(output, *of_trace(output), same)
                partial.n_found = len(partial.records)
            if not resume(partial, file, same):
                partial.write({MARK: 1, "made": partial.made})
            yield partial
        finally:
            if was_new and len(partial.records) == partial.n_found:  # nothing to go on from
                file.unlink(missing_ok=True)


def resume(partial: Partial, file: Path, same: Same) -> bool:
    """Take what an interrupted run has left, without a line that it has not finished; False if that is nothing."""
    partial.stream.seek(0)
    content = partial.stream.read()
    whole = content[: content.rfind(b"\n") + 1]
    lines = whole.split(b"\n")[:-1]
    if content and (not lines or MARK.encode() not in lines[0]):
        if content.startswith(b'{"' + MARK.encode()):  # its first line was cut
            partial.stream.truncate(0)
            return False
        raise InputError(f"{printable(file)}: was not written by compare-q trace; move it away")
    if not lines:
        return False
    kinds = {"key": str, **(MESSAGES if partial.output.suffix.lower() == ".jsonl" else TOKENS)}
    head, *rest = (record_of(line, f"{printable(file)}: line {at}", kinds if at > 1 else {MARK: int, "made": dict})
                   for at, line in enumerate(lines, 1))  # fmt: skip
    partial.take(file, head["made"], {each.pop("key"): each for each in rest}, same)
    partial.stream.truncate(len(whole))
    return True


def record_of(line: bytes, where: str, kinds: Mapping[str, type]) -> dict[str, Any]:
    """A line of a partial as an object that has what ``kinds`` names; InputError."""
    with suppress(ValueError):
        if has(found := storage.load(line + b"\n"), kinds):
            return found
    raise InputError(f"{where}: is damaged; move it away")


def has(found: Any, kinds: Mapping[str, type]) -> bool:
    """Whether ``found`` is an object with these keys, and a value of its type for each."""
    return isinstance(found, dict) and all(isinstance(found.get(key), kind) for key, kind in kinds.items())


def of_trace(file: Path) -> tuple[Any, dict[str, dict[str, Any]]]:
    """(``made``, records) of a finished trace; ``made`` is None for a trace that others made."""
    name = printable(file)
    found = json_files.parsed(json_files.read_bytes(file, LARGEST_TRACE), name)
    made = found.get("made") if isinstance(found, dict) else None
    rows = found.get("rows") if isinstance(found, dict) else None
    if not isinstance(made, dict) or not isinstance(rows, list):
        return None, {}
    if not all(isinstance(row, dict) and isinstance(row.get("prompt"), str) for row in rows):
        raise InputError(f"{name}: rows: one has no prompt, by which answers are told apart; it cannot be extended")
    if not all(has(row, TOKENS) for row in rows):
        raise InputError(f"{name}: rows: one is damaged; move it away")
    return made, {row["prompt"]: {key: row[key] for key in TOKENS} for row in rows}


def as_qbench(made: Mapping[str, Any], vocab_size: int | None) -> Callable[[list[dict[str, Any]]], str]:
    """The content of a trace of tokens, as qbench_prompts.py writes it, and ``made``, ``prompt``, ``finish_reason``."""

    def content(records: list[dict[str, Any]]) -> str:
        rows = [{"conversation": number, **record} for number, record in enumerate(records)]
        sizes = [sum(len(row[key]) for row in rows) for key in ("input_ids", "response_ids")]
        counts = {"rows": len(rows), "input_tokens": sizes[0], "output_tokens": sizes[1]}
        head = {"model": made["model"], "template_vars": made["template_vars"], "meta": counts, "made": made}
        known = {} if vocab_size is None else {"vocab_size": vocab_size}
        return json.dumps({**head, **known, "rows": rows}) + "\n"

    return content


def as_messages(made: Mapping[str, Any]) -> Callable[[list[dict[str, Any]]], str]:
    """The content of a trace of messages.

    Answers that did not end are left out: in a chat template every answer ends, and the end would be scored.
    """
    by = {"model": made["model"], "sampling": made["sampling"]}

    def content(records: list[dict[str, Any]]) -> str:
        rows = [
            {"messages": [*record["messages"], record["message"]], "tools": record["tools"], "made": by}
            for record in records if record["finish_reason"] != "length"
        ]  # fmt: skip
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    return content
