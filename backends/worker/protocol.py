"""Commands from the driver to a worker and messages back, both as JSON; windows as a file.

A worker's first message is ``Done`` with its process id and its code.  Each command ends with
``Done`` or ``Failed``.  After the worker has ended, its engine process sends ``Failed`` with the
exit status.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from ..base import PlannedModel, ScoreRequest, Window
from ..common import storage
from ..common.errors import ModelError
from ..common.message_text import one_line
from ..restoring import Trial


@dataclass(frozen=True)
class InspectEngine:
    """Return the ``EngineInfo`` of the worker's Python for ``model``, as JSON types."""

    model: PlannedModel
    type: Literal["inspect"] = "inspect"


@dataclass(frozen=True)
class PrepareCommand:
    """Do what loading ``model`` needs no GPU for; the next command loads it."""

    model: PlannedModel
    type: Literal["prepare"] = "prepare"


@dataclass(frozen=True)
class LoadCommand:
    """Close the worker's last model, if it has one, and load ``model``.

    With ``windows``, the model then does what precedes the first of them (``Engine.warm_up``).
    """

    model: PlannedModel
    devices: tuple[str, ...] | None = None  # value of CUDA_VISIBLE_DEVICES; None: unchanged
    # (number, count) of a replica on the CPU: its share of the cores
    share: tuple[int, int] | None = None
    users: str | None = None  # the programs that used the devices before; None: not known
    windows: Path | None = None  # the file that ``write_windows`` wrote
    request: ScoreRequest = field(default_factory=ScoreRequest)  # how they will be scored
    type: Literal["load"] = "load"


@dataclass(frozen=True)
class ScoreCommand:
    """Score windows with the loaded model, and commit their scores (``scoring/segments.py``)."""

    request: ScoreRequest
    windows: Path  # the file that ``write_windows`` wrote
    scores: Path  # folder of the segments
    tag: str
    session: str = ""  # names this run of the model
    facts: dict[str, Any] = field(default_factory=dict)  # JSON types; part of the session's record
    n_on_gpus: int = 1  # models of this run on the GPU, without those that are ending
    n_ending: int = 0  # models of this run whose processes may still be on the GPU
    type: Literal["score"] = "score"


@dataclass(frozen=True)
class SampleCommand:
    """Return ``token_ids`` and ``logprobs`` of ``n_tokens`` that the loaded model samples.

    Both are lists, one for each prompt.
    """

    prompts: list[list[int]]
    n_tokens: int
    seed: int
    type: Literal["sample"] = "sample"


@dataclass(frozen=True)
class ReferenceCommand:
    """Load ``model`` beside the loaded model; return the modules that can be exchanged.

    The value is a list of the fields of ``QuantizedModule``.  The next ``LoadCommand`` closes both.
    """

    model: PlannedModel
    type: Literal["reference"] = "reference"


@dataclass(frozen=True)
class TrialsCommand:
    """Score trials with the two loaded models, and append the scores to a file.

    The file is that of ``worker/trial_scores.py``.  A unit of progress is one trial in one window.
    The value is the provenance and layers of the quantized model, as in the record of scores.
    """

    trials: list[Trial]
    windows: Path  # the file that ``write_windows`` wrote
    scores: Path
    type: Literal["trials"] = "trials"


@dataclass(frozen=True)
class OutputsCommand:
    """Run windows with the loaded model, and record or compare what its modules return.

    The value is a list of the windows' differences (``differences_to_json``), which are empty if
    they were recorded.
    """

    windows: Path  # the file that ``write_windows`` wrote
    files: list[Path]  # one of each window
    compare: bool  # with the files; False: write them
    type: Literal["outputs"] = "outputs"


@dataclass(frozen=True)
class CallCommand:
    """Return the value of ``function`` (``module:name``).

    It is called with a sender of messages and the keyword ``arguments``.
    """

    function: str
    arguments: dict[str, Any]
    type: Literal["call"] = "call"


@dataclass(frozen=True)
class Progress:
    """Progress of a command; a called function may have phases."""

    done: int = 0  # units (windows, rows, bytes) that were finished since the last message
    total: int | None = None  # units of the whole phase, sent once it is known
    phase: str | None = None  # title of a phase that begins; empty: the phase ends
    unit: str = ""
    type: Literal["progress"] = "progress"


@dataclass(frozen=True)
class Log:
    """A line for the user."""

    text: str
    type: Literal["log"] = "log"


@dataclass(frozen=True)
class Done:
    """The command succeeded, and its scores are committed."""

    value: Any = None  # the command's result, as JSON types
    type: Literal["done"] = "done"


@dataclass(frozen=True)
class Failed:
    """The command failed, or the worker ended."""

    reason: str = ""  # one line per problem, for the user
    # Exit status of the worker, or minus a signal's number; None: the worker is running.
    status: int | None = None
    type: Literal["failed"] = "failed"


Command = (
    InspectEngine
    | PrepareCommand
    | LoadCommand
    | ScoreCommand
    | SampleCommand
    | ReferenceCommand
    | TrialsCommand
    | OutputsCommand
    | CallCommand
)
Message = Progress | Log | Done | Failed
COMMAND_ADAPTER: TypeAdapter[Command] = TypeAdapter(Annotated[Command, Field(discriminator="type")])
MESSAGE_ADAPTER: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="type")])


def encoded(item: Command | Message) -> bytes:
    """Return a command or message as JSON."""
    adapter: TypeAdapter[Any] = MESSAGE_ADAPTER
    if isinstance(item, Command):
        adapter = COMMAND_ADAPTER
    # pydantic's own JSON cannot hold file names that are not UTF-8; json escapes their surrogates.
    return json.dumps(adapter.dump_python(item), default=os.fspath).encode()


def parse_command(data: bytes) -> Command:
    """Return the command that ``encoded`` wrote."""
    return COMMAND_ADAPTER.validate_python(json.loads(data))


def parse_message(data: bytes) -> Message:
    """Return a worker's message; ModelError if the data are not a message."""
    try:
        return MESSAGE_ADAPTER.validate_python(json.loads(data))
    except (ValueError, RecursionError) as error:  # also pydantic's ValidationError
        raise ModelError(f"its worker sent an unknown message: {one_line(error, 120)}") from None


def write_windows(file: Path, windows: Sequence[Window]) -> None:
    """Write windows as arrays into one file, without pickle."""
    # Without windows, the empty array has the type of the ids.
    ids: list[NDArray[np.int32]] = [np.zeros(0, np.int32)]
    logprobs: list[NDArray[np.float32]] = [np.zeros(0, np.float32)]
    shapes = []
    for window in windows:
        ids.append(window.token_ids)
        n_sampled = 0
        if window.sampler_logprobs is not None:
            logprobs.append(window.sampler_logprobs)
            n_sampled = len(window.sampler_logprobs)
        shapes.append(
            (window.index, len(window.token_ids), window.spans, window.is_single, n_sampled)
        )
    storage.write_arrays(
        file,
        ids=np.concatenate(ids),
        sampler_logprobs=np.concatenate(logprobs),
        shapes=json.dumps(shapes),
    )


def read_windows(file: Path) -> list[Window]:
    """Return the windows that ``write_windows`` wrote, in order."""
    arrays = storage.read_arrays(file)
    windows = []
    start = 0
    logprob_start = 0
    for index, length, spans, is_single, n_sampled in json.loads(str(arrays["shapes"])):
        ids = arrays["ids"][start : start + length]
        logprobs = None
        if n_sampled:
            logprobs = arrays["sampler_logprobs"][logprob_start : logprob_start + n_sampled]
        windows.append(Window(index, ids, tuple(map(tuple, spans)), is_single, logprobs))
        start += length
        logprob_start += n_sampled
    return windows
