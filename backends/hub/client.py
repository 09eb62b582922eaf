"""The Hugging Face hub's client, kept short and quiet: is the hub there, what went wrong, how far a download is.

On its own the client retries: without a network it gave up on a data set after 24 s where connections are refused, and
not within 130 s where nothing answers at all.  Here one request with a deadline asks first whether the hub answers.
Nor does it bound what a hub, or what stands in its place, sends: here an answer has an end, and so has a download.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from backends.common.errors import InputError
from backends.common.json_files import LARGEST
from backends.common.messages import bytes_in_words, one_line
from backends.common.watch import Watch

REMEMBERED_S = 60.0
"""Seconds for which an answer of ``why_away`` holds: a run of hours must notice that the network has come back."""
LONGEST_ANSWER_S, LONGEST_WAIT_S = 120.0, 300
"""Seconds for all of an answer that is no file, and that the hub may ask to wait: its own longest."""
SLOW_S, SLOWEST = 120.0, 1000
"""Seconds of waiting for a file in which at least so many bytes a second have to come."""
SLACK = 1 << 26
"""Bytes by which a download may exceed what the hub has announced: beginnings that come again."""
SIGN_IN = "`hf auth login` or HF_TOKEN"
_answers: dict[str, tuple[float, str]] = {}
"""Endpoint -> when it was asked (seconds of the monotonic clock), and why it cannot be reached ("" if it can)."""


class HubAwayError(InputError):
    """The hub cannot be asked now; files in the local cache can still be used."""


def why_away() -> str:
    """Why the hub cannot be asked, or an empty string; takes at most ``deadline_s``, also where DNS never answers."""
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set"
    endpoint = constants.ENDPOINT
    when, found = _answers.get(endpoint, (0.0, ""))
    if not when or time.monotonic() - when > REMEMBERED_S:
        found = _why_unreachable(endpoint)
        _answers[endpoint] = time.monotonic(), found
    return found and f"{endpoint} cannot be reached ({found})"


def deadline_s() -> float:
    """Seconds within which the hub has to answer; HF_HUB_ETAG_TIMEOUT, the client's own variable, lengthens it."""
    return float(os.environ.get("HF_HUB_ETAG_TIMEOUT") or 4)


def _why_unreachable(endpoint: str) -> str:
    """Why one request to the hub's front page got no answer; an empty string for any answer.

    The request runs in a thread, since a time limit of the HTTP client does not count the look-up of the host's name.
    """
    from huggingface_hub import get_session

    answers: list[str] = []

    def request() -> None:
        try:
            get_session().head(endpoint, timeout=2 * deadline_s(), follow_redirects=False)
            answers.append("")
        except Exception as error:  # the client's, the HTTP library's, proxies', TLS
            answers.append(one_line(error))

    thread = threading.Thread(target=request, daemon=True)
    thread.start()
    thread.join(deadline_s())
    late = f"no answer within {deadline_s():.0f} s; HF_HUB_ETAG_TIMEOUT sets another number"
    return answers[0] if answers else late


def bound_answers() -> None:
    """Have the client's answers bounded by ``_bound``, until a connection that fails makes it a new one."""
    from huggingface_hub import get_session

    hooks = get_session().event_hooks["response"]
    if _bound not in hooks:
        hooks.append(_bound)


def _bound(response: Any) -> None:
    """Bound a wait that is asked for, the bytes and seconds of an answer that is no file, and how slow a file may be.

    The bytes of a file are counted by its bar.
    """
    for header, number in (("Retry-After", r"\d+"), ("ratelimit", r"(?<=t=)\d+")):
        asked = response.headers.get(header, "")
        if any(float(each) > LONGEST_WAIT_S for each in re.findall(number, asked, re.ASCII)):
            response.headers[header] = re.sub(number, str(LONGEST_WAIT_S), asked)
    path = response.request.url.path
    if "/api/" not in path or "/resolve" in path:
        response.iter_raw = paced(response.iter_raw)
        return
    pieces, until = response.iter_bytes, time.monotonic() + LONGEST_ANSWER_S

    def bounded(*arguments: Any) -> Iterator[bytes]:
        size = 0
        for piece in pieces(*arguments):
            size += len(piece)
            if size > LARGEST or time.monotonic() > until:
                most = f"{bytes_in_words(LARGEST)} or {LONGEST_ANSWER_S:.0f} s"
                raise InputError(f"the hub's answer goes on beyond {most}: HF_ENDPOINT or a proxy leads to no hub")
            yield piece

    response.iter_bytes = bounded


def paced(pieces: Callable[..., Iterator[bytes]]) -> Callable[..., Iterator[bytes]]:
    """The pieces of a file as they come; InputError where next to nothing does.

    The client's own limit is on the silence before a piece, and its bar is told of nothing before 10 MiB have come.
    """

    def followed(*arguments: Any) -> Iterator[bytes]:
        waited, size, since = 0.0, 0, time.monotonic()
        for piece in pieces(*arguments):
            waited, size = waited + time.monotonic() - since, size + len(piece)
            if waited > SLOW_S:
                if size < SLOWEST * waited:
                    slow = f"less than {bytes_in_words(SLOWEST)}/s came for {SLOW_S:g} s"
                    raise InputError(f"{slow}: the hub or the network is too slow; run again to go on")
                waited, size = 0.0, 0
            yield piece
            since = time.monotonic()  # what is done with a piece is no waiting

    return followed


@contextmanager
def offline() -> Iterator[None]:
    """While it holds, both clients use the files in their caches, and do not ask the hub."""
    import datasets
    from huggingface_hub import constants

    places: list[Any] = [constants, datasets.config]
    before = [place.HF_HUB_OFFLINE for place in places]
    for place in places:
        place.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


@contextmanager
def warnings_told(watch: Watch, name: str) -> Iterator[None]:
    """While it holds, the client draws no bars, and its warnings (retries, waits) are told to ``watch``."""
    from huggingface_hub import utils

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            watch.say(f"{name}: {' '.join(record.getMessage().split())}")

    utils.disable_progress_bars()  # type: ignore[attr-defined]
    logger, ours = logging.getLogger("huggingface_hub"), Handler(logging.WARNING)
    before, logger.handlers = logger.handlers, [ours]
    try:
        yield
    finally:
        logger.handlers = before


def bar_for(watch: Watch, total: int) -> type[Any]:
    """The class of a bar for the client, which draws nothing, and tells ``watch`` how many of ``total`` bytes came.

    The client counts the bytes twice, as received and as written; ``watch`` is told the larger count.  Where more come
    than can be, the bar raises InputError, which ends the download.
    """
    lock, told = threading.Lock(), [0]
    counts: dict[int, float] = {}

    class Bar:
        def __init__(self, *_: object, total: float | None = None, unit: str = "", **__: object) -> None:
            self.total, self.n, self.unit = total, 0.0, unit
            self.format_dict: dict[str, Any] = {}

        def __enter__(self) -> Bar:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def __getattr__(self, name: str) -> Any:  # what else a bar can be told: descriptions, refreshing, its end
            return lambda *_, **__: None

        def update(self, n: float | None = 1) -> None:
            with lock:
                self.n += n or 0
                if self.unit == "B":
                    counts[id(self)] = self.n
                    more = int(max(counts.values())) - told[0]
                    told[0] += more
                    if told[0] > total + SLACK:
                        raise InputError(f"more comes than the {bytes_in_words(total)} that the hub has announced")
                    watch.advance(more)

    return Bar


def failure_reason(error: BaseException, page: str, revision: str | None) -> str:
    """What went wrong, in one line, and what to do; ``page`` is the repository's address."""
    from huggingface_hub import errors

    chain = [error]
    while len(chain) < 9 and (below := chain[-1].__cause__ or chain[-1].__context__):
        chain.append(below)
    for each in chain:
        status = getattr(getattr(each, "response", None), "status_code", None)
        if isinstance(each, errors.GatedRepoError):
            signed_in = f"your account has no access yet; ask for it at {page}"
            not_signed_in = f"accept its licence at {page}, then sign in ({SIGN_IN})"
            return f"gated on the hub: {signed_in if status == 403 else not_signed_in}"
        if isinstance(each, errors.RevisionNotFoundError):
            return f"no revision {revision!r} of it on the hub; see {page}"
        if isinstance(each, errors.RepositoryNotFoundError):
            return f"not on the hub, or private; check the name, or sign in ({SIGN_IN})"
        if status == 401:
            return f"the hub does not know your token; sign in again ({SIGN_IN})"
        if status == 429:
            return (
                f"the hub limits how often you may ask; {waiting_time(each)}, or sign in for a higher limit ({SIGN_IN})"
            )
        if isinstance(each, OSError) and each.errno == errno.ENOSPC:
            return "no space left for it; HF_HOME names another place for the hub's cache"
        if isinstance(each, errors.HfHubHTTPError) and not isinstance(each, errors.EntryNotFoundError):
            return f"{page} answers {status}: the hub has a fault, or HF_ENDPOINT or a proxy leads to no hub"
    return one_line(error)


def waiting_time(error: Any) -> str:
    """How long a client that asked too often has to wait."""
    headers = error.response.headers
    seconds = headers.get("Retry-After") or headers.get("ratelimit", "").rpartition("t=")[2]
    return f"try again in {seconds} s" if str(seconds).isdigit() else "try again later"
