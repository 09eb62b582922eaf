"""Turn conversations into tokens, by the model's chat template, and decide which tokens are scored.

docs/chat.md describes which files are read and which tokens are scored.  A conversation is rendered
and tokenized once, as a whole, without adding special tokens.  The turns to score are found by the
template's generation mask, or by rendered prefixes.  A token is scored if one of its characters is
in a scored part, as in Transformers' ``return_assistant_tokens_mask``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...backends.checkpoint.tokenizers import follow_file
from ...backends.common import json_files
from ...backends.common.errors import InputError
from ...backends.common.message_text import one_line, shortened
from ...backends.common.process import time_limit
from ..common.progress import Progress
from ..specs.spec_types import DataSpec
from . import corpus, text_tokens, vocabulary
from .slice_names import roles_of
from .text_tokens import RENDER_S, TODAY, Chat, Ids, Tokens, tokens_of_documents

SHAREGPT = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
MACRO = re.compile(r"\{%-?\s*(macro|call|filter)\b.*?\{%-?\s*end\1\b", re.DOTALL)
"""Transformers places generation marks inside one of these blocks too early."""
Parts = list[tuple[int, int]]
"""Ranges [begin, end) of a text's characters."""
NOT_SCORED = -1
"""Instead of a role, for tokens that are not scored."""
CONTENT_LEFT_OUT = (
    "{}: message {}: the chat template leaves its content out; perhaps it wants a list of parts, "
    '[{{"type": "text", "text": ...}}]'
)


@dataclass(frozen=True)
class Conversation:
    """Messages and tools in JSON types, for a chat template; errors call its row ``where``."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...]
    where: str


@dataclass(frozen=True)
class Turn:
    """The characters [begin, end) of a rendered conversation that a message has, and its role."""

    begin: int
    end: int
    role: str


class EncodedConversation(NamedTuple):
    """The tokens of a conversation; without any if none of its turns is scored.

    Attributes:
        ids: int32 [n].
        sizes: UTF-8 bytes of each token, int32 [n].
        roles: role of each token, int8 [n], as from ``roles_in``.
        tokens_beyond_turns: number of tokens that extend beyond a turn.
        turn_method: how the turns were found.
        n_bytes: of the rendered conversation; also ``n_words``.
    """

    ids: Ids
    sizes: Ids
    roles: NDArray[np.int8]
    tokens_beyond_turns: int
    turn_method: str
    n_bytes: int
    n_words: int


def read(spec: DataSpec, progress: Progress) -> list[Conversation]:
    """Return the conversations of a data spec.

    InputError names row and key of the first malformed conversation.
    """
    is_table = spec.path is None or corpus.text_file(spec).suffix.lower() == ".parquet"
    conversations: list[Conversation] = []
    for where, row in corpus.records(spec, progress):
        # The column of the messages is the first (``corpus.conversation_columns``).
        column = next(iter(row))
        messages = []
        for name, item in objects(row[column], f"{where}: {column}", is_table):
            messages.append(message_of(name, item))
        tools = [item for _, item in objects(row.get("tools") or [], f"{where}: tools", is_table)]
        conversations.append(Conversation(tuple(messages), tuple(tools), where))
    if not conversations:
        raise InputError(f"dataset {spec.dataset!r}: no conversations in it")
    return conversations


def objects(value: Any, where: str, is_table: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (name in errors, object) for each item of a list, or of a list as JSON in a string.

    InputError for anything else.  ``is_table``: the value is from a table, whose objects have the
    keys of all rows, with null where a row has no such key; null keys are left out at every depth.
    """
    if isinstance(value, str):
        # ``parsed`` reports half of a surrogate pair as an InputError; a plain ``encode`` would
        # raise UnicodeEncodeError.  Not ``strict``: NaN, infinities and repeated keys are taken.
        value = json_files.parsed(value.encode(errors="surrogatepass"), where, strict=False)
    for number, item in enumerate(check_type(value, list, where, "a list of objects")):
        name = f"{where}[{number}]"
        check_type(item, dict, name, "an object")
        if is_table:
            item = without_nulls(item)
        yield name, item


def check_type(value: Any, kind: type, where: str, what: str) -> Any:
    """Return the value if it has the right type; InputError names the type, ``what``."""
    if not isinstance(value, kind):
        raise InputError(f"{where}: must be {what}, is {shortened(repr(value), 40)}")
    return value


def without_nulls(value: Any) -> Any:
    """JSON types without the keys of objects whose value is null."""
    if isinstance(value, list):
        return [without_nulls(item) for item in value]
    if not isinstance(value, dict):
        return value
    result = {}
    for key, item in value.items():
        if item is not None:
            result[key] = without_nulls(item)
    return result


def message_of(where: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """One message with ``role``, and with ``content`` or ``tool_calls``.

    ShareGPT's form is rewritten.
    """
    message = {key: value for key, value in raw.items() if value is not None}
    if "role" not in message and "from" in message:
        message = message_of_sharegpt(where, message)
    check_type(message.get("role"), str, f"{where}.role", "a name such as user or assistant")
    content = message.get("content")
    if isinstance(content, list):
        check_parts(where, content)
    elif content is not None or not message.get("tool_calls"):
        check_type(content, str, f"{where}.content", "text")
    calls = message.pop("tool_calls", None)
    if calls:
        message["tool_calls"] = [
            tool_call(name, call) for name, call in objects(calls, f"{where}.tool_calls")
        ]
    return message


def message_of_sharegpt(where: str, message: dict[str, Any]) -> dict[str, Any]:
    """Return a message with ``role`` and ``content`` from one with ``from`` and ``value``."""
    speaker = message.pop("from")
    content = check_type(message.pop("value", None), str, f"{where}.value", "text")
    role = SHAREGPT.get(str(speaker))
    if role is None:
        speakers = ", ".join(SHAREGPT)
        name = shortened(repr(speaker), 40)
        raise InputError(f"{where}.from: {name}: unknown speaker; there are: {speakers}")
    if "content" in message:
        raise InputError(f"{where}.content: given together with value; remove one of them")
    return {"role": role, "content": content, **message}


def check_parts(where: str, parts: list[Any]) -> None:
    """Raise InputError unless all parts of a message's content are text."""
    for name, part in objects(parts, f"{where}.content"):
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            kind = shortened(repr(part.get("type")), 40)
            raise InputError(
                f"{name}: a part of type {kind}: only text is scored; leave such conversations out"
            )


def tool_call(where: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object.

    InputError without a name, or for other arguments.
    """
    function = raw.get("function", raw)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InputError(f"{where}: must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        # In OpenAI's API the arguments are JSON in a string; templates take an object.  Unlike in
        # ``objects``, NaN, infinities and repeated keys are refused.
        json_text = arguments or "{}"
        arguments = json_files.parsed(
            json_text.encode(errors="surrogatepass"), f"{where}.arguments"
        )
    check_type(arguments, dict, f"{where}.arguments", "a JSON object")
    function = {**function, "arguments": arguments}
    if "function" in raw:
        return {**raw, "function": function}
    return function


def tokenize(
    conversations: Sequence[Conversation],
    folder: Path,
    spec: DataSpec,
    progress: Progress,
    render_s: float = RENDER_S,
) -> Tokens:
    """The tokens of all conversations, one document each.

    A conversation without a turn to score has no tokens.
    """
    tokenizer = vocabulary.load_tokenizer(folder, trust_remote_code=spec.trust_remote_code)
    if not tokenizer.is_fast:
        raise InputError(
            "tokenizer_dir: conversations need a tokenizer that says where its tokens stand "
            "in the text"
        )
    contents = contents_of(conversations)
    with text_tokens.tokenizing_limit(spec, contents, render_s):
        notes = follow_file(tokenizer, folder, contents)
    template = Template(tokenizer, spec.chat_template_kwargs, render_s)
    title = f"tokenizing {corpus.display_name(spec)}"
    documents: list[EncodedConversation] = []
    with progress.phase(title, unit="conversations", total=len(conversations)) as phase:
        for conversation in conversations:
            documents.append(encode(template, conversation, spec))
            phase.advance()
    turn_methods = {document.turn_method for document in documents if document.turn_method}
    chat = Chat(
        np.concatenate([document.roles for document in documents]),
        roles_of(spec),
        " and ".join(sorted(turn_methods)),
        sum(document.tokens_beyond_turns for document in documents),
        template.digest,
    )
    return tokens_of_documents(
        tokenizer,
        [document.ids for document in documents],
        sizes=np.concatenate([document.sizes for document in documents]),
        n_bytes=sum(document.n_bytes for document in documents),
        n_words=sum(document.n_words for document in documents),
        chat=chat,
        notes=notes,
    )


def contents_of(conversations: Sequence[Conversation]) -> list[str]:
    """Return the texts of all messages."""
    contents = []
    for conversation in conversations:
        for message in conversation.messages:
            contents += texts_in(message)
    return contents


def encode(template: Template, conversation: Conversation, spec: DataSpec) -> EncodedConversation:
    """Render and tokenize a conversation, and find the roles of its tokens."""
    text, turns, turn_method = scored_turns(template, conversation, spec)
    with text_tokens.tokenizing_limit(spec, [text], template.render_s):
        encoded = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    offsets = encoded["offset_mapping"]
    roles, tokens_beyond_turns = roles_in(turns, offsets, roles_of(spec))
    n_bytes = 0
    n_words = 0
    if text:  # lm-eval counts one word in an empty text
        n_bytes = len(text.encode())
        n_words = text_tokens.count_words(text)
    else:
        turn_method = ""
    return EncodedConversation(
        ids=np.asarray(encoded["input_ids"], np.int32),
        sizes=text_tokens.byte_sizes(text, offsets),
        roles=roles,
        tokens_beyond_turns=tokens_beyond_turns,
        turn_method=turn_method,
        n_bytes=n_bytes,
        n_words=n_words,
    )


@dataclass(frozen=True)
class Template:
    """A tokenizer's chat template, with the variables of the spec."""

    tokenizer: Any
    variables: Mapping[str, Any]
    render_s: float = RENDER_S

    def source(self, tools: Sequence[dict[str, Any]]) -> str:
        """Return the template's source; with tools it may be another template."""
        try:
            return str(self.tokenizer.get_chat_template(tools=list(tools) or None))
        except Exception as error:  # the tokenizer has no template, or several and no default
            raise InputError(f"tokenizer_dir: no chat template: {one_line(error)}") from None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the templates without and with tools."""
        sources = (self.source([]), self.source([{}]))
        return hashlib.sha256("\0".join(sources).encode()).hexdigest()

    def render(
        self, messages: Sequence[dict[str, Any]], conversation: Conversation, **flags: bool
    ) -> tuple[str, Parts]:
        """Return some messages of a conversation as text, and the parts marked as generated.

        ``flags``: of Transformers' ``apply_chat_template``; parts are marked if requested.
        InputError with the template's reason if it refuses.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        # A template that prints today's date gets a fixed one.
        names = {
            **self.tokenizer.special_tokens_map,
            "strftime_now": TODAY.strftime,
            **self.variables,
        }
        source = self.source(conversation.tools)
        tools = list(conversation.tools) or None
        try:
            with time_limit("it", self.render_s):
                (text,), parts_of_texts = render_jinja_template(
                    [list(messages)], tools, chat_template=source, **flags, **names
                )
        except Exception as error:  # of jinja2, the template's raise_exception or its expressions
            why = f"the chat template refuses these messages: {shortened(one_line(error), 200)}"
            raise InputError(
                f"{conversation.where}: {why}; leave them out, or change them"
            ) from None
        parts = []
        for parts_of_text in parts_of_texts:
            for begin, end in parts_of_text:
                parts.append((begin, end))
        return text, parts

    @cached_property
    def turn_end(self) -> re.Pattern[str]:
        """The end of a turn: its last special token, and the white space after it."""
        special = []
        for token in self.tokenizer.added_tokens_decoder.values():
            if token.special:
                special.append(token.content)
        # The longest first: a token may begin like another one.
        special.sort(key=len, reverse=True)
        alternatives = "|".join(re.escape(token) for token in special)
        if not alternatives:
            alternatives = "(?!)"  # matches nothing
        return re.compile(f"(?:{alternatives})(\\s*)\\Z")


def scored_turns(
    template: Template, conversation: Conversation, spec: DataSpec
) -> tuple[str, list[Turn], str]:
    """Return (the rendered conversation, its scored turns, how they were found).

    All three are empty if no turn is scored.
    """
    turn_numbers = []
    for number, message in enumerate(conversation.messages):
        if message["role"] in spec.score_roles:
            turn_numbers.append(number)
    if not turn_numbers:
        return "", [], ""
    has_marks = marks_are_usable(template.source(conversation.tools))
    n_messages = len(conversation.messages)
    if spec.score_turns == "last":
        turn_numbers = turn_numbers[-1:]
        n_messages = turn_numbers[0] + 1
        # A mask has all turns of the assistant, also those that are not scored.
        has_marks = False
    by_mask = has_marks and set(spec.score_roles) == {"assistant"}
    text, marked_parts = template.render(
        conversation.messages[:n_messages], conversation, return_assistant_tokens_mask=by_mask
    )
    check_written(conversation, n_messages, text)
    if by_mask:
        check_marks(conversation, turn_numbers, text, marked_parts)
        turns = [Turn(begin, end, "assistant") for begin, end in marked_parts]
        return text, turns, "generation mask"
    turns = [turn_in(text, template, conversation, number) for number in turn_numbers]
    return text, turns, "rendered prefixes"


def marks_are_usable(source: str) -> bool:
    """Return True if a template marks what is generated, but not in a macro (``MACRO``)."""
    if not GENERATION_TAG.search(source):
        return False
    return not any(GENERATION_TAG.search(macro[0]) for macro in MACRO.finditer(source))


def turn_in(text: str, template: Template, conversation: Conversation, number: int) -> Turn:
    """Return the place of a message in the rendered conversation, ``text``.

    It is found by rendering the messages before it and up to it.

    The assistant's header is in the first rendering (its generation prompt); other roles' headers
    are not known, so that their turns begin with the content.  White space after a turn's last
    special token is not generated.  Raises InputError if the template renders these messages
    differently when more messages follow.
    """
    message = conversation.messages[number]
    messages_before = conversation.messages[:number]
    by_assistant = message["role"] == "assistant"
    name = f"{conversation.where}: message {number + 1} ({message['role']})"
    if not messages_before and by_assistant:
        raise InputError(
            f"{name}: an assistant who speaks first answers nothing; "
            "put a message before it or remove it"
        )
    head = ""
    if messages_before:
        head, _ = template.render(messages_before, conversation, add_generation_prompt=by_assistant)
    body, _ = template.render(conversation.messages[: number + 1], conversation)
    if not (text.startswith(body) and body.startswith(head)):
        raise InputError(
            f"{name}: the chat template renders this turn differently when more messages follow "
            "or before it is written (reasoning?), so that its tokens cannot be found: use "
            '"score_turns": "last", or chat_template_kwargs such as {"enable_thinking": false}'
        )
    if not is_written(message, body[len(head) :]):
        raise InputError(CONTENT_LEFT_OUT.format(conversation.where, number + 1))
    end = len(body)
    turn_end = template.turn_end.search(body, len(head))
    if turn_end is not None:
        end = turn_end.start(1)
    begin = len(head)
    if not by_assistant:
        begin = content_begin(message, body, len(head))
    if begin < 0:
        raise InputError(
            f"{name}: the chat template changes its content, so that its tokens cannot be found"
        )
    return Turn(min(begin, end), end, message["role"])


def texts_in(message: Mapping[str, Any]) -> list[str]:
    """Return the non-blank texts of a message's content, without white space around them."""
    content = message.get("content") or ""
    if isinstance(content, str):
        texts = [content]
    else:
        texts = [part["text"] for part in content]
    return [text.strip() for text in texts if text.strip()]


def in_json(text: str) -> str:
    """Return a text as ``tojson`` writes it, without the quotes.

    Some templates render tool messages like this.
    """
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_written(message: Mapping[str, Any], rendering: str) -> bool:
    """Return True if the last word of each text of a message is in a rendering.

    Only the last one: templates may leave out reasoning before it.
    """
    for text in texts_in(message):
        word = text.split()[-1]
        if word not in rendering and in_json(word) not in rendering:
            return False
    return True


def content_begin(message: Mapping[str, Any], body: str, least: int) -> int:
    """Return where the content of the last message begins in ``body``, at least ``least``.

    -1 if it is not found.
    """
    begin = len(body)
    # From the end: the words of a short text may be in the header, too.
    for text in reversed(texts_in(message)):
        as_text = body.rfind(text, least, begin)
        as_json = body.rfind(in_json(text), least, begin)
        begin = max(as_text, as_json)
        if begin < 0:
            break
    return begin


def check_written(conversation: Conversation, n_messages: int, text: str) -> None:
    """Raise InputError unless ``text`` has the last words of the first messages.

    Some templates silently leave out contents; templates for plain text print a list of parts,
    which is an InputError too.
    """
    for number, message in enumerate(conversation.messages[:n_messages], 1):
        if not is_written(message, text):
            raise InputError(CONTENT_LEFT_OUT.format(conversation.where, number))
        content = message.get("content")
        if isinstance(content, list) and content and str(content) in text:
            raise InputError(
                f"{conversation.where}: message {number}: the chat template takes no list of parts "
                "as content and prints its brackets; write the content as text"
            )


def check_marks(
    conversation: Conversation, turn_numbers: Sequence[int], text: str, marked_parts: Parts
) -> None:
    """Raise InputError unless each scored message has a separate marked part with its last words.

    The parts must be in the order of the messages.
    """
    first = 0
    n_after = len(turn_numbers)
    for number in turn_numbers:
        n_after -= 1
        # Enough parts must remain for the messages after this one.
        candidates = range(first, len(marked_parts) - n_after)
        message = conversation.messages[number]
        part = part_of_message(message, text, marked_parts, candidates)
        if part is None:
            raise InputError(
                f"{conversation.where}: message {number + 1}: the chat template does not mark it "
                "as generated, but marks other messages or other characters; use "
                '"score_turns": "last", which does without marks'
            )
        first = part + 1


def part_of_message(
    message: Mapping[str, Any], text: str, parts: Parts, candidates: range
) -> int | None:
    """Return the first candidate whose part has a message's last words; None without one."""
    for candidate in candidates:
        begin, end = parts[candidate]
        if is_written(message, text[begin:end]):
            return candidate
    return None


def roles_in(
    turns: Sequence[Turn], offsets: Sequence[tuple[int, int]], role_names: Sequence[str]
) -> tuple[NDArray[np.int8], int]:
    """Return (role of each token, int8 [n]; number of tokens that extend beyond a turn).

    A role is an index into ``role_names``; a token without a character in a turn is ``NOT_SCORED``.
    A token with characters of two turns belongs to the first one.  ``offsets``: the tokens'
    characters.  A token without characters (white space that a tokenizer leaves out) counts as the
    text between its neighbours.
    """
    begin, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
    end_before = end
    if len(end):
        end_before = np.concatenate(([0], np.maximum.accumulate(end)[:-1]))
    begin = np.where(end > begin, begin, np.minimum(end_before, end))
    roles = np.full(len(end), NOT_SCORED, np.int8)
    n_beyond = 0
    for turn in turns:
        is_inside = (begin < turn.end) & (end > turn.begin)
        is_beyond = (begin < turn.begin) | (end > turn.end)
        n_beyond += int(np.count_nonzero(is_inside & is_beyond))
        roles[is_inside & (roles == NOT_SCORED)] = role_names.index(turn.role)
    return roles, n_beyond
