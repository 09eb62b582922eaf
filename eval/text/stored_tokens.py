"""Keep tokens in the cache, and in reference packs.

Both have the arrays of ``arrays_of``: the cache a ``.npz`` file, a pack a safetensors file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...backends.common import json_files, storage
from ...backends.common.errors import InputError
from ...backends.common.message_text import one_line
from ...backends.reference import pack_files
from ..common.cache import Cache
from .text_tokens import Chat, Tokens


def load(cache: Cache, key: str) -> Tokens | None:
    """Read tokens from the cache; None if they are missing, damaged or stored under another key."""
    try:
        arrays = storage.read_arrays(cache.path("tokens", key, ".npz"))
    except (InputError, OSError, ValueError):
        return None
    return tokens_from_arrays(arrays, key)


def save(file: Path, tokens: Tokens, key: str) -> None:
    """Write tokens into a file that ``load`` reads under this key; InputError for a full disk."""
    with storage.keeping("the tokens", file.parent):
        storage.write_arrays(file, **arrays_of(tokens, key))


def tokens_of_pack(folder: Path) -> Tokens:
    """Return the tokens of a reference pack.

    InputError if they are damaged, or of an older compare_q.
    """
    file = folder / pack_files.TOKENS_FILE
    arrays, texts = pack_files.arrays_of(file)
    if "facts" in texts and "special" not in arrays:
        raise InputError(
            f"{file}: written by an older compare_q, without special tokens and roles; "
            "record the pack again with compare-q pack, in another folder"
        )
    try:
        # A pack may come from anybody: everything in it is checked.
        check_arrays(arrays)
        tokens = tokens_from_arrays({**arrays, **texts}, pack_files.TOKENS_FILE)
        if tokens is not None:
            check_facts(tokens)
    except RecursionError:
        raise InputError(f"{file}: damaged: {json_files.TOO_DEEP}") from None
    except (KeyError, ValueError, TypeError) as error:
        raise InputError(f"{file}: damaged: {one_line(error)}") from None
    if tokens is None:
        raise InputError(f"{file}: holds no tokens of this compare_q")
    return tokens


def write_pack(folder: Path, tokens: Tokens) -> None:
    """Write the tokens into a reference pack; strings are metadata of the file."""
    from safetensors.numpy import save_file

    arrays = {}
    texts = {}
    for name, value in arrays_of(tokens, pack_files.TOKENS_FILE).items():
        if isinstance(value, str):
            texts[name] = value
        else:
            # Not ascontiguousarray, which makes an array of one element of a number (``top_id``).
            arrays[name] = np.asarray(value, order="C")
    save_file(arrays, folder / pack_files.TOKENS_FILE, texts)


def check_arrays(arrays: Mapping[str, Any]) -> None:
    """ValueError unless a pack's arrays have their types and shapes, and fit each other."""
    names = ["ids", "prefix", "sizes", "special", "ends", "numbers"]
    if "roles" in arrays:
        names.append("roles")
    for name in names:
        pack_files.check_array(arrays, name, "i", 1)
    if "sampler_logprobs" in arrays:
        check_sampler_logprobs(arrays)
    if "top_id" not in arrays or arrays["top_id"].dtype.kind != "i" or arrays["top_id"].size != 1:
        raise ValueError("top_id is not an integer")
    ids = arrays["ids"]
    if ids.min(initial=0) < 0 or arrays["prefix"].min(initial=0) < 0:
        raise ValueError("a token has a negative id")
    if len(arrays["sizes"]) not in (0, len(ids)):
        raise ValueError("the sizes do not fit the tokens")
    ends = arrays["ends"]
    if (np.diff(ends) < 0).any() or ends.min(initial=0) < 0 or ends.max(initial=0) > len(ids):
        raise ValueError("the documents do not fit the tokens")


def check_sampler_logprobs(arrays: Mapping[str, Any]) -> None:
    """ValueError unless each token has a log-probability, or NaN if it was not sampled."""
    pack_files.check_array(arrays, "sampler_logprobs", "f", 1)
    logprobs = arrays["sampler_logprobs"]
    if len(logprobs) != len(arrays["ids"]):
        raise ValueError("the log-probabilities of sampled tokens do not fit the tokens")
    # Comparisons with NaN are False.
    if np.isinf(logprobs).any() or (logprobs > 0.0).any():
        raise ValueError("a sampled token has no finite log-probability")


def check_facts(tokens: Tokens) -> None:
    """ValueError unless each fact about a pack's tokens has the type of a string or an integer."""
    texts = [tokens.source, tokens.read, *tokens.notes]
    chat = tokens.chat
    if chat is not None:
        texts += [chat.turn_method, chat.template, *chat.role_names]
        if type(chat.tokens_beyond_turns) is not int:
            raise ValueError("the number of tokens beyond scored parts is not an integer")
    if not all(isinstance(text, str) for text in texts):
        raise ValueError("a fact that is a text has another type")


def arrays_of(tokens: Tokens, key: str) -> dict[str, Any]:
    """Return arrays and strings that ``tokens_from_arrays`` turns into the tokens again."""
    leading_token = tokens.leading_token
    if leading_token is None:
        leading_token = -1
    sizes = tokens.sizes
    if sizes is None:
        sizes = np.zeros(0, np.int32)
    arrays: dict[str, Any] = {
        "ids": tokens.ids,
        "prefix": tokens.prefix,
        "top_id": np.int64(tokens.top_id),
        "vocabulary": tokens.vocabulary,
        "numbers": np.array([leading_token, tokens.n_bytes, tokens.n_words], np.int64),
        "ends": tokens.ends,
        "sizes": sizes,
        "special": tokens.special,
        "facts": json.dumps([key, tokens.notes, tokens.source, tokens.read]),
    }
    if tokens.sampler_logprobs is not None:
        arrays["sampler_logprobs"] = tokens.sampler_logprobs
    chat = tokens.chat
    if chat is not None:
        facts = [chat.turn_method, chat.tokens_beyond_turns, chat.template, chat.role_names]
        arrays["roles"] = chat.roles
        arrays["chat"] = json.dumps(facts)
    return arrays


def tokens_from_arrays(arrays: Mapping[str, Any], key: str) -> Tokens | None:
    """Return the tokens from the arrays of ``arrays_of``; None if stored under another key."""
    stored_key = ""
    notes: tuple[str, ...] = ()
    origin: list[str] = []  # source, and the time when it was read
    if "facts" in arrays:
        stored_key, notes, *origin = json.loads(str(arrays["facts"]))
    if stored_key != key:
        return None
    numbers = [int(number) for number in arrays["numbers"]]
    leading_token: int | None
    leading_token, n_bytes, n_words = numbers
    if leading_token < 0:
        leading_token = None
    sizes = arrays["sizes"]
    if not sizes.size:
        sizes = None
    chat = chat_from_arrays(arrays)
    if len(origin) > 2:
        raise ValueError("the tokens have more facts than a source and a time")
    source, read = [*origin, "", ""][:2]
    return Tokens(
        arrays["ids"],
        arrays["prefix"],
        arrays["top_id"].item(),
        str(arrays["vocabulary"]),
        leading_token,
        arrays["ends"],
        sizes,
        n_bytes,
        n_words,
        chat,
        arrays["special"],
        tuple(notes),
        source,
        read,
        arrays.get("sampler_logprobs"),
    )


def chat_from_arrays(arrays: Mapping[str, Any]) -> Chat | None:
    """Return the facts about conversations; None for a plain text."""
    if "chat" not in arrays:
        return None
    turn_method, tokens_beyond_turns, template, role_names = json.loads(str(arrays["chat"]))
    roles = arrays["roles"]
    if len(roles) != len(arrays["ids"]) or roles.max(initial=-1) >= len(role_names):
        raise ValueError("the roles do not fit the tokens")
    return Chat(roles, tuple(role_names), turn_method, tokens_beyond_turns, template)
