"""Hostile input for the tests in tests/fuzz, and the allowed behaviour of a reader.

``FUZZ_EXAMPLES`` is the number of cases of each test; without it, each test has a few cases, always
the same.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import tracemalloc
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from compare_q.backends.common.errors import CompareQError
from compare_q.backends.common.message_text import CONTROL

FUZZ_CASES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
FEW_CASES = 50
PATIENCE = 60
"""Seconds after which a reader counts as hanging."""
# Python refuses to parse integers of more than 4,300 digits.
DIGITS = "5,000 digits"
DEEP = "3,000 brackets"
"""Placeholders for values that Python's json cannot write."""
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    255,
    2**31,
    # The first integer that float64 does not have.
    2**53 + 1,
    2**63,
    2**64 - 1,
    # Too large for float32.
    10**39,
    -(10**41),
    0.5,
    -0.5,
    -0.0,
    1e300,
    # Subnormal in float64.
    1e-320,
    1e308,
    -1e308,
    float("inf"),
    float("nan"),
    "",
    "x",
    " ",
    "a\nb",
    # This clears a terminal, and the next one reverses the direction of text.
    "\x1b[2J",
    "\u202e",
    "\x00",
    # UTF-8 cannot encode a lone surrogate.
    "\ud800",
    "1",
    # ``Path.expanduser`` raises RuntimeError for an unknown user.
    "~nouser/x",
    # A file name may have 255 bytes.
    "a" * 300,
    "/proc/self/mem",
    # This file never ends.
    "/dev/zero",
    "..",
    "*",
    "**/*",
    [],
    {},
    [[]],
    [0],
    [None],
    ["x"],
    [1.5, -1],
    {"": None},
    {"x": [1]},
    *(json.loads("[" * depth + "]" * depth) for depth in (40, 200)),
    DIGITS,
    DEEP,
)
"""Replacements of a value."""
INSERTED = [b"\x00", b"\xff", b"[" * 5000, b'{"a":' * 5000, b'"', b",", b"9" * 5000, b"\\ud800"]
NUMBERS = [0, 1, 2**7, 2**15, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1]
NAMES = [value for value in VALUES if isinstance(value, str)]


def fuzzed(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test of hypothesis with ``FUZZ_CASES`` cases, or with the same few every time."""
    profile = settings(
        max_examples=FUZZ_CASES or FEW_CASES,
        derandomize=not FUZZ_CASES,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    return profile(test)


randoms = st.randoms(use_true_random=True)
"""Seeds of Python's generator.

hypothesis prefers small numbers, and would only damage the beginning of a document.
"""


def damaged(document: Any, random: Random) -> bytes:
    """Return JSON of a document with one to three changed places, sometimes with damaged bytes."""
    copied = json.loads(json.dumps(document))
    for _ in range(random.randint(1, 3)):
        copied = changed(copied, random)
    # Without escapes, a lone surrogate becomes bytes that are not UTF-8.
    text = json.dumps(copied, ensure_ascii=random.random() < 0.7)
    text = text.replace(json.dumps(DIGITS), "9" * 5000)
    text = text.replace(json.dumps(DEEP), "[" * 3000 + "]" * 3000)
    content = text.encode(errors="surrogatepass")
    if random.random() < 0.05:
        return damaged_bytes(content, random)
    return content


def changed(document: Any, random: Random) -> Any:
    """Return a document with one changed place.

    Its value is replaced, deleted, repeated, or copied from another place.
    """
    places = places_in(document)
    value = copy.deepcopy(random.choice(VALUES))
    if not places or random.random() < 0.01:
        return value
    holder, step = random.choice(places)
    other_holder, other_step = random.choice(places)
    kind = random.randint(0, 9)
    if kind == 0:
        del holder[step]
    elif kind == 1:
        holder[step] = copy.deepcopy(other_holder[other_step])
    elif kind == 2 and isinstance(holder, dict):
        holder[random.choice(NAMES)] = value
    elif kind == 2:
        holder.insert(step, copy.deepcopy(holder[step]))
    else:
        holder[step] = value
    return document


def places_in(document: Any) -> list[tuple[Any, Any]]:
    """Return (object or list, key or index) of every value in a document, from the outside in."""
    holders = [document] if isinstance(document, dict | list) else []
    places = []
    # The list grows in the loop.
    for holder in holders:
        steps = list(holder) if isinstance(holder, dict) else range(len(holder))
        for step in steps:
            places.append((holder, step))
            if isinstance(holder[step], dict | list):
                holders.append(holder[step])
    return places


def damaged_bytes(content: bytes, random: Random) -> bytes:
    """Return the bytes with some of them changed, missing or inserted."""
    data = bytearray(content)
    for _ in range(random.randint(1, 4)):
        at = random.randint(0, len(data))
        kind = random.randint(0, 4)
        if kind == 0:
            del data[at:]
        elif kind == 1:
            del data[at : at + random.randint(1, 16)]
        elif kind == 2:
            data[at:at] = random.choice(INSERTED)
        elif kind == 3:
            size = random.choice([1, 2, 4, 8])
            value = random.choice([*NUMBERS, random.randint(0, 300)])
            data[at : at + size] = (value % 256**size).to_bytes(size, "little")
        elif at < len(data):
            data[at] ^= 1 << random.randint(0, 7)
    return bytes(data)


def answer_of(reader: Callable[[], Any]) -> Any:
    """Return a reader's result, or None if it refuses with one printable line.

    Any other exception is a failure.  TimeoutError if the reader hangs.
    """

    def hangs(*_: Any) -> None:
        raise TimeoutError(f"no answer in {PATIENCE} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(PATIENCE)
    try:
        return reader()
    except CompareQError as error:
        text = str(error)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert text.strip()
    # One line of UTF-8 without control characters.
    assert not CONTROL.search(text), text
    return None


def bounded_answer_of(reader: Callable[[], Any], size: int) -> Any:
    """``answer_of`` for a reader that may allocate 50 times ``size`` bytes plus 5 MB."""
    tracemalloc.start()
    try:
        answer = answer_of(reader)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 50 * size + 5_000_000, f"{peak:,} bytes for {size:,}"
    return answer
