"""``windows``: write the windows of a text for an engine that compare_q does not run.

Without a reference, the file has tokens and scored positions.  With a reference pack, or the
reference store of ``-lf``, it also requests log-probabilities of some tokens at each position
(``backends/scores_file/asked_ids.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...backends import engine_class, resolve
from ...backends.base import PlannedModel, Window
from ...backends.common.errors import InputError
from ...backends.common.message_text import amount
from ...backends.reference.store import Reader, open_reference
from ...backends.reference.stored_logprobs import StoredLogprobs
from ...backends.scores_file import format
from ...backends.scores_file.asked_ids import asked_of
from ...backends.scores_file.format import Asked, Text
from ..common.output_files import write_text
from ..common.processes import run_in_subprocess
from ..common.progress import Progress
from ..run import runner
from ..run.run_config import RunConfig
from ..specs import spec_files
from ..specs.spec_types import DataSpec, ModelSpec
from ..text import corpus
from ..text.eval_data import EvalData
from . import output_checks, run_inputs, shorthand
from .commands import Inputs, OutputFiles, PictureFlags, WindowsCommand
from .outputs import print_note


def run(command: WindowsCommand) -> int:
    """Write the windows; return the exit status."""
    target = command.output
    if target is None:
        raise InputError("-o: is missing; name the file of the windows, as windows.jsonl")
    config = run_inputs.run_config(command.resources)
    texts, models = inputs_of(command.inputs, config.progress)
    store_path = store_of(command, models)
    texts = shorthand.with_default_windows(texts, store_path)
    output_checks.check(OutputFiles(output=target), PictureFlags(), [], texts, models)
    data = EvalData.joined(runner.build_texts(config, texts, command.inputs.rows))
    asked: Sequence[Asked | None] = [None] * len(data.distinct)
    if store_path is not None:
        asked = asked_ids(config, store_path, data.distinct)
    lines = format.lines_of_windows(data.distinct, description_of(data), asked)
    write_text(target, "".join(f"{line}\n" for line in lines))
    print_note(summary(target, data, has_asked=store_path is not None))
    return 0


def inputs_of(inputs: Inputs, progress: Progress) -> tuple[dict[str, DataSpec], list[ModelSpec]]:
    """Return the texts by their names, and the models that decide tokenizer and length.

    They are those of ``run`` with the same words.
    """
    named_models = shorthand.models(
        inputs.models, set(spec_files.load_settings().python), progress, reference=False
    )
    words = [str(path) for path in inputs.data]
    if not words and not named_models:
        raise InputError("-d: is missing; name a text, or a reference pack")
    data, notes = shorthand.texts(
        words,
        named_models,
        inputs.tokenizer,
        eval_len=inputs.eval_len,
        eval_stride=inputs.eval_stride,
        sample=inputs.sample,
    )
    print_note(*notes)
    texts = dict(zip(corpus.names_of(data), data, strict=True))
    return texts, [named.spec for named in named_models]


def store_of(command: WindowsCommand, models: Sequence[ModelSpec]) -> Path | None:
    """Return the reference store whose tokens are requested, if there is one.

    It is that of ``-lf``, or of a reference pack that is the first model.
    """
    if command.resources.logits_file is not None:
        return command.resources.logits_file
    if not models:
        return None
    engine, _ = resolve(models[0].load_fn, None)
    planned = PlannedModel(
        label=models[0].name,
        engine=engine,
        load_fn=models[0].load_fn,
        model_dir=models[0].located,
        max_tokens=shorthand.LONGEST_WINDOW,
    )
    files = engine_class(engine).files_of(planned)
    if not files.is_store:
        return None
    return files.finished_store()


def asked_ids(config: RunConfig, path: Path, windows: Sequence[Window]) -> list[Asked | None]:
    """Return the ids that a file requests in each window; InputError if the store lacks some."""
    check_windows(open_reference(path), windows)
    arguments = []
    for window in windows:
        arguments.append([window.token_ids.tolist(), window.spans])
    # torch, which computes the reference's logits, is not imported in this process.
    answers = run_in_subprocess(
        asked_as_json, "asked ids", config.progress, store=str(path), windows=arguments
    )
    asked: list[Asked | None] = []
    for answer in answers:
        ids = None
        if answer is not None:
            ids = Asked.model_validate(answer)
        asked.append(ids)
    return asked


def check_windows(store: Reader, windows: Sequence[Window]) -> None:
    """InputError for windows that a reference store does not have."""
    missing = [window.index for window in windows if window.digest not in store.windows]
    if missing:
        raise InputError(
            f"{store.path}: lacks {len(missing):,} of {len(windows):,} windows, window "
            f"{missing[0]} among them; give the text and the windows that it was recorded with"
        )


def asked_as_json(
    *, progress: Progress, store: str, windows: Sequence[tuple[list[int], list[tuple[int, int]]]]
) -> list[dict[str, Any] | None]:
    """Return the asked ids of windows (tokens and spans) as JSON types; imports torch."""
    reference = StoredLogprobs(open_reference(Path(store)))
    answers: list[dict[str, Any] | None] = []
    with progress.phase("choosing tokens", unit="windows", total=len(windows)) as phase:
        for index, (token_ids, spans) in enumerate(windows):
            pairs = tuple((begin, end) for begin, end in spans)
            asked = asked_of(Window(index, np.array(token_ids, np.int32), pairs), reference)
            answer = None
            if asked is not None:
                answer = asked.model_dump()
            answers.append(answer)
            phase.advance(1)
    return answers


def description_of(data: EvalData) -> Text:
    """Return the description of the windows for the first line of the file."""
    return Text(
        names=[text.name or text.spec.dataset for text in data.texts],
        windows=len(data.distinct),
        longest=data.length,
        scored_tokens=sum(window.n_scored for window in data.distinct),
        windows_sha256=data.digest,
        vocabulary_sha256=data.vocabulary,
    )


def summary(target: Path, data: EvalData, *, has_asked: bool) -> str:
    """Return a line about the written file."""
    windows = amount(len(data.distinct), "window")
    tokens = amount(sum(window.n_scored for window in data.distinct), "scored token")
    asks = "perplexity, and a bound of the KLD"
    if has_asked:
        asks = "an estimate of the KLD"
    return f"{target}: {windows}, {tokens}; its scores give {asks} (docs/other_engines.md)"
