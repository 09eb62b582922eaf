"""``check``: print what a run would do, without loading or downloading weights.

The checks are the functions that a run calls before a model loads.  Checks that take no time come
first, then those that need the texts' tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ... import backends
from ...backends import hub
from ...backends.base import ModelFiles
from ...backends.checkpoint.checkpoint_doctor import examine
from ...backends.checkpoint.contents import Contents
from ...backends.checkpoint.folder import HuggingFaceFolder
from ...backends.checkpoint.gguf import is_gguf
from ...backends.common import machine
from ...backends.common.errors import InputError, ModelError
from ...backends.common.json_files import exists
from ...backends.common.message_text import bytes_in_words
from ..common.cache import Cache
from ..common.terminal import say
from ..run import model_hardware, plan, reference, sampled_text, window_checks
from ..run.run_config import RunConfig
from ..run.run_model import RunModel
from ..specs.spec_types import DataSpec, ModelSpec
from ..text import corpus, sampled, text_windows, tokens_cache, windows_in_words
from ..text.eval_data import EvalData
from ..text.text_windows import TextWindows
from .doctor_command import contents_of, engine_tokens_of
from .outputs import print_errors


def run(
    config: RunConfig,
    rows: int | None,
    texts: Mapping[str, DataSpec],
    model_specs: Sequence[ModelSpec],
) -> int:
    """Print what a run would do, and its problems; return the exit status.

    It is 1 if a number would be wrong.

    ``rows``: number of windows of each text, as ``-r`` gives it.  Only names of files are requested
    from the hub.
    """
    report = CheckReport()
    models: list[RunModel] = []
    try:
        longest_window = max(spec.longest for spec in texts.values())
        models = plan.plan_models(config, model_specs, longest_window)
    except InputError as error:
        report.add_problems(error)
    for model in models:
        config.workers.import_for_refusal(model)
    built_texts = check_texts(config, rows, texts, models, report)
    check_models(config, models, report)
    if built_texts and not report.problems:
        try:
            check_reference(config, model_specs, models, EvalData.joined(built_texts))
        except InputError as error:
            report.add_problems(error)
    emulated_dtypes = model_hardware.emulated_dtypes(config, models)
    if emulated_dtypes:
        report.lines.append(emulated_dtypes)
    say(*report.lines)
    status = print_errors("\n".join(report.problems))
    if not status and report.is_wrong:
        return 1
    return status


@dataclass
class CheckReport:
    """The lines that ``check`` prints.

    ``lines``: about texts and models; ``problems``: what a run would refuse; ``is_wrong``: True if
    a number would be wrong.
    """

    lines: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    is_wrong: bool = False

    def add_problems(self, error: InputError) -> None:
        """Add each line of an error."""
        self.problems += str(error).splitlines()


def check_texts(
    config: RunConfig,
    rows: int | None,
    texts: Mapping[str, DataSpec],
    models: Sequence[RunModel],
    report: CheckReport,
) -> list[TextWindows]:
    """Report on the texts, and return those that were tokenized.

    A text is tokenized to count its windows if its data is on this machine or its tokens are in the
    cache, unless a problem has already been found.
    """
    tokenize = not report.problems
    built_texts: list[TextWindows] = []
    for name, spec in texts.items():
        title = "data"
        if len(texts) > 1:
            title = f"data {name}"
        try:
            missing_parts = downloads(spec, config.cache)
            text = None
            if tokenize and not missing_parts:
                text = built_text(config, models, rows, name, spec)
            if text is not None:
                built_texts.append(text)
            if tokenize or missing_parts:
                report.lines.append(f"{title}: {windows_in_words.describe_windows(spec, text)}")
            for part in missing_parts:
                report.lines.append(f"{title}: {part}")
            if text is not None:
                for note in text.notes:
                    report.lines.append(f"{title}: {note}")
        except InputError as error:
            problem = f"{title}: {error}"
            if len(texts) == 1:
                problem = spec.blamed(error)
            report.problems.append(problem)
    return built_texts


def built_text(
    config: RunConfig,
    models: Sequence[RunModel],
    rows: int | None,
    name: str,
    spec: DataSpec,
) -> TextWindows | None:
    """Return the windows of a text; None for sampled text that no run has sampled yet."""
    if spec.is_sampled and spec.pack is None:
        return sampled_text.cached(config, models, spec, rows, name)
    return text_windows.build(
        spec, rows, config.cache, config.progress, name=name, render_s=config.window_timeout_s
    )


def check_reference(
    config: RunConfig,
    model_specs: Sequence[ModelSpec],
    models: Sequence[RunModel],
    data: EvalData,
) -> None:
    """InputError for models that do not fit the windows, or for an unusable reference.

    A reference whose files must still be fetched is not checked: its identity depends on them.
    """
    fitted_models = window_checks.fitted(config, model_specs, models, data)
    reference_model = next((model for model in fitted_models if model.is_reference), None)
    if reference_model is not None:
        if not reference_model.files.is_remote:
            # Called for their errors only, here and below.
            reference.reference_of_model(config, reference_model, data)
    elif config.logits_file is not None:
        reference.reference_of_store(config.logits_file, data)


def check_models(config: RunConfig, models: Sequence[RunModel], report: CheckReport) -> None:
    """Report on the files of models, and on what a run would refuse."""
    files_of_models = [model.files for model in models]
    contents: dict[Path, Contents] = {}
    # All folders in one process. Its error is reported below, for the model that causes it.
    with suppress(InputError):
        folders = comparable_folders(models, files_of_models)
        contents = contents_of(folders, config.progress)
    reference_folder = None
    for model in models:
        if model.is_reference and reference_folder is None:
            reference_folder = Path(model.planned.model_dir)
    for model, files in zip(models, files_of_models, strict=True):
        installed = " ".join(model.info.installed or ()).strip()
        line = f"{model.label}: {model.engine} ({installed}), {model.planned.model_dir}"
        folder = Path(model.planned.model_dir)
        try:
            if files.is_remote:
                report.lines.append(f"{line}, {files.would_fetch()}")
            else:
                report.lines.append(line)
                if is_gguf(folder) or exists(folder / "config.json"):
                    check_checkpoint(config, model, reference_folder, contents, report)
        except (InputError, ModelError) as error:
            report.problems.append(f"{model.label}: {error}")
            continue
        if model.info.unreachable:
            report.problems.append(f"{model.label}: {model.info.unreachable}")


def comparable_folders(
    models: Sequence[RunModel], files_of_models: Sequence[ModelFiles]
) -> list[Path]:
    """Return the folders on this machine whose contents Transformers can compare."""
    folders = []
    for model, files in zip(models, files_of_models, strict=True):
        if not isinstance(files, HuggingFaceFolder):
            continue
        if not files.is_remote and not files.other_config:
            folders.append(Path(model.planned.model_dir))
    return folders


def check_checkpoint(
    config: RunConfig,
    model: RunModel,
    reference_folder: Path | None,
    contents: Mapping[Path, Contents],
    report: CheckReport,
) -> None:
    """Report what ``doctor`` finds, what the engine misreads, and a shortage of memory."""
    folder = Path(model.planned.model_dir)
    if reference_folder is None or reference_folder == folder:
        examination = examine(folder, None, contents.get(folder))
    else:
        examination = examine(
            folder,
            reference_folder,
            contents.get(folder),
            reference_contents=contents.get(reference_folder),
            engine_tokens=engine_tokens_of(folder),
        )
    # Each group of layers has a fact of this title; reversed, the first one remains in the dict.
    facts = dict(reversed(examination.facts))
    layers = facts.get("layers", "").partition(":")[0]
    notes = [f"{layers}; {facts['size']}; {facts['files']}"]
    for finding in examination.findings:
        notes.append(str(finding))
    for reason in examination.unchecked:
        notes.append(f"not checked: {reason}")
    shortage = memory_shortage(config, model)
    if shortage is not None:
        notes.append(shortage)
    for note in notes:
        report.lines.append(f"{model.label}: {note}")
    if examination.is_wrong:
        report.is_wrong = True
    fault = backends.engine_class(model.engine).misreads(model.planned)
    if fault:
        report.lines.append(f"{model.label}: wrong: {fault}")
        report.is_wrong = True
    refusal = config.workers.refusal(model)
    if refusal:
        report.problems.append(f"{model.label}: {refusal}")


def memory_shortage(config: RunConfig, model: RunModel) -> str | None:
    """Return a line if a model's weight files are larger than its memory, or else None."""
    is_on_this_machine = model.capabilities.here and config.workers.is_local
    if not is_on_this_machine or model.planned.options.get("streaming"):
        return None
    size = sum(file.stat().st_size for file in model.files.weight_files())
    gpus = config.gpus.gpus[: model.n_gpus]
    if gpus:
        memory = int(sum(gpu.mib for gpu in gpus) * 2**20)
        owner = "the GPU has"
        if len(gpus) > 1:
            owner = f"{len(gpus)} GPUs have"
    else:
        memory = machine.memory_bytes()
        owner = "this machine has"
    if size <= memory:
        return None
    pack = ""
    if model.is_reference:
        pack = "; a reference pack needs no model (docs/packs.md)"
    return (
        f"does not fit: its weights are {bytes_in_words(size)}, {owner} {bytes_in_words(memory)}; "
        f"{backends.LAYER_BY_LAYER}{pack}"
    )


def downloads(spec: DataSpec, cache: Cache) -> list[str]:
    """Return lines about the parts of text and tokenizer that a run downloads.

    InputError if one does not exist.
    """
    if spec.pack is not None:
        return []
    if spec.is_sampled:
        spec = sampled.spec_of_prompts(spec)
    # InputError for a missing file.
    corpus.text_identity(spec)
    tokenizer = spec.locate(spec.tokenizer_dir)
    lines = []
    try:
        hub.resolve(tokenizer, spec.tokenizer_revision, tokenizer_only=True, download=False)
    except InputError:
        if not hub.is_hub_id(tokenizer):
            raise
        size = hub.would_fetch(tokenizer, spec.tokenizer_revision, hub.TOKENIZER_FILES)
        lines.append(f"the tokenizer of {tokenizer}, {size}")
    # Without the tokenizer it is not known whether the text's tokens are in the cache.
    text_download = tokens_cache.would_fetch(spec, cache, tokenizer_is_here=not lines)
    if text_download:
        lines.append(text_download)
    return lines
