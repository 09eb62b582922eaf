"""The specs of texts and models, and the configuration, of a run's command line."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..common.cache import Cache
from ..common.progress import Progress
from ..run.run_config import RunConfig, local_config
from ..specs import spec_files
from ..specs.spec_types import DataSpec, ModelSpec
from . import outputs, shorthand
from .commands import Inputs, Resources
from .outputs import print_note

NO_DATA_SPEC = (
    "with -m, -d takes data specs (JSON); a text goes with MODEL arguments: compare-q MODEL ... "
    "-d TEXT"
)
NO_MODEL_SPEC = (
    "-m takes model specs (JSON); a model without a spec is an argument: compare-q MODEL ... "
    "-d TEXT"
)


def specs_of(
    inputs: Inputs, resources: Resources, *, stored: bool
) -> tuple[list[DataSpec], list[ModelSpec]]:
    """Return the texts and models that the command line names, or the files of ``-d`` and ``-m``.

    Prints which model is the reference, or each model's engine and why it was chosen.  ``stored``:
    True if the command needs no model that is marked as the reference, since a reference store or
    its first model takes that place; then no note says that the KLD will be missing.
    """
    texts = [str(path) for path in inputs.data]
    if inputs.models:
        data, models, notes = shorthand.specs(
            inputs.models,
            texts,
            Progress(),
            pythons=dict(resources.pythons),
            reference=not inputs.no_reference,
            tokenizer=inputs.tokenizer,
            eval_len=inputs.eval_len,
            eval_stride=inputs.eval_stride,
            sample=inputs.sample,
        )
    else:
        data = spec_files.load_data_specs(spec_files.expand(texts), NO_DATA_SPEC)
        models = spec_files.load_model_specs(
            spec_files.expand(inputs.specs), NO_MODEL_SPEC, print_note
        )
        models, notes = spec_files.one_reference(models, stored=stored)
    selected_models = spec_files.apply_mask(models, inputs.mask)
    print_note(*notes)
    return data, selected_models


def run_config(resources: Resources) -> RunConfig:
    """Return the configuration of the run that the flags describe."""
    timeouts: dict[str, Any] = {}
    if resources.deadline is not None:
        timeouts = {
            "load_timeout_s": resources.deadline,
            "window_timeout_s": resources.deadline,
        }
    gpus: Sequence[str] | None = resources.gpus or None
    # A cluster assigns its own GPUs.
    if resources.ray:
        gpus = ()
    progress = Progress()
    config = local_config(
        Cache(resources.cache_dir),
        progress,
        gpus=gpus,
        pythons=dict(resources.pythons),
        clear=resources.clear_cache,
        verbose=resources.verbose,
        logits_file=resources.logits_file,
        verify_weights=resources.verify_weights,
        on_row=partial(outputs.print_row, progress.say),
        **timeouts,
    )
    if resources.ray:
        # Imported here: only a run on a cluster needs it.
        from .. import cluster

        return cluster.on_cluster(config, resources.ray, print_note)
    return config
