"""What travels between the driver and a worker: a job goes in, messages come out, each as one line of JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from backends.base import LoadRequest, ModelFacts, Task, Window
from backends.common import checked
from backends.common.answers import Answer, Question, Sampling
from backends.common.errors import ModelError
from backends.common.messages import one_line


@dataclass(frozen=True)
class LoadJob:
    """Load a model by ``request`` in the engine of that name.

    ``devices``: what CUDA_VISIBLE_DEVICES is to be, None: as it is; ``cores``: the processors that it may use, None:
    all that the driver may use; ``sample``: the first tokens of some windows that it will score, to get ready with.
    """

    engine: str
    request: LoadRequest
    devices: tuple[str, ...] | None = None
    cores: tuple[int, ...] | None = None
    sample: tuple[tuple[int, ...], ...] = ()
    type: Literal["load"] = "load"


@dataclass(frozen=True)
class ScoreJob:
    """Score the windows in the file ``windows`` with the model that the last ``LoadJob`` has loaded, and close it.

    Token scores are committed into the folder ``scores`` under ``tag`` (``backends/scoring/segments.py``); ``session``
    names this run of the model; ``facts`` (JSON types) become part of its record.  ``keeps``: the model is not closed,
    unless it fails, for the next job scores another text with it.
    """

    task: Task
    windows: Path
    scores: Path
    tag: str
    session: str
    facts: dict[str, Any] = field(default_factory=dict)
    keeps: bool = False
    type: Literal["score"] = "score"


@dataclass(frozen=True)
class AnswerJob:
    """Answer the questions with the model that the last ``LoadJob`` has loaded, and close it."""

    questions: tuple[Question, ...]
    sampling: Sampling
    type: Literal["answer"] = "answer"


@dataclass(frozen=True)
class DescribeJob:
    """Say what the worker's Python has of an engine, and check a request against that."""

    engine: str
    request: LoadRequest
    type: Literal["describe"] = "describe"


@dataclass(frozen=True)
class CallJob:
    """Call a function, ``module:name``, with a function that sends ``Told``, and with keyword ``arguments`` (JSON)."""

    function: str
    arguments: str
    type: Literal["call"] = "call"


@dataclass(frozen=True)
class Ready:
    """The worker has started; ``group`` is the process group of the worker and of all that its engine starts.

    ``code``: which code it runs (``machine.code``); a worker of an older compare_q does not say.
    """

    group: int
    code: tuple[str, str] = ("", "")
    type: Literal["ready"] = "ready"


@dataclass(frozen=True)
class Loaded:
    """The model is loaded, after so many seconds."""

    seconds: float
    type: Literal["loaded"] = "loaded"


@dataclass(frozen=True)
class Scored:
    """So many windows more are scored."""

    windows: int
    type: Literal["scored"] = "scored"


@dataclass(frozen=True)
class Answered:
    """One question is answered."""

    answer: Answer
    type: Literal["answered"] = "answered"


@dataclass(frozen=True)
class Said:
    """One line for the user."""

    line: str
    type: Literal["said"] = "said"


@dataclass(frozen=True)
class Told:
    """What a called function tells on its way: of what ``kind``, and its ``content`` as JSON."""

    kind: str
    content: str
    type: Literal["told"] = "told"


@dataclass(frozen=True)
class Returned:
    """What a called function has returned, as JSON: any text can be in it, halves of surrogate pairs too."""

    value: str
    type: Literal["returned"] = "returned"


@dataclass(frozen=True)
class Refused:
    """The engine process cannot fork a worker of its engine, and ``why``."""

    why: str
    type: Literal["refused"] = "refused"


@dataclass(frozen=True)
class Ended:
    """The worker has ended with this exit status, minus its number for a signal; the engine process says so."""

    status: int
    type: Literal["ended"] = "ended"


@dataclass(frozen=True)
class Done:
    """All windows are scored and committed, and the session's record is written; or all questions are answered."""

    type: Literal["done"] = "done"


@dataclass(frozen=True)
class Closed:
    """The engine is closed, or kept for the next job, after ``Done``."""

    type: Literal["closed"] = "closed"


@dataclass(frozen=True)
class Failed:
    """The job failed, for a reason that a user can understand, in one line a problem; ``memory``: too little of it."""

    reason: str
    memory: bool = False
    type: Literal["failed"] = "failed"


@dataclass(frozen=True)
class Described:
    """What a Python has of an engine.

    ``installed``: (distribution, version) that provides the engine, or None; ``versions``: what is part of the scores'
    key; ``cpu_only``: its torch has no code for GPUs; ``problem``: why the request cannot work, else empty.  Of a model
    that is not on this machine, also what it is: ``facts``, else None, and ``stamp``; or ``silence``, why it did not
    say so.
    """

    installed: tuple[str, str] | None
    versions: dict[str, str] = field(default_factory=dict)
    cpu_only: bool = False
    problem: str = ""
    facts: ModelFacts | None = None
    stamp: str = ""
    silence: str = ""
    type: Literal["described"] = "described"


Job = Annotated[LoadJob | ScoreJob | AnswerJob | DescribeJob | CallJob, Field(discriminator="type")]
Message = Annotated[
    Ready | Loaded | Scored | Answered | Said | Told | Returned | Done | Closed | Failed | Described | Refused | Ended,
    Field(discriminator="type"),
]
JOB: TypeAdapter[Any] = TypeAdapter(Job)
MESSAGE: TypeAdapter[Any] = TypeAdapter(Message)


def parse_message(line: bytes) -> Any:
    """One line of a worker as the message that it is; ModelError if it is none."""
    try:
        return MESSAGE.validate_json(line)
    except ValidationError as error:
        raise ModelError(f"its worker sent what is no message: {one_line(error, 120)}") from None


def write_windows(file: Path, windows: Sequence[Window]) -> None:
    """Windows as arrays in one file, without pickle."""
    ids = np.concatenate([each.token_ids for each in windows]) if windows else np.zeros(0, np.int32)
    shape = [[each.index, len(each.token_ids), len(each.spans)] for each in windows]
    spans = [span for each in windows for span in each.spans]
    checked.write_arrays(
        file, ids=ids, shape=np.array(shape, np.int64).reshape(-1, 3), spans=np.array(spans, np.int64).reshape(-1, 2)
    )


def read_windows(file: Path) -> list[Window]:
    """The windows that ``write_windows`` wrote, in their order."""
    arrays = checked.read_arrays(file)
    ids, shape, spans = arrays["ids"], arrays["shape"].tolist(), arrays["spans"].tolist()
    windows, token, span = [], 0, 0
    for index, length, n_spans in shape:
        scored = tuple((begin, end) for begin, end in spans[span : span + n_spans])
        windows.append(Window(index, ids[token : token + length], scored))
        token, span = token + length, span + n_spans
    return windows
