"""Check that text, reference and models use the same tokenizer.  Scores are not comparable
otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...backends.common import json_files
from ...backends.common.errors import InputError
from ...backends.common.message_text import one_line
from ..common import processes

FILE = "tokenizer.json"
NONE: frozenset[int] = frozenset()


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
        held = any(True for name in ("*token*", "vocab*", "*.model") for _ in folder.glob(name))
        reason = (
            one_line(error)
            if held
            else f"no {FILE}; name the folder or hub id of the unquantized model"
        )
        raise InputError(f"tokenizer_dir: {folder}: no usable tokenizer: {reason}") from None


def plain_tokens(tokenizer: Any, seen: Iterable[int] = NONE) -> dict[int, str]:
    """Return id -> token, without added special tokens except those in ``seen``.

    A model that never sees a special token needs no logit for it.  For example, a text model may
    have the tokenizer of a multimodal model, whose image token is not in the text model's
    vocabulary.
    """
    special = {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    } - set(seen)
    return {
        number: token for token, number in tokenizer.get_vocab().items() if number not in special
    }


def special_ids(tokenizer: Any) -> list[int]:
    """Return the sorted ids of the special tokens.

    These are the tokens that the tokenizer names (EOS, ...), and the added tokens that are marked
    as special.  Templates and tool calls are made of these tokens.
    """
    marked = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    named = {number for number in tokenizer.all_special_ids if number is not None}
    return sorted(marked | named)


def digest(vocabulary: Mapping[int, str]) -> str:
    """Return the SHA-256 of a vocabulary's ids and tokens."""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


@cache
def of_folder(folder: Path, trusted: bool, seen: frozenset[int] = NONE) -> Mapping[int, str] | None:
    """Return the vocabulary of the tokenizer in a folder, by Transformers in a subprocess; None if
    it does not load.

    ``trusted``: it may run code.  ``seen``: as for ``plain_tokens``.
    """
    what = f"reading the tokenizer in {folder}"
    pairs = processes.run_in_subprocess(
        pairs_of, what, folder=str(folder), trusted=trusted, seen=sorted(seen)
    )
    return None if pairs is None else dict(pairs)


def pairs_of(folder: str, trusted: bool, seen: Sequence[int]) -> list[tuple[int, str]] | None:
    """Return (id, token) pairs of a folder's vocabulary; None if its tokenizer does not load.
    Imports Transformers.
    """
    try:
        return list(
            plain_tokens(load_tokenizer(Path(folder), trust_remote_code=trusted), seen).items()
        )
    except InputError:
        return None


@cache
def of_file(folder: Path, seen: frozenset[int] = NONE) -> Mapping[int, str] | None:
    """Return the vocabulary in tokenizer.json, with the config's marks of special tokens; None if
    it cannot be read.

    This takes 0.2 s for 49,152 tokens, ``of_folder`` 5 s.  Transformers may know more special
    tokens, such as one that the config calls EOS, and then returns fewer plain tokens.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(json_files.read_bytes(folder / FILE))
        config = folder / "tokenizer_config.json"
        marks = json_files.read_object(config, strict=False) if config.is_file() else {}
        special = {
            number
            for number, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        special |= {
            int(number)
            for number, token in marks.get("added_tokens_decoder", {}).items()
            if token["special"]
        }
    except Exception:  # tokenizers raises bare Exception; the config may hold anything
        return None
    return {
        number: token
        for token, number in tokenizer.get_vocab().items()
        if number not in special - seen
    }


def disagreement(
    model: Path | Mapping[int, str],
    data_folder: Path,
    *,
    trusted: bool,
    data_trusted: bool,
    seen: frozenset[int] = NONE,
) -> str:
    """Describe an id that has different tokens in a model's vocabulary and in the data's tokenizer.

    Returns an empty string if they agree.  ``model``: its folder, or its vocabulary.  ``trusted``,
    ``data_trusted``: True if the spec trusts code.  ``seen``: ids of special tokens that are
    compared too if ``model`` is a folder.  Ids in only one of the vocabularies are ignored.  A
    folder without a tokenizer agrees with every other.  The files are compared first; only
    Transformers can confirm a difference.
    """
    folder, known = (model, None) if isinstance(model, Path) else (None, model)
    seen = seen if folder else NONE
    files = [folder / FILE, data_folder / FILE] if folder else []
    is_same = (
        files and all(map(Path.is_file, files)) and len({file.read_bytes() for file in files}) == 1
    )
    if is_same or (folder and not any(folder.glob("tokenizer*"))):
        return ""
    if not (trusted or data_trusted):
        mine, theirs = of_file(folder, seen) if folder else known, of_file(data_folder, seen)
        if mine is not None and theirs is not None and differing(mine, theirs) is None:
            return ""
    mine = of_folder(folder, trusted, seen) if folder else known
    theirs = of_folder(data_folder, data_trusted, seen)
    if mine is None or theirs is None or (number := differing(mine, theirs)) is None:
        return ""
    where = folder or "the model's own vocabulary"
    return f"token {number} is {mine[number]!r} in {where} and {theirs[number]!r} in {data_folder}"


def differing(one: Mapping[int, str], other: Mapping[int, str]) -> int | None:
    """Return the lowest id that has different tokens in two vocabularies; None if they agree."""
    return min(
        (number for number in one.keys() & other.keys() if one[number] != other[number]),
        default=None,
    )
