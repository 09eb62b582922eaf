"""The windows of sampled text: the reference model of a run samples them, or the cache has them.

The key has everything that the tokens depend on: the prompts, the seed, the number and length of
windows, and the identity of the model's scores, which names its files, engine, versions and
hardware.  Another number of windows is another batch, and may give other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from ... import backends
from ...backends.common.errors import InputError
from ...backends.worker.protocol import SampleCommand
from ..specs.spec_types import PROMPT_TOKENS, DataSpec
from ..text import corpus, sampled, stored_tokens, text_windows, tokens_cache
from ..text.eval_data import EvalData
from ..text.text_tokens import Tokens
from ..text.text_windows import TextWindows
from . import plan
from .loaded_worker import loaded_worker
from .model_checks import check_model, raise_all
from .model_identity import identity
from .run_config import RunConfig
from .run_model import RunModel
from .window_checks import vocabulary_problems


class Prompts(NamedTuple):
    """The prompts of sampled text: their text, with them as its windows, and their tokens."""

    text: TextWindows
    token_ids: list[list[int]]


def build(
    config: RunConfig,
    models: Sequence[RunModel],
    spec: DataSpec,
    n_windows: int | None,
    name: str = "",
) -> TextWindows:
    """Return the windows of sampled text; InputError or ModelError with the reason if it fails.

    ``models``: of the run.  ``n_windows``: the number of windows of this run; None: the spec's
    ``max_rows``.  ``name``: of the text in the run.
    """
    model = sampler_of(config, models, spec)
    prompts = prompts_of(config, spec, n_windows)
    model = plan.fetched(config, model)
    key = key_of(config, model, spec, prompts)
    config.cache.use("tokens", key)
    if config.clear:
        config.cache.clear("tokens", key)
    tokens = stored_tokens.load(config.cache, key)
    if tokens is None:
        tokens = sample(config, model, spec, prompts, key)
        with config.cache.write("tokens", key, ".npz") as file:
            stored_tokens.save(file, tokens, key)
    return cut(tokens, spec, prompts, key, name)


def cached(
    config: RunConfig,
    models: Sequence[RunModel],
    spec: DataSpec,
    n_windows: int | None,
    name: str = "",
) -> TextWindows | None:
    """Return the windows of sampled text, None if the model has not sampled them yet.

    Nothing is downloaded except the text of the prompts.  InputError as in ``build``.
    """
    model = sampler_of(config, models, spec)
    prompts = prompts_of(config, spec, n_windows)
    if not plan.is_available(model):
        return None
    key = key_of(config, model, spec, prompts)
    tokens = stored_tokens.load(config.cache, key)
    if tokens is None:
        return None
    return cut(tokens, spec, prompts, key, name)


def sampler_of(config: RunConfig, models: Sequence[RunModel], spec: DataSpec) -> RunModel:
    """Return the reference model, checked for sampling.

    InputError if there is none, or if it cannot sample.
    """
    reference = next((model for model in models if model.is_reference), None)
    if reference is None:
        raise InputError(
            'dataset: "sampled" is text that the reference model samples, and no model is the '
            'reference; mark one with "reference": true, or give a pack of such text '
            "(compare-q pack MODEL --sampled)"
        )
    if not reference.capabilities.samples:
        raise InputError(f'dataset: "sampled": {reference.label}: {why_not(reference)}')
    # The longest window of the run may be of another text: it must not change these tokens.  A
    # reference that is scored in decode samples in the engine's usual steps.
    model = reference.with_planned(max_tokens=spec.eval_len, samples=True, decode=None)
    return check_model(config, model)


def why_not(model: RunModel) -> str:
    """Return why a model cannot sample text, and what can."""
    if model.files.is_store:
        return 'a reference pack cannot sample text; {"pack": FOLDER} is the text that it has'
    load_fns: list[str] = []
    for _, engine in backends.engines():
        if engine.capabilities.samples:
            load_fns += engine.capabilities.load_fns
    return f"{model.planned.load_fn} cannot sample text; these can: {', '.join(load_fns)}"


def prompts_of(config: RunConfig, spec: DataSpec, n_windows: int | None) -> Prompts:
    """Return one prompt for each window; InputError without a number of windows."""
    if n_windows is None:
        n_windows = spec.max_rows
    if not n_windows:
        raise InputError(
            "max_rows: sampled text has no end; give the number of windows here or with -r"
        )
    prompt_spec = sampled.spec_of_prompts(spec)
    tokenizer = tokens_cache.fetch_tokenizer(prompt_spec, config.progress)
    tokens = tokens_cache.make_or_load(
        prompt_spec,
        tokenizer,
        config.cache,
        config.progress,
        clear=config.clear,
        render_s=config.window_timeout_s,
    )
    text = sampled.text_of_prompts(tokens, prompt_spec, n_windows, tokenizer)
    return Prompts(text, sampled.token_ids_of_prompts(text, n_windows))


def key_of(config: RunConfig, model: RunModel, spec: DataSpec, prompts: Prompts) -> str:
    """Return the key of sampled tokens; InputError if the tokenizer is not the model's."""
    raise_all(vocabulary_problems(model, EvalData.joined([prompts.text])))
    facts = sampled.identity_of(spec, prompts.text, prompts.token_ids, identity(config, model))
    return config.cache.key("tokens", facts)


def cut(tokens: Tokens, spec: DataSpec, prompts: Prompts, key: str, name: str) -> TextWindows:
    """Return the windows of sampled tokens."""
    windows = text_windows.cut(tokens, spec, None, prompts.text.tokenizer, name)
    return replace(windows, tokens_key=key)


def sample(
    config: RunConfig, model: RunModel, spec: DataSpec, prompts: Prompts, key: str
) -> Tokens:
    """Load the model in a worker, sample the windows, and return their tokens."""
    n_tokens = spec.eval_len - PROMPT_TOKENS
    command = SampleCommand(prompts.token_ids, n_tokens, spec.seed or 0)
    text = corpus.display_name(spec)
    n_all = n_tokens * len(prompts.token_ids)
    with (
        loaded_worker(config, model, key, f"{model.label} for {text}") as worker,
        config.progress.phase(f"sampling {text}", unit="tokens", total=n_all) as phase,
    ):
        answer = worker.perform(command, config.window_timeout_s, phase.show)
    return sampled.tokens_of(
        prompts.text,
        prompts.token_ids,
        answer["token_ids"],
        answer["logprobs"],
        note_of(model, spec),
    )


def note_of(model: RunModel, spec: DataSpec) -> str:
    """Return a footnote for the table: which model sampled the text, and how."""
    name = sampled.name_of_model(model.spec.located)
    version = " ".join(model.info.installed or ())
    text = corpus.name_of_prompts(spec)
    return (
        f"text sampled by {name} ({model.planned.load_fn}, {version}) at temperature 1, "
        f"seed {spec.seed or 0}, after prompts of {PROMPT_TOKENS} tokens of {text}"
    )
