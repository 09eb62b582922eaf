"""``compare-q trace``: flags and prompts -> a model in its worker, its answers as they come, and the trace of them."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from compare_q import __version__, backends
from compare_q.backends.base import Answer, Question, Sampling
from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.messages import printable
from compare_q.backends.worker.messages import AnswerJob, LoadJob
from compare_q.eval.cli.trace import files
from compare_q.eval.cli.trace.files import Partial, Prompt
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.processes import apart
from compare_q.eval.common.progress import Progress
from compare_q.eval.run import hosts, jobs
from compare_q.eval.run.hosts import Job, Session, signals_interrupt
from compare_q.eval.specs import reading
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


def run(args: argparse.Namespace) -> int:
    """Make a trace; the exit status.  CompareQError for everything that a user can cause."""
    files.check_output(args.output, extend=args.extend)
    trace = asked_for(args)
    here, said = hosts.of_this_machine(args.gpus or None, dict(args.python), args.deadline)
    session = Session(Cache(args.cache_dir), Progress(), verbose=args.verbose, hosts=here)
    if said:
        session.progress.say(said)
    try:
        with signals_interrupt(here):
            prompts = files.read_prompts(trace.file)
            model = ready(session, trace, prompts)
            made, keys = made_by(trace, model), [prompt.key for prompt in prompts]
            with files.opened(trace.output, made, model.job.files.same_model, extends=trace.extends) as partial:
                partial.check_asked(keys, trace.file)
                answer_all(session, trace, model, prompts, partial)
                records = partial.finish(keys, model.vocab_size)
    except KeyboardInterrupt as interrupt:
        here.stop()
        file = files.partial_of(args.output)
        kept = f"what was answered is in {printable(file)}, run again to go on"
        print(f"\ninterrupted; {kept if file.exists() else 'nothing was answered yet'}", file=sys.stderr)
        return 128 + getattr(interrupt, "signal", 2)
    for line in summed(trace, records, model):
        print(printable(line))
    return 0


def asked_for(args: argparse.Namespace) -> TraceRequest:
    """The flags as one object; InputError for flags that cannot go together."""
    if 0 < args.temperature < 0.01:
        raise InputError("--temperature: give 0, or 0.01 and more: vLLM takes less for 0.01")
    if args.top_p < 1 and not args.temperature:
        raise InputError("--top-p: goes with a --temperature above 0; without one the most probable token is taken")
    for path in (args.output, files.partial_of(args.output)):
        if args.prompts.exists() and path.exists() and path.samefile(args.prompts):
            raise InputError(f"-o: {printable(path)}: is the file of the prompts; name another")
    sampling = Sampling(
        args.max_tokens, args.temperature, args.top_p, template=args.chat_template_kwargs,
        as_text=args.output.suffix.lower() == ".jsonl",
    )  # fmt: skip
    extends = args.extend and json_files.exists(args.output)
    return TraceRequest(args.prompts, args.output, spec_of(args.modelspec, args.mask), sampling, args.seed, extends)


def spec_of(given: str, mask: str | None) -> ModelSpec:
    """The one model that is to answer: a server by its URL, or the model of a spec file that the mask leaves."""
    if given.startswith(("http://", "https://")):
        return reading.parse_model_spec(
            {"load_fn": "vllm_server", "model_dir": given, "label": "the server"}, Path("-m")
        )
    specs = reading.load_model_specs(reading.expand([given]))
    named = reading.matching([spec.name for spec in specs], mask)
    chosen = [spec for spec in specs if spec.name in named]
    if len(chosen) != 1:
        names = ", ".join(spec.name for spec in specs)
        what = f"{len(chosen)} models of it are chosen, and one answers; choose it with -mask, of"
        raise InputError(f"-m: {printable(given)}: {what}: {printable(names)}")
    return chosen[0]


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
    if spec.phase != "prefill":
        raise InputError(f"{spec.name}: phase: is about scoring, answers are always generated; leave it out")
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


def sampling_of(trace: TraceRequest, model: Model) -> Sampling:
    """How answers are made, with the tokens that end them."""
    return replace(trace.sampling, stop=tuple(model.stop))


def made_by(trace: TraceRequest, model: Model) -> dict[str, Any]:
    """By what model and how the answers are made, in JSON types."""
    job, sampling = model.job, sampling_of(trace, model)
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
    """Have the model answer every prompt that has no answer, in a worker of its own; each is kept as it comes."""
    questions = tuple(
        question_of(trace, model, number, prompt)
        for number, prompt in enumerate(prompts) if prompt.key not in partial.records
    )  # fmt: skip
    if not questions:
        return
    if len(questions) < len(prompts):
        session.progress.say(f"{len(prompts) - len(questions)} of {len(prompts)} prompts are answered already")
    here, job = session.hosts, model.job
    key = Cache.key("traces", {"model": job.request.stamp, "name": job.request.model_dir})
    log_file = None if session.verbose else session.cache.log_file(job.request.label, key)
    job = replace(job, request=replace(job.request, log_file=log_file))
    with session.progress.phase(f"answering by {trace.spec.name}", unit="prompts", total=len(questions)) as phase:

        def show(kind: str, content: Any) -> None:
            if kind == "answer":
                answer = ANSWER.validate_python(content)
                partial.add(prompts[answer.number].key, record_of(trace, model, prompts[answer.number], answer))
                phase.advance()
            elif kind == "say":
                phase.say(content)

        with here.devices.taken(len(job.gpus)) as hold, here.started(lambda: here.worker(job)) as worker:
            worker.perform(LoadJob(job.engine, job.request, hold.names), here.load_s, show)
            worker.perform(AnswerJob(questions, sampling_of(trace, model)), here.window_s, show)


def question_of(trace: TraceRequest, model: Model, number: int, prompt: Prompt) -> Question:
    """A prompt as the engine takes it.  Its seed is its own: the answer does not depend on which others are asked."""
    seed = int.from_bytes(hashlib.sha256(f"{trace.seed} {prompt.key}".encode()).digest()[:4]) >> 1
    if model.job.engine_class.capabilities.answers == "tokens":
        return Question(number, seed, tuple(model.ids[number]), where=prompt.talk.where)
    return Question(number, seed, messages=prompt.talk.messages, tools=prompt.talk.tools, where=prompt.talk.where)


def record_of(trace: TraceRequest, model: Model, prompt: Prompt, answer: Answer) -> dict[str, Any]:
    """An answer as the trace keeps it; ModelError for a token that the tokenizer has not."""
    if trace.sampling.as_text:
        kept = {"messages": prompt.talk.messages, "tools": prompt.talk.tools, "message": answer.message}
        return {**kept, "finish_reason": answer.finish}
    asked = model.ids[answer.number] if model.ids else answer.prompt_ids or ()
    answered = answer.token_ids or ()
    if model.vocab_size is not None and max(answered, default=0) >= model.vocab_size:
        raise ModelError(
            f"{prompt.talk.where}: answered with token {max(answered)}, and the tokenizer has {model.vocab_size} ids: "
            "the model is not trained, or damaged"
        )
    ids = {"input_ids": list(asked), "response_ids": list(answered)}
    return {"turn": prompt.turn, **ids, "finish_reason": answer.finish}


def summed(trace: TraceRequest, records: Sequence[dict[str, Any]], model: Model) -> list[str]:
    """What a trace holds, how it is scored, and what ended the answers, where the engine was told."""
    cut = sum(record["finish_reason"] == "length" for record in records)
    left_out = " and are left out: as text, an answer cannot be without its end" if trace.sampling.as_text else ""
    ended = f"; {cut} hit --max-tokens {trace.sampling.max_tokens}{left_out}" if cut else ""
    if trace.sampling.as_text:
        return [f"{trace.output}: {len(records) - cut} answers as messages{ended}"]
    before, after = (sum(len(record[key]) for record in records) for key in ("input_ids", "response_ids"))
    longest = max(len(record["input_ids"]) + len(record["response_ids"]) for record in records)
    spec = json.dumps({"dataset": "chat", "path": str(trace.output), "eval_len": longest})
    named = ", ".join(f"{token} ({number})" for number, token in model.stop.items())
    ends = f"an answer ended at: {named}" if named else "no token ends an answer: the model's config names none"
    return [
        f"{trace.output}: {len(records)} answers of {after:,} tokens, behind {before:,} of prompts{ended}",
        f"to score them all, a data spec has the tokenizer_dir and {spec[1:-1]}",
        *([ends] if model.ids else []),
    ]
