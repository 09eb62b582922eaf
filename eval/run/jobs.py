"""Model specs -> jobs: every check that needs no engine, and the key under which a model's token scores are kept."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compare_q import backends
from compare_q.backends.base import Capabilities, Decode, EngineInfo, ModelFacts, PlannedModel
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.json_files import check_unicode
from compare_q.backends.common.options import strings_in
from compare_q.backends.layers import noise
from compare_q.backends.worker import worker
from compare_q.eval.run.devices import Devices, Kind
from compare_q.eval.run.hosts import Hosts, Job, Session
from compare_q.eval.specs.types import ModelSpec
from compare_q.eval.text import vocabulary
from compare_q.eval.text.windows import EvalData

WEIGHTS_SHARE = 0.7
"""Share of a GPU's memory that weights may fill; the rest is for logits (1 GB for 2,048 tokens) and the KV cache."""
HASHED_BYTES = 1 << 24
DECODE_BATCH = 32
"""Windows that are decoded at a time, where the spec does not say how many and the engine can."""
SCORES_VERSION = 7
"""Version of the scoring; a change that moves numbers or what is kept raises it, so that stored scores are not mixed.

1: log-probabilities of the real tokens, in vLLM.
2: every engine is compared with one reference store, on the same positions.
3: the run's provenance lists every group of layers with its kernel, which older records lack.
4: segments in a folder, whatever the number of windows and the reference; GPUs by their kind.
5: vLLM runs eagerly unless the spec says otherwise.
6: vLLM leaves out no states (DeepSeek-V4.1's were zero); the provenance says whether prefill reads the KV cache.
7: Transformers makes the logits of windows of more than 2^28 of them in pieces, whose products may round otherwise.
"""


def plan(specs: Sequence[ModelSpec], max_tokens: int, hosts: Hosts) -> tuple[list[Job], list[str]]:
    """(jobs, problems) for windows of ``max_tokens``: each model is checked against what is installed and on disk."""
    jobs, problems = [], []
    for spec in specs:
        try:
            engine, engine_class = backends.resolve(spec.load_fn, spec.fwd_fn)
            python = hosts.python(None if spec.python is None else spec.locate(spec.python), engine, spec.load_fn)
            request = PlannedModel(
                label=spec.name, engine=engine, load_fn=spec.load_fn, model_dir=spec.located, max_tokens=max_tokens,
                options=spec.options, override_tensors=spec.override_tensors, revision=spec.revision,
                decode=decode_of(spec, engine_class.capabilities), python=python, replicas=spec.replicas,
                resources=dict(spec.resources), is_reference=spec.is_reference,
                spec=spec.model_dump(mode="json", exclude_unset=True),
            )  # fmt: skip
            check_unicode("model_dir", request.model_dir, *request.override_tensors)
            check_unicode("python", python)
            check_unicode("out_logits", spec.out_logits and spec.locate(spec.out_logits))
            jobs.append(check(Job(spec, engine, engine_class, request, python), hosts))
        except InputError as error:
            problems.append(spec.blamed(error))
    return jobs, list(dict.fromkeys(problems))


def decode_of(spec: ModelSpec, capabilities: Capabilities) -> Decode | None:
    """How a model's windows are fed in steps of generation, None in prefill; InputError where its engine cannot."""
    if spec.phase == "prefill":
        return None
    if not capabilities.decodes:
        raise InputError(f"phase: {spec.load_fn!r} cannot be scored in decode steps; leave it out")
    if spec.batch is not None and spec.batch > capabilities.decodes:
        most = "one window" if capabilities.decodes == 1 else f"{capabilities.decodes} windows"
        raise InputError(f"batch: {spec.load_fn!r} decodes {most} at a time; give no more")
    if spec.unscored == "prefill" and not capabilities.decodes_behind_prompts:
        raise InputError(f"unscored: {spec.load_fn!r} computes all tokens of a window in steps; leave it out")
    batch = spec.batch or min(DECODE_BATCH, capabilities.decodes)
    return Decode(spec.step, batch, spec.unscored == "prefill")


def check(job: Job, hosts: Hosts) -> Job:
    """The job with what its Python says of the engine and the GPUs that it will get.

    InputError if the engine is not installed, its options are wrong, or a local model's files do not fit.  A model
    elsewhere that does not say what it is (``EngineInfo.silence``) is asked again at its turn (``fetch``).
    """
    capabilities, request = job.engine_class.capabilities, job.request
    backends.check_files(request.model_dir, job.engine_class)
    described, kind = inspect(job, hosts)
    job = replace(job, described=described, kind=kind)
    if described.installed is None:
        where = "" if job.python is None else f" in {job.python}"
        raise InputError(f"load_fn: {request.load_fn!r} is not installed{where}: {capabilities.install}")
    if job.spec.is_reference and not capabilities.reference:
        raise InputError(f"reference: {request.load_fn!r} gives no logits to compare with; mark another model")
    if job.spec.is_reference and job.spec.noise_floor:
        raise InputError("noise_floor: the reference cannot be its own noise floor; mark one of the two")
    if request.options.get("noise") is not None and not job.spec.noise_floor:
        raise InputError('engine.noise: only for a model that is marked with "noise_floor": true')
    if request.revision is not None and not job.is_remote:
        raise InputError("revision: only for a model on the hub")
    if described.problem:
        raise InputError(described.problem)
    if request.override_tensors and not capabilities.override_tensors:
        raise InputError(f"model_dir: {request.load_fn!r} takes no override tensors; give the folder alone")
    for file in request.override_tensors:
        if not file.is_file():
            raise InputError(f"model_dir: override tensors {file}: no such file")
    if not job.is_remote:
        context = job.facts().context
        if context is not None and request.max_tokens > context:
            raise InputError(
                f"eval_len: windows of {request.max_tokens} tokens exceed the model's context of {context}"
            )
    devices = hosts.devices if kind is None else kind.devices
    return replace(job, gpus=devices.planned(wanted_gpus(job, devices)))


def inspect(job: Job, hosts: Hosts) -> tuple[EngineInfo, Kind | None]:
    """What the Python of a job has of the job's engine, there where it runs; InputError if it cannot run workers.

    A model elsewhere is only talked to in a worker.
    """
    if hosts.place is not None:
        return hosts.place(job)
    here = job.engine_class.capabilities.here
    if job.python is None and (here or hosts.in_process):
        return worker.inspect(job.request), None
    try:
        return hosts.inspect(job.python, job.request), None
    except ModelError as error:
        if here:
            named = str(error).startswith("python: ")
            raise InputError(str(error) if named else f"python: {job.python}: {error}") from None
        return EngineInfo(installed=("", ""), facts=ModelFacts(), silence=str(error)), None


def wanted_gpus(job: Job, devices: Devices) -> int:
    """GPUs that a model gets where there are some, 0 for all of them.

    An engine that spreads a model over what it sees gets as many as the weights fill to ``WEIGHTS_SHARE``.
    """
    wanted = job.engine_class.gpus(job.request) if job.spec.gpus is None else job.spec.gpus
    if wanted is not None or not devices.gpus:
        return wanted or 0
    bits = None if job.is_remote else job.files.storage().vram_bits
    room = WEIGHTS_SHARE * devices.gpus[0].mib * 1024**2
    return 0 if bits is None or not room else min(math.ceil(bits / 8 / room), devices.slots)


def fit(jobs: Sequence[Job], texts: Mapping[str, EvalData], hosts: Hosts) -> list[Job]:
    """The jobs for the windows of these texts, by their names; InputError with all problems, one a line.

    A chat prefix may have made the windows longer than the plan knew.  The only text may have an empty name.
    """
    fitted, problems = [], []
    longest = max(data.length for data in texts.values())
    for job in jobs:
        longer = replace(job, request=job.request.updated(max_tokens=longest))
        try:
            longer = check(longer, hosts) if longest > job.request.max_tokens else longer
        except InputError as error:
            problems.append(job.spec.blamed(error))
        else:
            problems += vocabulary_problems(longer, texts) + rope_problems(longer, texts)
        fitted.append(longer)
    raise_all(problems)
    return fitted


def raise_all(problems: Sequence[str]) -> None:
    """InputError with one line a problem, if there are any."""
    if problems:
        raise InputError("\n".join(dict.fromkeys(problems)))


def rope_problems(job: Job, texts: Mapping[str, EvalData]) -> list[str]:
    """A line if the longest text would change what the model computes of the others, under the key that these have."""
    edge = None if job.is_remote else job.facts().rope_changes_above
    lengths = [data.length for data in texts.values()]
    if edge is None or not min(lengths) <= edge < max(lengths):
        return []
    return [
        f"{job.request.label}: eval_len: the model has other rotary factors in contexts above {edge:,} tokens, and "
        "the longest text decides for all; score texts of longer windows in a run of their own"
    ]


def vocabulary_problems(job: Job, texts: Mapping[str, EvalData]) -> list[str]:
    """A line for each text, by their names, whose tokenizer has tokens that the model has no logit for, or that mean
    others to it.
    """
    if job.is_remote:
        return []
    facts, trusted, problems = job.facts(), bool(job.request.options.get("trust_remote_code")), []
    for name, data in texts.items():
        said = None
        if facts.vocab_size is not None and data.top_id >= facts.vocab_size:
            cure = "give the model's own tokenizer"
            said = f"its vocabulary reaches id {data.top_id}, the model has {facts.vocab_size} tokens; {cure}"
        elif facts.tokenizer is not None:
            other = vocabulary.disagreement(
                facts.tokenizer,
                data.tokenizer,
                trusted=trusted,
                data_trusted=data.spec.trust_remote_code,
                seen=data.seen,
            )
            said = other and f"is not this model's tokenizer: {other}"
        if said:
            problems.append(f"{job.request.label}: {name and f'{name}: '}tokenizer_dir: {said}")
    return problems


def emulated_dtypes(jobs: Sequence[Job]) -> str | None:
    """A line on the models whose dtype this CPU has no arithmetic for, and what another one would gain.

    Four windows of SmolLM2-135M took 80.8 s in bfloat16 and 17.9 s in float32 on two cores with AVX2, and differed by a
    KLD of 0.0010.  With AVX-512 and no BF16 a core multiplied 19 GFLOP/s in bfloat16 and 107 in float32.
    """
    if not machine.emulates_bf16():
        return None
    here = [job for job in jobs if job.is_settled and job.engine_class.capabilities.torch and job.kind is None]
    on_cpu = [job for job in here if job.described.cpu_only or not job.gpus]
    labels = ", ".join(job.request.label for job in on_cpu if job.facts().dtype in ("bfloat16", "float16"))
    said = f"{labels}: 16-bit products are emulated on this CPU, which has neither AVX-512 BF16 nor AMX: "
    cure = '"dtype": "float32" in "engine" takes about a quarter of the time, for a KLD of some 0.001'
    return said + cure if labels else None


def fetch(job: Job, session: Session) -> Job:
    """The job with its model on this machine, and with the model's stamp.

    A model that was not known before its turn is downloaded where need be, and checked; one elsewhere is asked again
    what it is.  InputError or ModelError if it cannot be had, or if its files are damaged.
    """
    if not job.is_settled:
        if job.is_remote:
            with session.progress.phase(f"fetching {job.request.model_dir}", unit="bytes") as phase:
                job = replace(job, request=job.files.fetch(session.hosts.stoppable(phase)))
        job = check(job, session.hosts)
        if job.described.silence:
            raise ModelError(job.described.silence)
    return replace(job, request=job.request.updated(stamp=job.stamp()))


def identity(job: Job, data: EvalData, session: Session) -> dict[str, Any]:
    """Everything that a fetched model's scores depend on; reads the headers of its files (InputError if damaged)."""
    found = {
        "version": SCORES_VERSION,
        "series": data.series,
        "model": job.request.stamp or job.stamp(),
        "engine": job.engine,
        "load_fn": job.request.load_fn,
        "options": job.request.options,
        "versions": job.described.versions,
        "hardware": hardware(job),
    }
    if job.request.options.get("noise") is not None:
        found["noise"] = noise.VERSION
    if job.request.decode is not None:  # prefill's keys stay what they were
        found["decode"] = asdict(job.request.decode)
    if (edge := job.facts().rope_changes_above) is not None:  # the longest window of a run decides for all of them
        found["long_rope"] = job.request.max_tokens > edge
    if session.verify_weights:
        found["weights"] = [digest_of(file, session) for file in job.files.weight_files()]
    return found


def digest_of(file: Path, session: Session) -> str:
    """SHA-256 of all of a file, which one run computes once; InputError if the file cannot be read."""
    try:
        stat = file.stat()
        key = (str(file), stat.st_size, stat.st_mtime_ns)
        if key not in session.digests:
            title = f"hashing {file.name}"
            with session.progress.phase(title, unit="bytes", total=stat.st_size) as phase, file.open("rb") as stream:
                watch, digest = session.hosts.stoppable(phase), hashlib.sha256()
                while piece := stream.read(HASHED_BYTES):
                    digest.update(piece)
                    watch.advance(len(piece))
            session.digests[key] = digest.hexdigest()
    except OSError as error:
        raise InputError(f"model_dir: {file}: cannot be read: {error.strerror}") from None
    return session.digests[key]


def hardware(job: Job) -> dict[str, Any]:
    """What the scores of a job are computed on, as far as this machine knows; part of the scores' key."""
    capabilities = job.engine_class.capabilities
    if not capabilities.here:
        return {}
    on_gpus_alone = capabilities.torch and "cpu" not in strings_in(job.request.options)
    found = machine.hardware(job.gpus, torch=on_gpus_alone, cpu_only=job.described.cpu_only)
    if job.kind is None:
        return {**found, **machine.settings()}
    processor = job.kind.processor if "cpu" in found else {}
    return {name: found[name] for name in ("gpus", "driver") if name in found} | processor | job.kind.settings


def known_before(job: Job) -> dict[str, Any]:
    """What is known of a run before it begins, as the first part of its provenance."""
    threads = machine.threads() if job.engine_class.capabilities.here else {}
    if job.kind is not None:
        threads = {name: job.kind.processor.get(name) for name in threads}
    python = {} if job.python is None else {"python_path": job.python}
    phase = {} if job.request.decode is None else {"phase": job.request.decode.words}
    return {"engine": job.engine, **phase, **job.described.versions, **python, **hardware(job), **threads}
