"""The command ``gate``: check that several ways to run one model compute the same.

Exit status 0: every variant computes what the first one does; 1: a variant differs, or a condition
of ``--fail-if`` holds; 2: bad input; 3: a variant failed.  No score is read from the cache, because
the code may have changed without a new version.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from ... import backends
from ...backends.common.errors import CompareQError, InputError
from .. import ranking
from ..common.output_files import Outputs, write_text
from ..common.terminal import say
from ..gate import gate_report, variants
from ..gate.floor import COPIES, Floor, VariantTokens
from ..gate.gate_report import GateResult
from ..gate.variants import AGAIN, DECODE, FULL, ONE, PREFILL, Variant
from ..gate.verdicts import Row, Verdict, first_verdict, verdict_of
from ..report import worst_tokens
from ..results import ModelResult, origin
from ..run import plan, runner, token_scores
from ..run.slice_masks import slices_of
from ..run.workers import InterruptedRun, signals_interrupt
from ..specs import spec_files
from ..specs.spec_types import DataSpec, ModelSpec
from ..table import conditions
from ..text import slice_names as text_names
from ..text.eval_data import EvalData
from . import flags, outputs, run_inputs
from .outputs import print_errors

WINDOWS, LENGTH = 32, 512
"""Number of windows, and their length (tokens) without a data spec; short, because decode takes a
step per token."""
WORST = 3
"""Number of tokens shown for a variant that differs."""


def run(args: argparse.Namespace) -> int:
    """Score the variants and report on them; return the exit status."""
    gate = Gate(args)
    result = None
    with signals_interrupt(gate.config.workers):
        try:
            result = gate.result()
        finally:
            keep = result is not None and result.is_baseline and args.output is not None
            try:
                gate.tidy(keep=keep)
            except KeyboardInterrupt:  # the first signal; no second one interrupts this
                gate.config.workers.stop()
                gate.tidy(keep=False)
                raise
    say(*gate_report.terminal(result))
    written, texts = (
        Outputs(args.verbose),
        {
            args.output: GateResult.json_text,
            args.markdown: gate_report.markdown,
            args.junit: gate_report.junit,
        },
    )
    for file in filter(None, texts):
        with written.writing(file):
            write_text(file, texts[file](result))
    return print_errors("\n".join(written.failures)) or result.status


def texts_of(args: argparse.Namespace, given: Sequence[DataSpec]) -> dict[str, DataSpec]:
    """Return two specs: of the first windows, and of a quarter of the first window; InputError for
    an unusable text.
    """
    if len(given) > 1:
        raise InputError("-d: a gate needs exactly one text")
    spec = given[0]
    keys = spec.model_dump(mode="json", exclude_unset=True) | (
        {} if spec.is_chat else {"sample": "first"}
    )
    from_spec = str((args.dataspec or [""])[0]).endswith(".json") or "eval_stride" not in keys
    length = spec.eval_len if from_spec or args.eval_len else min(spec.eval_len, LENGTH)
    rows = spec.max_rows or WINDOWS if args.rows is None else args.rows
    texts = {}
    for name, size, count in ((FULL, length, rows), (ONE, part_of(spec, length), 1)):
        sizes = {}
        if size != spec.eval_len:
            sizes["eval_len"] = size
            if spec.eval_stride:
                sizes["eval_stride"] = size
        keys |= {"max_rows": count, **sizes}
        try:
            texts[name] = spec_files.parse_data_spec(keys, spec._folder / spec_files.COMMAND_LINE)
        except InputError:  # the spec itself was checked when it was read
            too_short = f"eval_len: {length} is too short for a gate, which also scores a part of {size} tokens"
            raise InputError(spec.blamed(too_short)) from None
    return texts


def part_of(spec: DataSpec, length: int) -> int:
    """Return the length of the window at batch 1: a quarter of a window, longer if nothing of it
    would be scored.

    Its scored positions are the first ones of a whole window, so that the same tokens are compared.
    """
    part = length // 4
    if spec.warmup_tokens:
        scored = max((length - spec.warmup_tokens) // 4, 2)
        part = spec.warmup_tokens + scored
    if spec.score_every is not None:
        part = max(part, spec.score_every)
    return part


class Gate:
    """The runs of a gate, and their rows.  InputError for a text or variants that a gate cannot
    compare.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        texts, models = run_inputs.specs_of(args)
        outputs.check(args, {"text": texts[0]}, models)
        self.args, self.config, self.data = args, run_inputs.run_config(args), texts_of(args, texts)
        flags.check_slices(args, text_names.slices_of(texts, ["text"], reference=True))
        self.config.is_temporary = True
        self.config.check_decode = False  # decode is compared with prefill here
        self.config.alone = frozenset([ONE])
        self.baseline = GateResult.read(args.baseline) if args.baseline else None
        name = f"{os.getpid()} {os.urandom(8).hex()}"
        first = self.baseline.run if self.baseline else name
        self.ways = variants.variants_of(models, args.variant, args.sweep, name, first)
        engine, model = (
            backends.ENGINE_ALIASES.get(args.arbiter, args.arbiter),
            self.ways[0].spec.located,
        )
        keys = {
            "load_fn": engine,
            "model_dir": model,
            "label": "--arbiter",
            "engine": {"dtype": "float32"},
        }
        self.judge = (
            [spec_files.parse_model_spec(keys | {"reference": True}, spec_files.COMMAND_LINE)]
            if engine
            else []
        )
        specs = [*self.judge, *(way.spec for way in self.ways)]
        plan.plan_models(
            self.config, specs, self.data[FULL].longest
        )  # refuses bad specs before anything runs
        self.before = self.ways[0].copied(PREFILL, reference=True)
        names = {"prefill": (PREFILL, AGAIN), "decode": (DECODE,), None: (PREFILL, AGAIN, DECODE)}[
            args.phase
        ]
        for way in self.ways:
            if args.phase == "decode" and not way.capabilities.decodes:
                raise InputError(
                    f"--phase: {way.spec.name}: {way.spec.load_fn!r} has no decode; leave --phase out"
                )
        self.passes = [(way, way.copied(of), way.texts(of)) for way in self.ways for of in names]
        self.rows = dict[str, dict[str, Row]]()  # text -> label -> row
        self.windows = dict[str, EvalData]()  # of each text, by its name
        self.made, self.stores = (
            dict[str, str](),
            set[str](),
        )  # scores' key -> label; keys of references

    def result(self) -> GateResult:
        """Score and judge all variants; the gate ends early if the first variant cannot be compared
        with the others.
        """
        name, rows = self.ways[0].spec.name, list[Row]()
        copies = [self.ways[0].copy_with_noise(number) for number in range(1, COPIES + 1)]
        known = self.baseline and {row.scores_key for row in self.baseline.variants[0].rows}
        for specs in ([self.before, self.ways[0].copied(AGAIN)], copies):
            self.score([spec for spec in specs if spec is not self.before])
            rows += [self.rows[text][spec.name] for spec in specs for text in (FULL, ONE)]
            if known and not (
                rows[0].model.scores_key in known and all(row.model.from_cache for row in rows)
            ):
                raise InputError(
                    f"--baseline: {self.args.baseline}: its scores are not in the cache, or another "
                    "version of the engine made them; remove --baseline"
                )
            if failed := first_verdict(name, rows, {}):
                return self.reported({}, [failed])
        floors, comparisons = dict[str, Floor](), sum(len(texts) for *_, texts in self.passes)
        for text in (FULL, ONE):
            found = [self.rows[text][spec.name].tokens for spec in copies]
            floors[text] = Floor([each for each in found if each], comparisons)
        if ended := first_verdict(name, rows, floors):
            return self.reported(floors, [ended])
        specs = [
            spec for _, spec, texts in self.passes if texts and spec.name not in self.rows[ONE]
        ]
        self.score(specs)
        verdicts, first = list[Verdict](), list[Row]()
        for way in self.ways:
            rows = [row for row, _ in self.rows_of(way)]
            verdict = verdict_of(way.spec.name, rows, floors, first, must_change=way.must_change)
            verdicts.append(
                self.with_tokens(verdict, rows) if verdict.outcome == "differs" else verdict
            )
            first = first or rows
        return self.reported(floors, verdicts)

    def rows_of(self, way: Variant) -> list[tuple[Row, ModelSpec]]:
        """Return the rows of a variant, with the specs that made them."""
        return [
            (self.rows[text][spec.name], spec)
            for own, spec, texts in self.passes
            if own is way
            for text in texts
        ]

    def score(self, specs: Sequence[ModelSpec]) -> None:
        """Score specs on both texts, compared with the first variant."""
        if not specs:
            return
        for row in self.run([self.before, *specs], (FULL, ONE)):
            self.rows.setdefault(row.text, {}).setdefault(row.model.label, row)

    def with_tokens(self, verdict: Verdict, rows: Sequence[Row]) -> Verdict:
        """Return a verdict with the tokens on which the variant differs most."""
        worst = max(rows, key=lambda row: row.model.kld or 0.0)
        (row,) = worst_tokens.rows_with_tokens(
            [worst.model], self.windows[worst.text], self.config.cache
        )
        return verdict.updated(worst_tokens=row.worst_tokens[:WORST])

    def run(self, specs: Sequence[ModelSpec], texts: Sequence[str]) -> list[Row]:
        """Score specs on some texts; return a row for each spec on each text.  InterruptedRun after
        a signal.
        """
        done = runner.run(self.config, {name: self.data[name] for name in texts}, specs)
        for model in done.results.models:
            if model.scores_key and not model.from_cache:
                self.made[model.scores_key.partition("/")[0]] = model.label
                if model.reference and done.results.reference:
                    self.stores.add(done.results.reference["key"])
        if done.signal:
            raise InterruptedRun(done.signal)
        rows = []
        for number, text in enumerate(done.data.texts):
            part = done.data.part(number)
            self.windows.setdefault(text.name, part)
            rows += [self.row_on(model, text.name, part) for model in done.results.models]
        return rows

    def row_on(self, model: ModelResult, text: str, data: EvalData) -> Row:
        """Return a model's row on one of the texts, whose windows are ``data``."""
        of = model.label.rpartition(variants.SEPARATOR)[2]
        stored = None
        if not model.error:
            stored = token_scores.of_row(self.config.cache, model.scores_key, data)
        if stored is None:
            return Row(of, text, model, None)
        slices = slices_of(stored, data, is_reference=model.reference)
        row = token_scores.row_on(model, stored, data).updated(slices=slices)
        return Row(of, text, row, VariantTokens.of(stored) if row.kld is not None else None)

    def reported(self, floors: Mapping[str, Floor], verdicts: Sequence[Verdict]) -> GateResult:
        """Return the gate's result, with the rows that fulfil a failure condition, and the
        arbiter's answers.
        """
        rows = [row for verdict in verdicts for row in verdict.rows if not row.reference]
        differing = [
            way
            for way, verdict in zip(self.ways, verdicts, strict=False)
            if verdict.outcome == "differs"
        ]
        made = origin(["compare-q", *sys.argv[1:]])
        return GateResult(
            created=made["created"],
            command=made["command"],
            versions=made["versions"],
            hardware=made["hardware"],
            text=self.windows[FULL].subtitle,
            run=self.ways[0].run,
            variants=tuple(verdicts),
            floor=tuple(gate_report.floor_lines(floors, verdicts[0])),
            conditions=tuple(conditions.faults_of(rows, self.args.fail_if)),
            nearer=tuple(map(self.arbitrated, differing)) if self.judge else (),
        )

    def arbitrated(self, way: Variant) -> str:
        """Return whether this or the first variant is nearer to float32, on the row in which the
        two differ most.
        """
        row, spec = max(
            self.rows_of(way), key=lambda pair: (pair[0].text == FULL, pair[0].model.kld or 0.0)
        )
        before = self.before.model_copy(update={"reference": False})
        try:
            rows = self.run([*self.judge, before, spec], (row.text,))
        except CompareQError as error:
            return f"{self.args.arbiter} in float32: {error}"
        judge, one, two = [row.model for row in rows]
        outcome = ranking.compare(two, one, "kld")
        words = {
            "less": f"{way.spec.name} is nearer",
            "more": f"{self.ways[0].spec.name} is nearer",
            "equal": "neither is nearer",
        }
        said = words.get(
            outcome.outcome, f"which is nearer is not known: {judge.error or outcome.reason}"
        )
        klds = ", ".join(
            f"{row.label} {'n/a' if row.kld is None else f'{row.kld:.4g}'}" for row in (one, two)
        )
        return f"{self.args.arbiter} in float32: {said} (KLD: {klds})"

    def tidy(self, keep: bool = False) -> None:
        """Delete the scores and stores of this gate; no other run uses them.

        ``keep``: True to keep the first variant's scores and stores in the cache, for --baseline.
        """
        cache = self.config.cache
        stores = {("references", key) for key in self.stores}
        entries = cache.temporary | {("scores", key) for key in self.made} | stores
        if keep:
            first = self.ways[0].spec.name + variants.SEPARATOR
            kept = {("scores", key) for key, label in self.made.items() if label.startswith(first)}
            entries -= kept | stores
        for section, key in sorted(entries):
            cache.clear(section, key)
