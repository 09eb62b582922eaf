"""Check that text, reference and models use one tokenizer; otherwise no score is comparable."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence, Set
from functools import cache
from pathlib import Path
from typing import Any

from ...backends.checkpoint.tokenizers import TOKENIZER_FILE
from ...backends.common import json_files
from ...backends.common.errors import InputError
from ...backends.common.message_text import one_line
from ..common import processes

NO_IDS: frozenset[int] = frozenset()


def load_tokenizer(folder: Path, *, trust_remote_code: bool) -> Any:
    """Load the tokenizer in a folder by Transformers; InputError if it cannot be loaded."""
    import transformers

    json_files.check_no_pipes(folder)
    transformers.utils.logging.set_verbosity_error()
    try:
        return transformers.AutoTokenizer.from_pretrained(
            folder, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # tokenizers, sentencepiece and Transformers each raise their own
        reason = f"no {TOKENIZER_FILE}; name the folder or hub id of the unquantized model"
        if has_tokenizer_files(folder):
            reason = one_line(error)
        raise InputError(f"tokenizer_dir: {folder}: no usable tokenizer: {reason}") from None


def has_tokenizer_files(folder: Path) -> bool:
    """Return True if a folder has a file that may be a tokenizer's, by its name."""
    patterns = ("*token*", "vocab*", "*.model")
    return any(any(folder.glob(pattern)) for pattern in patterns)


def plain_tokens(tokenizer: Any, ids_in_chats: Iterable[int] = NO_IDS) -> dict[int, str]:
    """Return id -> token, without added special tokens except those in ``ids_in_chats``.

    A model that never sees a special token needs no logit for it.  For example, a text model may
    have the tokenizer of a multimodal model, whose image token is not in the text model's
    vocabulary.
    """
    left_out = marked_ids(tokenizer.added_tokens_decoder) - set(ids_in_chats)
    return without_ids(tokenizer.get_vocab(), left_out)


def marked_ids(added_tokens: Mapping[int, Any]) -> set[int]:
    """Return the ids of the added tokens (id -> token) that are marked as special."""
    return {number for number, token in added_tokens.items() if token.special}


def without_ids(vocabulary: Mapping[str, int], left_out: Set[int]) -> dict[int, str]:
    """Return id -> token from token -> id, without some ids."""
    return {number: token for token, number in vocabulary.items() if number not in left_out}


def special_ids(tokenizer: Any) -> list[int]:
    """Return the sorted ids of the special tokens.

    These are the tokens that the tokenizer names (EOS, ...), and the added tokens that are marked
    as special.  Templates and tool calls are made of these tokens.
    """
    named = {number for number in tokenizer.all_special_ids if number is not None}
    return sorted(marked_ids(tokenizer.added_tokens_decoder) | named)


def digest(vocabulary: Mapping[int, str]) -> str:
    """Return the SHA-256 of a vocabulary's ids and tokens."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


@cache
def vocabulary_of_folder(
    folder: Path, trusted: bool, ids_in_chats: frozenset[int] = NO_IDS
) -> Mapping[int, str] | None:
    """Return the vocabulary of the tokenizer in a folder, by Transformers in a subprocess.

    None if it does not load.  ``trusted``: it may run code.  ``ids_in_chats``: as for
    ``plain_tokens``.
    """
    pairs = processes.run_in_subprocess(
        vocabulary_pairs,
        f"reading the tokenizer in {folder}",
        folder=str(folder),
        trusted=trusted,
        ids_in_chats=sorted(ids_in_chats),
    )
    if pairs is None:
        return None
    return dict(pairs)


def vocabulary_pairs(
    folder: str, trusted: bool, ids_in_chats: Sequence[int]
) -> list[tuple[int, str]] | None:
    """Return (id, token) pairs of a folder's vocabulary; None if its tokenizer does not load.

    Imports Transformers.  Pairs, because JSON has no objects with numbers as keys.
    """
    try:
        tokenizer = load_tokenizer(Path(folder), trust_remote_code=trusted)
        return list(plain_tokens(tokenizer, ids_in_chats).items())
    except InputError:
        return None


@cache
def vocabulary_of_file(
    folder: Path, ids_in_chats: frozenset[int] = NO_IDS
) -> Mapping[int, str] | None:
    """Return the vocabulary in tokenizer.json, with the config's marks of special tokens.

    None if it cannot be read.  This takes 0.2 s for 49,152 tokens, ``vocabulary_of_folder`` 5 s.
    Transformers may know more special tokens, such as one that the config calls EOS, and then
    returns fewer plain tokens.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(json_files.read_bytes(folder / TOKENIZER_FILE))
        config_file = folder / "tokenizer_config.json"
        config: Mapping[str, Any] = {}
        if config_file.is_file():
            config = json_files.read_object(config_file, strict=False)
        special = marked_ids(tokenizer.get_added_tokens_decoder())
        for number, token in config.get("added_tokens_decoder", {}).items():
            if token["special"]:
                special.add(int(number))
    except Exception:  # tokenizers raises bare Exception; the config may hold anything
        return None
    return without_ids(tokenizer.get_vocab(), special - ids_in_chats)


def disagreement(
    model: Path | Mapping[int, str],
    data_folder: Path,
    *,
    trusted: bool,
    data_trusted: bool,
    ids_in_chats: frozenset[int] = NO_IDS,
) -> str:
    """Describe an id that has different tokens in a model's vocabulary and in the data's tokenizer.

    Returns an empty string if they agree.  ``model``: its folder, or its vocabulary.  ``trusted``,
    ``data_trusted``: True if the spec trusts code.  ``ids_in_chats``: ids of special tokens that
    are compared too if ``model`` is a folder.  Ids in only one of the vocabularies are ignored.  A
    folder without a tokenizer agrees with every other.  The files are compared first; only
    Transformers can confirm a difference.
    """
    source = "the model's own vocabulary"
    if isinstance(model, Path):
        source = str(model)
        if have_same_file(model, data_folder) or not any(model.glob("tokenizer*")):
            return ""
    else:
        ids_in_chats = NO_IDS

    mine: Mapping[int, str] | None = None
    # A tokenizer's own code may change the vocabulary that is in its file.
    if not (trusted or data_trusted):
        if isinstance(model, Path):
            mine = vocabulary_of_file(model, ids_in_chats)
        else:
            mine = model
        theirs = vocabulary_of_file(data_folder, ids_in_chats)
        if mine is not None and theirs is not None and first_difference(mine, theirs) is None:
            return ""

    if isinstance(model, Path):
        mine = vocabulary_of_folder(model, trusted, ids_in_chats)
    else:
        mine = model
    theirs = vocabulary_of_folder(data_folder, data_trusted, ids_in_chats)
    if mine is None or theirs is None:
        return ""
    number = first_difference(mine, theirs)
    if number is None:
        return ""
    return f"token {number} is {mine[number]!r} in {source} and {theirs[number]!r} in {data_folder}"


def have_same_file(folder: Path, other: Path) -> bool:
    """Return True if two folders have the same tokenizer.json."""
    files = (folder / TOKENIZER_FILE, other / TOKENIZER_FILE)
    if not (files[0].is_file() and files[1].is_file()):
        return False
    return files[0].read_bytes() == files[1].read_bytes()


def first_difference(one: Mapping[int, str], other: Mapping[int, str]) -> int | None:
    """Return the lowest id that has different tokens in two vocabularies; None if they agree."""
    different = [number for number in one.keys() & other.keys() if one[number] != other[number]]
    return min(different, default=None)
