"""Helpers to write messages on one line, to print text of unknown origin safely, and to hide
secrets.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sized
from typing import Any

CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""C0 and C1 controls, line separators, characters that change the direction of text, lone
surrogates."""

SECRET_NAME = re.compile(
    r"(secrets?|password|passwd|passphrase|credentials?|api[-_]?key|[-_.]key|authorization|signature|"
    r"(^|(?<!bos)(?<!eos)(?<!pad)(?<!unk)(?<!cls)(?<!sep)(?<!mask)(?<!image)(?<!audio)(?<!video)[-_.])(token|sig))$",
    re.IGNORECASE,
)
"""Names of options, variables and parameters of URLs whose values are secrets; ``bos_token`` and
its like are not."""
SECRET_TEXT = re.compile(
    r"(?P<user>://)[^/\s?#'\"]+@|(?P<name>[?&;#][\w.%-]+=)(?P<value>[^&\s#'\"]+)|"
    r"\b(?:hf_|sk-|sk-proj-|gh[opsu]_)[A-Za-z0-9]{20,}|(?P<bearer>\bbearer )[\w.~+/=-]{8,}",
    re.IGNORECASE,
)
"""A URL's user and password, a parameter of a URL, keys as the hub and other sites make them, a
header's key."""
SECRET_VALUE = re.compile(r"[^/~\s][^\s:]{11,}")
"""A value of an environment variable that is replaced in texts: a long word that is not a path or
URL."""
SHORTEST_SECRET = 12
"""Characters of the shortest ``SECRET_VALUE``.  A report has thousands of texts that are too short
to hold one."""
HIDDEN = "***"


def is_secret(name: str, value: object) -> bool:
    """True if an option or variable of this name holds a secret: a text that is not like
    ``<token>`` or ``[TOKEN]``.
    """
    if not isinstance(value, str) or value[:1] in ("", "<", "[") or value == HIDDEN:
        return False
    return SECRET_NAME.search(name) is not None


def redacted(value: Any) -> Any:
    """Replace secrets in JSON types or a text by ``***``; a name, a form or the environment
    identifies a secret.
    """
    if isinstance(value, dict):
        return {
            key: HIDDEN if is_secret(str(key), each) else redacted(each)
            for key, each in value.items()
        }
    if isinstance(value, list | tuple):
        return [redacted(each) for each in value]
    if not isinstance(value, str):
        return value
    for name, secret in os.environ.items() if len(value) >= SHORTEST_SECRET else ():
        if secret in value and is_secret(name, secret) and SECRET_VALUE.fullmatch(secret):
            value = value.replace(secret, HIDDEN)
    return SECRET_TEXT.sub(hidden, value)


def hidden(found: re.Match[str]) -> str:
    """The replacement of a ``SECRET_TEXT``."""
    if (
        (name := found["name"])
        and name[1:].lower() != "key="
        and not is_secret(name[1:-1], found["value"])
    ):
        return found[0]
    return f"{found['user'] or name or found['bearer'] or ''}{HIDDEN}{'@' * bool(found['user'])}"


ALIASES = {
    "tokenizer": ("tokenizer_dir", "tokenizer"),
    "model": ("model_dir",),
    "path": ("model_dir",),
    "name": ("label",),
    "ref": ("reference",),
    "is_reference": ("reference",),
    "baseline": ("reference",),
    "engine_args": ("engine",),
    "kv_dtype": ("kv_cache_dtype", "type_k"),
    "kv_cache": ("kv_cache_dtype", "type_k"),
    "tp": ("tensor_parallel_size",),
    "tp_size": ("tensor_parallel_size",),
    "context": ("max_model_len", "eval_len"),
    "ctx": ("max_model_len", "eval_len"),
    "n_ctx": ("max_model_len", "eval_len"),
    "stride": ("eval_stride",),
    "bpw": ("bpw_layer",),
    "seq_len": ("eval_len",),
    "length": ("eval_len",),
    "rows": ("max_rows",),
    "limit": ("max_rows",),
    "ngl": ("n_gpu_layers",),
    "threads": ("n_threads",),
    "attn_backend": ("attention_backend",),
    "loader": ("load_fn",),
}
"""Key of another tool -> the same key here; the first one that is known in its place is suggested.
"""


def nearest(name: str, known: Iterable[str], shown: Mapping[str, str] = {}) -> str:
    """`` (did you mean 'x'?)``, or an empty string if no known name is close or means the same;
    case is ignored.

    ``shown``: known name -> the form in which the hint shows it, such as a path.
    """
    known = list(known)
    if same := next((each for each in ALIASES.get(name.lower(), ()) if each in known), ""):
        return f" (did you mean {shown.get(same, same)!r}?)"
    lowered = {each.lower(): each for each in known}
    close = [lowered[each] for each in difflib.get_close_matches(name.lower(), list(lowered), n=1)]
    return f" (did you mean {shown.get(close[0], close[0])!r}?)" if close else ""


def amount(count: int | float, unit: str) -> str:
    """``1 window``, ``1,200 windows``: a number and its unit, which is given in the singular."""
    return f"{count:,.0f} {unit}{'' if count == 1 else 's'}"


def and_more(things: Sized) -> str:
    """Return `` (and 3 more like it)`` for four things; "" for one."""
    if len(things) > 1:
        return f" (and {len(things) - 1} more like it)"
    return ""


def printable(text: object) -> str:
    """The text on one line, each ``CONTROL`` escaped as in Python, so that it cannot move the
    cursor; no secrets.
    """
    return CONTROL.sub(
        lambda found: found[0].encode("unicode_escape").decode(), redacted(str(text))
    )


def unicode(text: str) -> str:
    """The text as valid Unicode for JSON and pictures: bytes of a name that are not UTF-8 are
    escaped.
    """
    return text.encode(errors="backslashreplace").decode()


def shortened(text: str, limit: int = 200) -> str:
    """The text, cut at ``limit`` characters."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def with_class(error: BaseException) -> str:
    """Return the class and the message of an unexpected error, in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's text with white space folded, cut at ``limit`` characters; its type if it has
    no text.
    """
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return shortened(text, limit)


def bytes_in_words(size: float) -> str:
    """A number of bytes, e.g. ``16.1 GB``."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 999.95:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"


def duration_in_words(seconds: float) -> str:
    """Return ``40 s``, ``3 min`` or ``2.5 h``."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    return f"{float(f'{seconds / 3600:.2g}'):g} h"


def dtype_name(dtype: object) -> str:
    """``bfloat16`` for ``torch.bfloat16`` and for ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
