"""The specs of texts and models, and the configuration, of a run's command line."""

from __future__ import annotations

import argparse
from functools import partial

from ..common.cache import Cache
from ..common.progress import Progress
from ..run.run_config import RunConfig, local_config
from ..specs import spec_files
from ..specs.spec_types import DataSpec, ModelSpec
from . import outputs
from .outputs import print_note

NO_DATA_SPEC = "with -m, -d takes data specs (JSON); a text goes with MODEL arguments: compare-q MODEL ... -d TEXT"
NO_MODEL_SPEC = "-m takes model specs (JSON); a model without a spec is an argument: compare-q MODEL ... -d TEXT"


def specs_of(args: argparse.Namespace) -> tuple[list[DataSpec], list[ModelSpec]]:
    """Return the texts and models of the files of ``-d`` and ``-m``, or those that the command line
    names.

    Prints which model is the reference, or each model's engine and why it was chosen.
    """
    texts = list(map(str, args.dataspec or []))
    if args.models:
        from . import shorthand

        data, models, said = shorthand.specs(
            args.models,
            texts,
            Progress(),
            pythons=dict(args.python),
            reference=not args.no_reference,
            tokenizer=args.tokenizer,
            eval_len=args.eval_len,
            eval_stride=args.eval_stride,
            sample=args.sample,
        )
    else:
        data = spec_files.load_data_specs(spec_files.expand(texts), NO_DATA_SPEC)
        models = spec_files.load_model_specs(
            spec_files.expand(args.modelspec), NO_MODEL_SPEC, print_note
        )
        models, said = spec_files.one_reference(
            models, stored=args.logits_file is not None or args.command == "gate"
        )
    chosen = spec_files.apply_mask(models, args.mask)
    print_note(*said)
    return data, chosen


def run_config(args: argparse.Namespace) -> RunConfig:
    """Return the configuration of the run that the flags describe."""
    silence = (
        {}
        if args.deadline is None
        else {"load_timeout_s": args.deadline, "window_timeout_s": args.deadline}
    )
    progress = Progress()
    config = local_config(
        Cache(args.cache_dir),
        progress,
        gpus=[] if args.ray else args.gpus or None,
        pythons=dict(args.python),
        clear=args.clear_cache,
        verbose=args.verbose,
        logits_file=args.logits_file,
        verify_weights=args.verify_weights,
        on_row=partial(outputs.print_row, progress.say),
        **silence,
    )
    if args.ray:
        from .. import cluster

        return cluster.on_cluster(config, args.ray, print_note)
    return config
