"""Rows of a data set -> conversations: lists of messages as chat templates take them, checked strictly.

A row holds ``messages`` (or ``conversations``, or what ``text_column`` names), a list of objects with ``role`` and
``content``, and perhaps ``tools``.  Three things are changed, each as the servers of models do or as a table demands:

- a key of a message whose value is null counts as absent; in parquet and in data sets of the hub, whose rows all have
  the same keys, this holds at every depth;
- ``arguments`` of a tool call that are JSON in a string become the object, which templates expect (vLLM does so too);
- ShareGPT's ``from`` and ``value`` become ``role`` and ``content``: human or user, gpt or assistant, system, tool.

What this file does not know: templates, tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from backends.common import json_files
from backends.common.errors import InputError
from backends.common.messages import printable, shortened
from eval.common.progress import Progress
from eval.specs.types import DataSpec
from eval.text import corpus
from eval.text.hub_datasets import check_column, row_limit

COLUMNS = ("messages", "conversations")
SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system",
            "tool": "tool"}  # fmt: skip


@dataclass(frozen=True)
class Conversation:
    """Messages and tools in JSON types, for a chat template; ``where`` is how errors call its row."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    where: str


def read(spec: DataSpec, progress: Progress) -> list[Conversation]:
    """The conversations of a data spec; InputError that names row and key of the first that is malformed."""
    is_table = spec.path is None or corpus.text_file(spec).suffix.lower() == ".parquet"
    found: list[Conversation] = []
    with progress.phase(f"reading {corpus.display_name(spec)}", unit="rows", total=row_limit(spec) or None) as phase:
        for where, row in corpus.records(spec, lambda names, place: columns(spec, names, place)):
            (column, messages), *rest = row.items()
            found.append(
                Conversation(
                    tuple(message_of(*each, is_table) for each in objects(messages, f"{where}: {column}")),
                    tuple(
                        clean(each, is_table) for _, each in objects(dict(rest).get("tools") or [], f"{where}: tools")
                    ),
                    where,
                )
            )
            phase.advance()
            if len(found) == row_limit(spec):
                break
    if not found:
        raise InputError(f"dataset {spec.dataset!r}: no conversations in it")
    return found


def columns(spec: DataSpec, names: Iterable[str], where: str) -> list[str]:
    """The column of the messages, and ``tools`` where there is such a column."""
    known = list(names)
    column = spec.text_column or next((name for name in COLUMNS if name in known), None)
    if column is None:
        there = shortened(printable(", ".join(known)), 200)
        raise InputError(f"{where}: no key {' or '.join(COLUMNS)}; there are: {there}; name it in text_column")
    check_column(column, known, where)
    return [column, *(["tools"] if "tools" in known else [])]


def objects(value: Any, where: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """(how errors call it, object) of a list, which may also be JSON in a string; InputError for anything else."""
    if isinstance(value, str):
        value = json_files.parsed(value.encode(errors="surrogatepass"), where, strict=False)
    if not isinstance(value, list):
        raise InputError(f"{where}: must be a list of objects, is {kind(value)}")
    json_files_checked(value, where)
    for number, each in enumerate(value):
        if not isinstance(each, dict):
            raise InputError(f"{where}[{number}]: must be an object, is {kind(each)}")
        yield f"{where}[{number}]", each


def json_files_checked(value: Any, where: str) -> None:
    """InputError for what is no Unicode text, or nested too deep for a template."""
    try:
        json_files.check_values(value, strict=False)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None


def message_of(where: str, raw: Mapping[str, Any], is_table: bool) -> dict[str, Any]:
    """One message with ``role``, and with ``content`` or ``tool_calls``."""
    message = {key: value for key, value in clean(raw, is_table).items() if value is not None}
    if "role" not in message and "from" in message:
        message = from_sharegpt(where, message)
    if not isinstance(role := message.get("role"), str) or not role:
        raise InputError(f"{where}.role: must be a name such as user or assistant, is {kind(message.get('role'))}")
    check_content(f"{where}.content", message)
    if calls := message.pop("tool_calls", None):
        message["tool_calls"] = [tool_call(*each) for each in objects(calls, f"{where}.tool_calls")]
    return message


def from_sharegpt(where: str, message: Mapping[str, Any]) -> dict[str, Any]:
    """``role`` and ``content`` in place of ``from`` and ``value``; InputError for a speaker that is not known."""
    speaker = message["from"]
    if not isinstance(speaker, str) or speaker not in SHAREGPT:
        known = ", ".join(SHAREGPT)
        raise InputError(f"{where}.from: {shortened(repr(speaker), 40)} is no known speaker; there are: {known}")
    if not isinstance(message.get("value"), str):
        raise InputError(f"{where}.value: must be text, is {kind(message.get('value'))}")
    if "content" in message:
        raise InputError(f"{where}.content: stands beside value; one of the two is the text, remove the other")
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": SHAREGPT[speaker], "content": message["value"], **rest}


def check_content(where: str, message: Mapping[str, Any]) -> None:
    """InputError unless the content is text, or a list of parts that are text, or absent beside tool calls."""
    content = message.get("content")
    if isinstance(content, list):
        for at, part in objects(content, where):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                what = shortened(repr(part.get("type")), 40)
                raise InputError(f"{at}: a part of type {what}: only text is scored; leave such conversations out")
    elif not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        raise InputError(f"{where}: must be text, is {kind(content)}")


def tool_call(where: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """One tool call, its arguments an object; InputError if it has no name, or arguments that are no JSON object."""
    inside = raw.get("function", raw)
    if not isinstance(inside, dict) or not isinstance(inside.get("name"), str):
        raise InputError(f"{where}: must have a function with a name")
    arguments = inside.get("arguments", {})
    if isinstance(arguments, str):
        arguments = json_files.parsed((arguments or "{}").encode(errors="surrogatepass"), f"{where}.arguments")
    if not isinstance(arguments, dict):
        raise InputError(f"{where}.arguments: must be an object, or a JSON object in a string")
    inside = {**inside, "arguments": arguments}
    return {**raw, "function": inside} if "function" in raw else inside


def clean(value: Any, is_table: bool) -> Any:
    """JSON types; of a table's row without the keys whose value is null, which other rows have."""
    if is_table and isinstance(value, dict):
        return {key: clean(each, is_table) for key, each in value.items() if each is not None}
    return [clean(each, is_table) for each in value] if is_table and isinstance(value, list) else value


def kind(value: Any) -> str:
    """A JSON value's type in words."""
    names = {
        "NoneType": "missing or null",
        "str": "text",
        "dict": "an object",
        "list": "a list",
        "bool": "true or false",
    }
    return names.get(type(value).__name__, "a number")
