"""``gate``: several ways to run one model, one answer, one exit status.

0: every variant is as before; 1: one is anything else, or a condition of ``--fail-if`` holds; 2: bad input; 3: a
variant failed.  Every score is made anew, since what is tested is code that may have changed under the same version.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from compare_q import backends
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import printable
from compare_q.eval import ranking
from compare_q.eval.cli import inputs, outputs
from compare_q.eval.cli.outputs import print_errors
from compare_q.eval.common.files import Outputs, write_text
from compare_q.eval.gate import report, variants
from compare_q.eval.gate.floor import COPIES, Floor, Tokens
from compare_q.eval.gate.report import GateResult
from compare_q.eval.gate.variants import AGAIN, PREFILL, Shape
from compare_q.eval.gate.verdicts import Verdict, first_verdict, verdict_of
from compare_q.eval.report.tokens import with_worst_tokens
from compare_q.eval.results import ModelResult, RunResult, TextResult
from compare_q.eval.run import plan, runner, token_scores
from compare_q.eval.run.workers import signals_interrupt
from compare_q.eval.specs import reading
from compare_q.eval.specs.types import ModelSpec
from compare_q.eval.text.windows import EvalData

WINDOWS, LENGTH = 16, 1024
"""Windows of a text, and their length without a data spec: decode at batch 1 takes a step for each token of one."""


def run(args: argparse.Namespace) -> int:
    """Score the variants and report on them; return the exit status."""
    gate = Gate(args)
    with signals_interrupt(gate.config.workers):
        try:
            result = gate.result()
        except BaseException:
            gate.tidy()
            raise
    gate.tidy(keep=args.output is not None)
    print(*map(printable, report.terminal(result)), sep="\n")
    written, texts = Outputs(args.verbose), {args.output: GateResult.json_text, args.markdown: report.markdown,
                                             args.junit: report.junit}  # fmt: skip
    for file in filter(None, texts):
        with written.writing(file):
            write_text(file, texts[file](result))
    return print_errors("\n".join(written.failures)) or result.status


class Gate:
    """The runs of a gate, and the rows that they have made.  InputError for a text or variants that cannot be gated."""

    def __init__(self, args: argparse.Namespace) -> None:
        texts, models = inputs.specs_of(args)
        if len(texts) > 1:
            raise InputError("-d: a gate has one text; give one")
        outputs.check(args, {"text": texts[0]}, models)
        given = str((args.dataspec or [""])[0]).endswith(".json") or "eval_stride" not in texts[0].model_fields_set
        length = {} if given else dict.fromkeys(("eval_len", "eval_stride"), min(texts[0].eval_len, LENGTH))
        self.data = texts[0].model_copy(
            update={"sample": "first", **length}
        )  # so that fewer windows are a part of more
        self.args, self.config = args, inputs.run_config(args)
        self.config.check_decode = False  # all shapes are compared with prefill here
        self.baseline = GateResult.read(args.baseline) if args.baseline else None
        name = f"{os.getpid()} {os.urandom(8).hex()}"
        first = self.baseline.run if self.baseline else name
        self.ways = variants.expanded(models, args.variant, args.sweep, name, first)
        plan.plan_models(self.config, [way.spec for way in self.ways], self.data.longest)  # before anything runs
        self.before = self.ways[0].copied(PREFILL, reference=True)
        self.count = args.rows or self.data.max_rows or WINDOWS
        self.rows, self.tokens = dict[str, ModelResult](), dict[str, Tokens]()
        self.text: TextResult | None = None
        self.specs = {self.before.name: self.before}
        self.made, self.stores = dict[str, str](), set[str]()  # scores' key -> label; keys of references

    def result(self) -> GateResult:
        """Score everything and judge it; a first variant with which nothing can be compared ends the gate."""
        phases = {self.args.phase} if self.args.phase else {"prefill", "decode"}
        shapes = [(way, list(way.shapes(self.count, phases))) for way in self.ways]
        copies = [self.ways[0].noisy(number) for number in range(1, COPIES + 1)]
        begin = [self.before, self.ways[0].in_shape(Shape(AGAIN, self.count)), *copies]
        self.score(begin[1:], self.count)
        rows = [self.rows[spec.name] for spec in begin]
        known = self.baseline and {row.scores_key for row in self.baseline.variants[0].rows}
        if known and not (rows[0].scores_key in known and all(row.from_cache for row in rows)):
            raise InputError(f"--baseline: {self.args.baseline}: its scores are not in the cache, or this engine has "
                             "another version than the one that made them; leave --baseline out")  # fmt: skip
        floor = None
        if not any(row.error or row.kld_non_finite for row in rows):
            floor = Floor([self.tokens[spec.name] for spec in copies], sum(len(each) for _, each in shapes))
        ended = first_verdict(self.ways[0].spec.name, rows, floor)
        if floor is None or ended:
            return self.reported(floor, [ended] if ended else [])
        specs = [(way.in_shape(shape), shape.windows) for way, each in shapes for shape in each]
        for windows in sorted({count for _, count in specs}, reverse=True):
            self.score([spec for spec, count in specs if count == windows and spec.name not in self.rows], windows)
        verdicts = list[Verdict]()
        for way, each in shapes:
            rows = [self.rows[way.in_shape(shape).name] for shape in each]
            first = verdicts[0].rows if verdicts else ()
            verdicts.append(verdict_of(way.spec.name, rows, self.tokens, floor, first, must_change=way.must_change))
        return self.reported(floor, verdicts)

    def score(self, specs: Sequence[ModelSpec], windows: int) -> None:
        """Score specs on the first windows of the text, compared with the first variant."""
        self.specs |= {spec.name: spec for spec in specs}
        text, data = self.run([self.before, *specs], windows)
        self.text = self.text or text
        for row in text.models:
            self.rows.setdefault(row.label, row)
            stored = None if row.error else token_scores.of_row(self.config.cache, row.scores_key, data.windows)
            if stored is not None and "kld" in stored.columns:
                self.tokens[row.label] = Tokens.of(stored)

    def run(self, specs: Sequence[ModelSpec], windows: int) -> tuple[TextResult, EvalData]:
        """Return the rows of specs, with their worst tokens, and the windows; KeyboardInterrupt after a signal."""
        done = runner.run(self.config, {"text": self.data}, specs, windows)
        [text], [data] = done.results.texts, done.data
        self.made |= {m.scores_key.partition("/")[0]: m.label for m in text.models if m.scores_key and not m.from_cache}
        if text.reference and not self.baseline:
            self.stores.add(text.reference["key"])
        if done.signal:
            raise KeyboardInterrupt
        assert data is not None, "a run of one text that fails raises InputError"
        [text] = with_worst_tokens(RunResult(texts=(text,)), [data], self.config.cache).texts
        return text, data

    def reported(self, floor: Floor | None, verdicts: Sequence[Verdict]) -> GateResult:
        """Return the gate's result, with the conditions that hold and the arbiter's words."""
        assert self.text is not None
        rows = [row for verdict in verdicts for row in verdict.rows if not row.reference]
        faults = [
            f"{row.label}: {condition} ({fault})"
            for row in rows for condition in self.args.fail_if if (fault := condition.fault(row))
        ]  # fmt: skip
        differing = [verdict for verdict in verdicts[1:] if verdict.outcome == "differs"] if self.args.arbiter else []
        made = RunResult(texts=()).with_origin(["compare-q", *sys.argv[1:]])
        return GateResult(
            created=made.created, command=made.command, versions=made.versions, hardware=made.hardware,
            text=self.text.subtitle, run=self.ways[0].run, variants=tuple(verdicts), conditions=tuple(faults),
            floor=tuple(report.floor_lines(floor, self.count, verdicts[0])) if floor else (),
            nearer=tuple(map(self.arbitrated, differing)),
        )  # fmt: skip

    def arbitrated(self, verdict: Verdict) -> str:
        """Return whether the first variant or another one is nearer to the model in float32, where they differ most."""
        row = max(verdict.rows, key=lambda row: row.kld or 0.0)
        spec = next(way.spec for way in self.ways if way.spec.name == verdict.label)
        engine = backends.ENGINE_ALIASES.get(self.args.arbiter, self.args.arbiter)
        keys = {"load_fn": engine, "reference": True, "model_dir": spec.located, "label": f"{verdict.label} in float32",
                "engine": {"dtype": "float32"}}  # fmt: skip
        judge = reading.parse_model_spec(keys, variants.COMMAND_LINE, "--arbiter: ")
        text, _ = self.run(
            [judge, self.before.model_copy(update={"reference": False}), self.specs[row.label]], row.windows
        )
        of, one, two = text.models
        found = ranking.compare(two, one, "kld")
        word = {"less": f"{two.label} is", "more": f"{one.label} is", "equal": "neither is"}.get(found.outcome)
        words = f"{word} nearer" if word else f"which is nearer is not known: {of.error or found.reason}"
        klds = " and ".join(f"{m.label} {'n/a' if m.kld is None else f'{m.kld:.4g}'}" for m in (one, two))
        return f"{self.args.arbiter} in float32: {words} (KLD: {klds})"

    def tidy(self, keep: bool = False) -> None:
        """Delete the scores and stores that this gate has made, which no other run uses.

        ``keep``: those of the first variant stay in the cache, for --baseline.
        """
        for key, label in self.made.items():
            if not (keep and label.startswith(self.ways[0].spec.name + variants.SEPARATOR)):
                self.config.cache.clear("scores", key)
        for key in () if keep else self.stores:
            self.config.cache.clear("references", key)
