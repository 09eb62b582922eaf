"""What travels between the driver and a worker: a job goes in, messages come out, each as JSON."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter

from compare_q.backends.base import PlannedModel, ScoreRequest, Window
from compare_q.backends.common import storage
from compare_q.backends.common.errors import ModelError
from compare_q.backends.common.messages import one_line


@dataclass(frozen=True)
class LoadCommand:
    """Load ``model``, after the worker's last model is closed.

    ``devices``: the value of CUDA_VISIBLE_DEVICES; None: unchanged.  ``share``: (number, count) of a replica on the
    CPU, which gets that share of the processors.
    """

    model: PlannedModel
    devices: tuple[str, ...] | None = None
    share: tuple[int, int] | None = None
    type: Literal["load"] = "load"


@dataclass(frozen=True)
class ScoreCommand:
    """Score the windows in the file ``windows`` with the loaded model.

    Token scores are committed into the folder ``scores`` under ``tag`` (``backends/scoring/segments.py``).  ``session``
    names this run of the model; ``facts`` (JSON types) become part of its record.
    """

    request: ScoreRequest
    windows: Path
    scores: Path
    tag: str
    session: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    type: Literal["score"] = "score"


@dataclass(frozen=True)
class InspectEngine:
    """Return the ``EngineInfo`` of this Python for ``model``, as JSON types."""

    model: PlannedModel
    type: Literal["inspect"] = "inspect"


@dataclass(frozen=True)
class CallCommand:
    """Call a function, ``module:name``, with a function that sends ``Told``, and with keyword ``arguments``."""

    function: str
    arguments: dict[str, Any]
    type: Literal["call"] = "call"


@dataclass(frozen=True)
class Ready:
    """The worker has started; it leads a process ``group``, and runs this ``code`` (``machine.code``)."""

    group: int
    code: tuple[str, str]
    type: Literal["ready"] = "ready"


@dataclass(frozen=True)
class Told:
    """What a worker tells on its way, by its ``kind``, with its ``content`` (JSON types).

    "advance": so many windows are done; "say": a line for the user.  A called function tells "phase", "expect" and
    "end" too (``eval/common/progress.py``).
    """

    kind: str
    content: Any = None
    type: Literal["told"] = "told"


@dataclass(frozen=True)
class Returned:
    """The job has come to its end: what it scored is committed, and its record written; ``value``: of a function."""

    value: Any = None
    type: Literal["returned"] = "returned"


@dataclass(frozen=True)
class Failed:
    """The job failed, for a reason that a user can understand, in one line a problem."""

    reason: str
    type: Literal["failed"] = "failed"


@dataclass(frozen=True)
class Ended:
    """The engine process says that the worker has ended, with this exit status, minus its number for a signal."""

    status: int
    type: Literal["ended"] = "ended"


Command = LoadCommand | ScoreCommand | InspectEngine | CallCommand
Message = Ready | Told | Returned | Failed | Ended
COMMAND: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="type")])
MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encoded(item: Command | Message) -> bytes:
    """A command or a message as JSON; unlike pydantic's, it can hold file names that are not UTF-8."""
    adapter: TypeAdapter[Any] = COMMAND if isinstance(item, Command) else MESSAGE
    return json.dumps(adapter.dump_python(item), default=os.fspath).encode()


def parse_command(data: bytes) -> Command:
    """The command that ``encoded`` wrote."""
    return COMMAND.validate_python(json.loads(data))


def parse_message(data: bytes) -> Message:
    """A message of a worker; ModelError if it is none."""
    try:
        return MESSAGE.validate_python(json.loads(data))
    except (ValueError, RecursionError) as error:  # of pydantic too
        raise ModelError(f"its worker sent what is no message: {one_line(error, 120)}") from None


def ending(status: int) -> str:
    """How a process ended, by Python's exit code: negative for a signal."""
    with suppress(ValueError):
        if status < 0:
            return f"was ended by {signal.Signals(-status).name}"
    return f"ended with status {status}"


def write_windows(file: Path, windows: Sequence[Window]) -> None:
    """Windows as arrays in one file, without pickle."""
    ids = np.concatenate([each.token_ids for each in windows]) if windows else np.zeros(0, np.int32)
    shape = [[each.index, len(each.token_ids), len(each.spans)] for each in windows]
    spans = [span for each in windows for span in each.spans]
    storage.write_arrays(
        file, ids=ids, shape=np.array(shape, np.int64).reshape(-1, 3), spans=np.array(spans, np.int64).reshape(-1, 2)
    )


def read_windows(file: Path) -> list[Window]:
    """The windows that ``write_windows`` wrote, in their order."""
    arrays = storage.read_arrays(file)
    ids, shape, spans = arrays["ids"], arrays["shape"].tolist(), arrays["spans"].tolist()
    windows, token, span = [], 0, 0
    for index, length, n_spans in shape:
        scored = tuple((begin, end) for begin, end in spans[span : span + n_spans])
        windows.append(Window(index, ids[token : token + length], scored))
        token, span = token + length, span + n_spans
    return windows
