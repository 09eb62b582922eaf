"""The command line of ``compare-q trace``: flags -> a model, prompts -> a trace, and what to do with it."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compare_q.backends.base import Sampling
from compare_q.backends.common import json_files
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable
from compare_q.eval.cli.flags import SHARED, Parser, add, number, path_argument
from compare_q.eval.cli.trace import files
from compare_q.eval.common.cache import Cache, default_root
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import ModelSpec

if TYPE_CHECKING:
    from compare_q.eval.cli.trace.answering import TraceRequest

LARGEST_SEED = 2**31 - 1


def variables(given: str) -> dict[str, Any]:
    """``--chat-template-kwargs``: a JSON object."""
    try:
        value = json_files.parsed(given.encode(errors="surrogatepass"), "--chat-template-kwargs")
    except InputError as error:
        raise argparse.ArgumentTypeError(str(error).partition(": ")[2]) from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{given!r} is no JSON object")
    return value


FLAGS: dict[str, dict[str, Any]] = {
    "prompts": {"type": path_argument, "help": ".jsonl with prompt or messages a line; else a prompt a line"},
    "-o --output": {"type": path_argument, "required": True, "metavar": "FILE",
                    "help": "the trace: .json holds tokens, as qbench's; .jsonl holds messages (of a server)"},
    "-m --modelspec": {"required": True, "metavar": "SPEC|URL",
                       "help": "model specification (JSON), or the URL of a running `vllm serve`"},
    "--max-tokens": {"type": number("number of tokens above 0", 1, 10**9, int), "default": 1024,
                     "help": "tokens of an answer at most (default: %(default)s)"},
    "--temperature": {"type": number("temperature from 0 to 10", 0, 10), "default": 0.0,
                      "help": "0, the default: the most probable token each time"},
    "--top-p": {"type": number("share above 0 and up to 1", math.ulp(0.0), 1), "default": 1.0,
                "help": "draw from this share of the probability (default: 1)"},
    "--seed": {"type": number(f"whole number from 0 to {LARGEST_SEED}", 0, LARGEST_SEED, int), "default": 0,
               "help": "for a temperature above 0 (default: 0)"},
    "--chat-template-kwargs": {"type": variables, "default": {}, "metavar": "JSON",
                               "help": 'variables for the chat template: \'{"enable_thinking": false}\''},
    "--extend": {"action": "store_true", "help": "answer the prompts that FILE has no answer to, and add them"},
    **SHARED,
}  # fmt: skip


def parser() -> Parser:
    """Every flag of ``compare-q trace``."""
    p = Parser(
        prog="compare-q trace",
        description="Have a model answer prompts, and keep the answers as a trace: a text for models to be scored on.",
    )
    add(p, FLAGS)
    p.set_defaults(cache_dir=default_root())
    return p


def run(words: Sequence[str]) -> int:
    """Make a trace; the exit status.  CompareQError for everything that a user can cause."""
    args = parser().parse_args(words)
    files.check_output(args.output, extend=args.extend)
    trace = asked_for(args)
    from compare_q.eval.cli.trace import answering
    from compare_q.eval.run import hosts
    from compare_q.eval.run.session import Session, signals_interrupt

    here, said = hosts.of_this_machine(args.gpus or None, dict(args.python), args.deadline)
    session = Session(Cache(args.cache_dir), Progress(), verbose=args.verbose, hosts=here)
    if said:
        session.progress.say(said)
    try:
        with signals_interrupt(here.running):
            records, model = answering.make(session, trace)
    except KeyboardInterrupt as interrupt:
        here.running.stop()
        partial = files.partial_of(args.output)
        kept = f"what was answered is in {printable(partial)}, run again to go on"
        print(f"\ninterrupted; {kept if partial.exists() else 'nothing was answered yet'}", file=sys.stderr)
        return 128 + getattr(interrupt, "signal", 2)
    for line in (*summed(trace, records), *model_lines(model)):
        print(printable(line))
    return 0


def asked_for(args: argparse.Namespace) -> TraceRequest:
    """The flags as one object; InputError for flags that cannot go together."""
    from compare_q.eval.cli.trace.answering import TraceRequest

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
    chosen = reading.matching(specs, mask)
    if len(chosen) != 1:
        names = ", ".join(spec.name for spec in specs)
        what = f"{len(chosen)} models of it are chosen, and one answers; choose it with -mask, of"
        raise InputError(f"-m: {printable(given)}: {what}: {printable(names)}")
    return chosen[0]


def summed(trace: TraceRequest, records: Sequence[dict[str, Any]]) -> list[str]:
    """What a trace holds, and how it is scored."""
    cut = sum(record["finish_reason"] == "length" for record in records)
    left_out = " and are left out: as text, an answer cannot be without its end" if trace.sampling.as_text else ""
    ended = f"; {cut} hit --max-tokens {trace.sampling.max_tokens}{left_out}" if cut else ""
    if trace.sampling.as_text:
        return [f"{trace.output}: {len(records) - cut} answers as messages{ended}"]
    before, after = (sum(len(record[key]) for record in records) for key in ("input_ids", "response_ids"))
    longest = max(len(record["input_ids"]) + len(record["response_ids"]) for record in records)
    spec = json.dumps({"dataset": "chat", "path": str(trace.output), "eval_len": longest})
    return [
        f"{trace.output}: {len(records)} answers of {after:,} tokens, behind {before:,} of prompts{ended}",
        f"to score them all, a data spec has the tokenizer_dir and {spec[1:-1]}",
    ]


def model_lines(model: Any) -> list[str]:
    """What ended the answers, where the engine was told."""
    named = ", ".join(f"{token} ({number})" for number, token in model.stop.items())
    if not model.ids:
        return []
    return [f"an answer ended at: {named}" if named else "no token ends an answer: the model's config names none"]
