"""Prompts and a model -> a trace: what of it is there already, the model in its worker, the answers as they come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from compare_q import __version__, backends
from compare_q.backends.base import Answer, Question, Sampling
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.worker.messages import AnswerJob, LoadJob
from compare_q.eval.cli.trace import files
from compare_q.eval.cli.trace.files import Partial, Prompt
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.processes import apart
from compare_q.eval.common.progress import Phase
from compare_q.eval.run import jobs
from compare_q.eval.run.jobs import Job
from compare_q.eval.run.session import Session
from compare_q.eval.specs.types import ModelSpec

ANSWER = TypeAdapter(Answer)


@dataclass(frozen=True)
class TraceRequest:
    """What ``compare-q trace`` was asked for.  ``sampling`` has no stop tokens yet, which the model says.

    ``extends``: whether ``output`` was there when the run began, and is to be added to.
    """

    file: Path
    output: Path
    spec: ModelSpec
    sampling: Sampling
    seed: int
    extends: bool


@dataclass(frozen=True)
class Model:
    """The model of a trace, on this machine or on a server, and what its tokenizer makes of the prompts.

    ``ids``: the tokens of each prompt, empty where a server has the template; ``stop``: id -> token.
    """

    job: Job
    template: str | None = None
    vocab_size: int | None = None
    ids: Sequence[Sequence[int]] = ()
    stop: Mapping[int, str] = field(default_factory=dict)


def ready(session: Session, trace: TraceRequest, prompts: Sequence[Prompt]) -> Model:
    """The model, checked, fetched, and with windows as long as its prompts and answers; InputError before it loads."""
    job = jobs.fetch(checked(session, trace), session)
    if job.engine_class.capabilities.answers == "messages":
        return Model(stamped(job))
    facts = job.facts()
    if not isinstance(facts.tokenizer, Path):
        raise InputError("model_dir: has no tokenizer; compare-q trace needs the model's own, with its chat template")
    tokenized = apart(
        files.tokenized_prompts, "tokenizing the prompts", session.progress, file=str(trace.file),
        folder=str(facts.tokenizer), trusted=bool(job.request.options.get("trust_remote_code")),
        variables=dict(trace.sampling.template),
    )  # fmt: skip
    for prompt, ids in zip(prompts, tokenized["ids"], strict=True):
        if facts.context is not None and len(ids) + trace.sampling.max_tokens > facts.context:
            raise InputError(
                f"{prompt.talk.where}: has {len(ids):,} tokens, and {trace.sampling.max_tokens:,} more for the answer "
                f"are beyond the model's context of {facts.context:,}; lower --max-tokens, or leave it out"
            )
        if facts.vocab_size is not None and ids and max(ids) >= facts.vocab_size:
            raise InputError(f"{prompt.talk.where}: token {max(ids)} is beyond the {facts.vocab_size} of the model")
    longest = max(map(len, tokenized["ids"])) + trace.sampling.max_tokens
    job = stamped(jobs.check(replace(job, request=replace(job.request, max_tokens=longest)), session.hosts))
    return Model(job, tokenized["template"], tokenized["vocab_size"], tokenized["ids"], dict(tokenized["stop"]))


def checked(session: Session, trace: TraceRequest) -> Job:
    """The spec as a job whose engine can answer; InputError."""
    spec = trace.spec
    _, engine_class = backends.resolve(spec.load_fn, spec.fwd_fn)
    if not engine_class.capabilities.answers:
        able = [engine.capabilities for _, engine in backends.engines() if engine.capabilities.answers]
        names = ", ".join(name for capabilities in able for name in capabilities.load_fns)
        raise InputError(f"{spec.name}: load_fn: {spec.load_fn!r} answers no prompts; these do: {names}")
    as_text = trace.output.suffix.lower() == ".jsonl"
    if as_text and engine_class.capabilities.answers == "tokens":
        raise InputError(f"-o: {trace.output}: must end in .json: of this engine's answers the tokens are kept")
    if spec.noise_floor:
        raise InputError(f"{spec.name}: noise_floor: is the reference with noise; let the reference itself answer")
    (planned, problems) = jobs.plan([spec], 2, session.hosts)
    if problems:
        raise InputError("\n".join(problems))
    (job,) = planned
    job.engine_class.check_answers(job.request, trace.sampling)
    return job


def stamped(job: Job) -> Job:
    """The job with what its model's files, or its server, are now."""
    stamp = job.files.content() if job.engine_class.capabilities.here else job.stamp()
    return replace(job, request=replace(job.request, stamp=stamp))


def made_by(trace: TraceRequest, model: Model) -> dict[str, Any]:
    """By what model and how the answers are made, in JSON types."""
    job, sampling = model.job, replace(trace.sampling, stop=tuple(model.stop))
    here = {"options": job.request.options} if job.engine_class.capabilities.here else {}
    said = {key: value for key, value in asdict(sampling).items() if key not in ("template", "as_text")}
    return {
        "compare_q": __version__, "model": trace.spec.located, "revision": trace.spec.revision,
        "load_fn": job.request.load_fn, **here, "stamp": job.request.stamp, "versions": job.described.versions,
        "template": model.template, "template_vars": dict(sampling.template),
        "sampling": {**said, "stop": list(sampling.stop), "seed": trace.seed},
    }  # fmt: skip


def answer_all(
    session: Session, trace: TraceRequest, model: Model, prompts: Sequence[Prompt], partial: Partial
) -> None:
    """Have the model answer every prompt that has no answer; ModelError, with the answers so far kept."""
    questions = tuple(
        question_of(trace, model, number, prompt)
        for number, prompt in enumerate(prompts) if prompt.key not in partial.records
    )  # fmt: skip
    if not questions:
        return
    if len(questions) < len(prompts):
        session.progress.say(f"{len(prompts) - len(questions)} of {len(prompts)} prompts are answered already")
    sampling = replace(trace.sampling, stop=tuple(model.stop))
    with session.progress.phase(f"answering by {trace.spec.name}", unit="prompts", total=len(questions)) as phase:

        def keep(answer: Answer) -> None:
            prompt, ids = prompts[answer.number], model.ids[answer.number] if model.ids else answer.prompt_ids
            if model.vocab_size is not None and max(answer.token_ids or (0,)) >= model.vocab_size:
                raise ModelError(
                    f"{prompt.talk.where}: answered with token {max(answer.token_ids or ())}, and the tokenizer has "
                    f"{model.vocab_size} ids: the model is not trained, or damaged"
                )
            kept = (
                {"messages": prompt.talk.messages, "tools": prompt.talk.tools, "message": answer.message}
                if sampling.as_text
                else {"turn": prompt.turn, "input_ids": list(ids or ()), "response_ids": list(answer.token_ids or ())}
            )
            partial.add(prompt.key, {**kept, "finish_reason": answer.finish})
            phase.advance()

        stream_answers(session, model.job, AnswerJob(questions, sampling), keep, phase)


def question_of(trace: TraceRequest, model: Model, number: int, prompt: Prompt) -> Question:
    """A prompt as the engine takes it.  Its seed is its own: the answer does not depend on which others are asked."""
    seed = int.from_bytes(hashlib.sha256(f"{trace.seed} {prompt.key}".encode()).digest()[:4]) >> 1
    if model.job.engine_class.capabilities.answers == "tokens":
        return Question(number, seed, tuple(model.ids[number]), where=prompt.talk.where)
    return Question(number, seed, messages=prompt.talk.messages, tools=prompt.talk.tools, where=prompt.talk.where)


def stream_answers(
    session: Session, job: Job, questions: AnswerJob, keep: Callable[[Answer], None], phase: Phase
) -> None:
    """Have a model answer in a worker of its own, which is gone afterwards; every answer is kept as it comes."""
    hosts, limits = session.hosts, session.hosts.limits
    key = Cache.key("traces", {"model": job.request.stamp, "name": job.request.model_dir})
    log_file = None if session.verbose else session.cache.log_file(job.request.label, key)
    request = replace(job.request, log_file=log_file)
    worker = hosts.worker(job.wanted(log_file, verbose=session.verbose))

    def show(kind: str, content: Any) -> None:
        if kind == "answer":
            keep(ANSWER.validate_python(content))
        elif kind == "say":
            phase.say(content)

    with hosts.devices.taken(len(job.gpus)) as hold, hosts.running.started(worker):
        worker.perform(LoadJob(job.engine, request, hold.names), limits, show)
        worker.perform(questions, limits, show)


def make(session: Session, trace: TraceRequest) -> tuple[list[dict[str, Any]], Model]:
    """Write the trace; (its records, the model).  InputError or ModelError in one line."""
    prompts = files.read_prompts(trace.file)
    model = ready(session, trace, prompts)
    made, keys = made_by(trace, model), [prompt.key for prompt in prompts]
    with files.opened(trace.output, made, model.job.files.same_model, extends=trace.extends) as partial:
        partial.check_asked(keys, trace.file)
        answer_all(session, trace, model, prompts, partial)
        return partial.finish(keys, model.vocab_size), model
