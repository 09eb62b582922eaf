"""Write messages on one line, print text of unknown origin safely, and hide secrets."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Mapping, Sequence, Sized
from typing import Any

CONTROL = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""C0 and C1 controls, line separators, characters that change the direction of text, lone
surrogates."""

SECRET_NAME = re.compile(
    r"(secrets?|password|passwd|passphrase|credentials?|api[-_]?key|[-_.]key|authorization|"
    r"signature|"
    r"(^|(?<!bos)(?<!eos)(?<!pad)(?<!unk)(?<!cls)(?<!sep)(?<!mask)(?<!image)(?<!audio)(?<!video)"
    r"[-_.])(token|sig))$",
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
    """True if an option or variable of this name holds a secret.

    A value like ``<token>`` or ``[TOKEN]`` is a placeholder, and not a secret.
    """
    if not isinstance(value, str) or value[:1] in ("", "<", "[") or value == HIDDEN:
        return False
    return SECRET_NAME.search(name) is not None


def redacted(value: Any) -> Any:
    """Return JSON types or a text with ``***`` instead of secrets.

    A name, a form or the environment identifies a secret.
    """
    if isinstance(value, dict):
        copy = {}
        for key, item in value.items():
            if is_secret(str(key), item):
                copy[key] = HIDDEN
            else:
                copy[key] = redacted(item)
        return copy
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value]
    if isinstance(value, str):
        return redacted_text(value)
    return value


def redacted_text(text: str) -> str:
    """Return a text with ``***`` instead of secrets."""
    if len(text) >= SHORTEST_SECRET:
        for name, value in os.environ.items():
            # The fast test first: few texts contain the value of a variable.
            if value in text and is_secret(name, value) and SECRET_VALUE.fullmatch(value):
                text = text.replace(value, HIDDEN)
    return SECRET_TEXT.sub(hidden, text)


def hidden(match: re.Match[str]) -> str:
    """Return the replacement of a ``SECRET_TEXT``."""
    if match["user"]:
        return f"{match['user']}{HIDDEN}@"
    name = match["name"]  # of a parameter of a URL: "?token=", "#key="
    if name:
        if name[1:].lower() != "key=" and not is_secret(name[1:-1], match["value"]):
            return match[0]
        return f"{name}{HIDDEN}"
    bearer = match["bearer"] or ""
    return f"{bearer}{HIDDEN}"


KEYS_OF_OTHER_TOOLS = {
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
    """Return `` (did you mean 'x'?)``; empty if no known name is close or means the same.

    Case is ignored.  ``shown``: known name -> the form in which the hint shows it, such as a path.
    """
    suggestion = nearest_name(name, list(known))
    if suggestion is None:
        return ""
    return f" (did you mean {shown.get(suggestion, suggestion)!r}?)"


def nearest_name(name: str, known: Sequence[str]) -> str | None:
    """Return the known name that means the same or is close; None if there is none."""
    # A key that means the same comes first: one that only looks similar may mean something else.
    for alias in KEYS_OF_OTHER_TOOLS.get(name.lower(), ()):
        if alias in known:
            return alias
    by_lower_case = {known_name.lower(): known_name for known_name in known}
    for close in difflib.get_close_matches(name.lower(), list(by_lower_case), n=1):
        return by_lower_case[close]
    return None


def amount(count: int | float, unit: str) -> str:
    """Return a number and its unit: ``1 window``, ``1,200 windows`` for the unit ``window``."""
    if count == 1:
        return f"{count:,.0f} {unit}"
    return f"{count:,.0f} {unit}s"


def and_more(things: Sized) -> str:
    """Return `` (and 3 more like it)`` for four things; "" for one."""
    if len(things) > 1:
        return f" (and {len(things) - 1} more like it)"
    return ""


def printable(text: object) -> str:
    """Return the text on one line without secrets, each ``CONTROL`` escaped as in Python.

    It cannot move the cursor.
    """
    return CONTROL.sub(escaped, redacted(str(text)))


def is_name(text: str) -> bool:
    """Return True if a text can be a name in the table: one line, with a character that is seen."""
    return bool(text.strip()) and not CONTROL.search(text)


def escaped(match: re.Match[str]) -> str:
    """Return the characters of a match, escaped as in Python."""
    return match[0].encode("unicode_escape").decode()


def unicode(text: str) -> str:
    """Return the text as valid Unicode for JSON and pictures.

    Bytes of a file's name that are not UTF-8 are escaped.
    """
    return text.encode(errors="backslashreplace").decode()


def shortened(text: str, limit: int = 200) -> str:
    """Return the text, cut at ``limit`` characters."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}..."


def with_class(error: BaseException) -> str:
    """Return the class and the message of an unexpected error, in one line."""
    return f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException, limit: int = 300) -> str:
    """Return an exception's text on one line, cut at ``limit`` characters.

    White space is folded.  Without a text: the exception's type.
    """
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return shortened(text, limit)


def bytes_in_words(size: float) -> str:
    """Return a number of bytes as text, e.g. ``16.1 GB``."""
    # From 999.95 on, a size would be printed as 1000.0.
    if size < 999.95:
        return f"{size:.0f} bytes"
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        if size < 999.95:
            return f"{size:.1f} {unit}"
    return f"{size / 1000:.1f} TB"


def duration_in_words(seconds: float) -> str:
    """Return ``40 s``, ``3 min`` or ``2.5 h``."""
    if seconds < 90:
        return f"{max(round(seconds), 1)} s"
    if seconds < 90 * 60:
        return f"{round(seconds / 60)} min"
    hours = float(f"{seconds / 3600:.2g}")  # to two digits
    return f"{hours:g} h"


def dtype_name(dtype: object) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16`` and for ``bfloat16``."""
    return str(dtype).removeprefix("torch.")
