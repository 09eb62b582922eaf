"""The command ``gate``: check that several ways to run one model compute the same.

Exit status 0: every variant computes what the first one does; 1: a variant differs, or a condition
of ``--fail-if`` holds; 2: bad input; 3: a variant failed.  No score is read from the cache, because
the code may have changed without a new version.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ... import backends
from ...backends.common.errors import CompareQError, InputError
from ...backends.common.jsonl_kinds import ROLLOUTS, kind_of
from .. import ranking
from ..common.output_files import Outputs, write_text
from ..common.terminal import say
from ..gate import gate_report, variants
from ..gate.floor import FLOOR_COPIES, Floor, VariantTokens
from ..gate.gate_report import GateResult
from ..gate.places import NOT_KNOWN
from ..gate.shown_outputs import ShownOutputs, worst_row, worst_window
from ..gate.variants import BATCH_OF_ONE, DECODE, FULL, PREFILL, PREFILL_AGAIN, Variant
from ..gate.verdicts import Row, Verdict, first_verdict, verdict_of
from ..report import worst_tokens
from ..results import ModelResult, origin
from ..run import plan, runner, stored_scores
from ..run.rows import row_of_text
from ..run.slice_masks import slices_of
from ..run.workers import InterruptedRun, signals_interrupt
from ..specs import spec_files
from ..specs.spec_types import DataSpec, ModelSpec
from ..table import conditions
from ..table.numbers import significant_text
from ..text import slice_names
from ..text.eval_data import EvalData
from . import flag_checks, output_checks, run_inputs
from .commands import GateCommand, Inputs, PictureFlags
from .outputs import print_errors

GATE_WINDOWS = 32
"""Number of windows, unless the command or the data spec gives one."""
GATE_LENGTH = 512
"""Tokens of a window without a data spec; short, because decode takes a step per token."""
SHOWN_TOKENS = 3
"""Number of tokens shown for a variant that differs."""
PASSES: dict[str | None, tuple[str, ...]] = {
    "prefill": (PREFILL, PREFILL_AGAIN),
    "decode": (DECODE,),
    None: (PREFILL, PREFILL_AGAIN, DECODE),
}
"""Value of ``--phase`` -> names of the passes of each variant."""


def run(command: GateCommand) -> int:
    """Score the variants and report on them; return the exit status."""
    gate = Gate(command)
    files = command.files
    result = None
    with signals_interrupt(gate.config.workers):
        try:
            result = gate.result()
        finally:
            keep = result is not None and result.is_baseline and files.output is not None
            try:
                gate.tidy(keep=keep)
            except KeyboardInterrupt:
                # The first signal. Once the workers are stopped, no second one interrupts.
                gate.config.workers.stop()
                gate.tidy(keep=False)
                raise
    say(*gate_report.terminal(result))
    written = Outputs(command.resources.verbose)
    texts: tuple[tuple[Path | None, Callable[[GateResult], str]], ...] = (
        (files.output, GateResult.json_text),
        (files.markdown, gate_report.markdown),
        (files.junit, gate_report.junit),
    )
    for file, text_of in texts:
        if file is not None:
            with written.writing(file):
                write_text(file, text_of(result))
    return print_errors("\n".join(written.failures)) or result.status


def texts_of(inputs: Inputs, specs: Sequence[DataSpec]) -> dict[str, DataSpec]:
    """Return two specs: of the first windows, and of a quarter of the first window.

    InputError for an unusable text.
    """
    if len(specs) > 1:
        raise InputError("-d: a gate needs exactly one text")
    spec = specs[0]
    if spec.is_sampled:
        raise InputError(spec.blamed('dataset: a gate does not take "sampled"; give a text'))
    keys = spec.model_dump(mode="json", exclude_unset=True)
    # Conversations and rollouts have no key ``sample``.
    if not (spec.is_chat or spec.is_rollouts):
        keys["sample"] = "first"
    # Without a data spec the length was chosen for an ordinary run, unless --eval-len gives it.
    # Conversations, which have no key ``eval_stride``, keep their length.
    length = spec.eval_len
    has_data_spec = bool(inputs.data) and str(inputs.data[0]).endswith(".json")
    if not has_data_spec and "eval_stride" in keys and inputs.eval_len is None:
        length = min(length, GATE_LENGTH)
    rows = inputs.rows
    if rows is None:
        rows = spec.max_rows or GATE_WINDOWS
    texts = {}
    sizes = {FULL: (length, rows), BATCH_OF_ONE: (part_of(spec, length), 1)}
    for name, (size, count) in sizes.items():
        keys["max_rows"] = count
        if size != spec.eval_len:
            keys["eval_len"] = size
            if spec.eval_stride:
                keys["eval_stride"] = size
        try:
            texts[name] = spec_files.parse_data_spec(keys, spec._folder / spec_files.COMMAND_LINE)
        except InputError:
            # The spec itself was checked when it was read: only the lengths can be wrong.
            problem = (
                f"eval_len: {length} is too short for a gate, which also scores a part of {size} "
                "tokens"
            )
            raise InputError(spec.blamed(problem)) from None
    return texts


def part_of(spec: DataSpec, length: int) -> int:
    """Return the length of the window at batch 1: a quarter of a window, or of its scored part.

    With ``score_every`` the short window has at least ``score_every`` tokens, so that one is
    scored.  The short window's scored positions are the first scored positions of a whole window,
    so that the same tokens are compared.  A part of a sequence of rollouts may be all prompt: the
    window is the whole sequence.
    """
    if spec.is_rollouts:
        return length
    part = length // 4
    if spec.warmup_tokens:
        # A data spec is refused unless ``eval_len`` exceeds ``warmup_tokens`` by at least 2.
        n_scored = max((length - spec.warmup_tokens) // 4, 2)
        part = spec.warmup_tokens + n_scored
    if spec.score_every is not None:
        part = max(part, spec.score_every)
    return part


class VariantPass(NamedTuple):
    """A pass over a variant: the spec that scores it, and the names of the texts."""

    variant: Variant
    spec: ModelSpec
    texts: tuple[str, ...]


class Gate:
    """The runs of a gate, and their rows.

    InputError for a text or variants that a gate cannot compare.
    """

    def __init__(self, command: GateCommand) -> None:
        self.command = command
        inputs = command.inputs
        data, models = run_inputs.specs_of(inputs, command.resources, stored=True)
        # Rollouts that are named among the models are the text.
        models = [model for model in models if kind_of(Path(model.located)) != ROLLOUTS]
        if not models:
            raise InputError("MODEL: is missing; rollouts are the text of a gate")
        input_paths = output_checks.spec_paths(inputs)
        output_checks.check(command.files, PictureFlags(), input_paths, {"text": data[0]}, models)
        config = run_inputs.run_config(command.resources)
        self.texts = texts_of(inputs, data)
        flag_checks.check_slices(
            "--fail-if",
            [condition.column for condition in command.fail_if],
            slice_names.slices_of(data, ["text"], reference=True),
        )
        # A run refuses a model whose decode differs from its prefill; here both are compared.
        # ``alone``: the window of this text does not share a batch.
        self.config = replace(
            config, is_temporary=True, check_decode=False, alone=frozenset([BATCH_OF_ONE])
        )
        # The name is part of the scores' keys, so that no score of an earlier gate is read, except
        # the first variant's of a baseline.
        run_name = f"{os.getpid()} {os.urandom(8).hex()}"
        first_run_name = run_name
        self.baseline: GateResult | None = None
        if command.baseline is not None:
            self.baseline = GateResult.read(command.baseline)
            first_run_name = self.baseline.run
        self.variants = variants.variants_of(
            models, command.variants, command.sweeps, run_name, first_run_name
        )
        self.arbiter_specs = self.specs_of_arbiter()
        specs = [*self.arbiter_specs, *(variant.spec for variant in self.variants)]
        # InputError for wrong specs, before anything runs.
        plan.plan_models(self.config, specs, self.texts[FULL].longest)
        self.first_spec = self.variants[0].copied(PREFILL, reference=True)
        self.variant_passes = self.passes_of_variants()
        self.rows: dict[str, dict[str, Row]] = {}  # text -> label -> row
        self.windows: dict[str, EvalData] = {}  # of each text, by its name
        self.label_of_key: dict[str, str] = {}  # key of scores -> label
        self.store_keys: set[str] = set()  # of reference stores

    def specs_of_arbiter(self) -> list[ModelSpec]:
        """Return the spec of ``--arbiter``; empty without one.

        It is the first variant's model in float32, in the arbiter's engine.
        """
        arbiter = self.command.arbiter
        if arbiter is None:
            return []
        keys = {
            "load_fn": backends.ENGINE_ALIASES.get(arbiter, arbiter),
            "model_dir": self.variants[0].spec.located,
            "label": "--arbiter",
            "engine": {"dtype": "float32"},
            "reference": True,
        }
        return [spec_files.parse_model_spec(keys, spec_files.COMMAND_LINE)]

    def passes_of_variants(self) -> list[VariantPass]:
        """Return the passes of all variants; InputError if ``--phase`` leaves nothing to score."""
        if self.command.phase == "decode":
            for variant in self.variants:
                if not variant.capabilities.decodes:
                    raise InputError(
                        f"--phase: {variant.spec.name}: {variant.spec.load_fn!r} has no decode; "
                        "leave --phase out"
                    )
        passes = []
        for variant in self.variants:
            for name in PASSES[self.command.phase]:
                passes.append(VariantPass(variant, variant.copied(name), variant.texts(name)))
        return passes

    def result(self) -> GateResult:
        """Score and judge all variants.

        The gate ends early if the first variant cannot be compared with the others.
        """
        first = self.variants[0]
        second_run = first.copied(PREFILL_AGAIN)
        copies = [first.copy_with_noise(number) for number in range(1, FLOOR_COPIES + 1)]
        # ``score`` also scores the first variant, and compares the others with it.
        self.score([second_run])
        first_rows = self.rows_on_both_texts([self.first_spec, second_run])
        verdict = self.verdict_without_floors(first_rows)
        if verdict is not None:
            return self.report({}, [verdict])
        # The copies are not scored if the first variant failed.
        self.score(copies)
        first_rows += self.rows_on_both_texts(copies)
        verdict = self.verdict_without_floors(first_rows)
        if verdict is not None:
            return self.report({}, [verdict])
        floors = self.floors_of(copies)
        verdict = first_verdict(first.spec.name, first_rows, floors)
        if verdict is not None:
            return self.report(floors, [verdict])
        # The first variant's passes in prefill are scored already.  ``score`` adds a row on each of
        # the two texts, so that the rows on one text name all scored specs.
        scored_names = self.rows[BATCH_OF_ONE].keys()
        unscored = []
        for variant_pass in self.variant_passes:
            if variant_pass.texts and variant_pass.spec.name not in scored_names:
                unscored.append(variant_pass.spec)
        self.score(unscored)
        verdicts = self.verdicts_of(floors)
        if self.command.where:
            verdicts = self.with_places(verdicts, floors)
        return self.report(floors, verdicts)

    def rows_on_both_texts(self, specs: Sequence[ModelSpec]) -> list[Row]:
        """Return two rows for each scored spec: on the full batches, and at batch 1."""
        rows = []
        for spec in specs:
            rows.append(self.rows[FULL][spec.name])
            rows.append(self.rows[BATCH_OF_ONE][spec.name])
        return rows

    def verdict_without_floors(self, first_rows: Sequence[Row]) -> Verdict | None:
        """Return the verdict of a first variant that failed; None if it did not.

        InputError if its scores are not those of ``--baseline``.  ``first_rows``: as in
        ``first_verdict``.
        """
        self.check_baseline(first_rows)
        return first_verdict(self.variants[0].spec.name, first_rows, {})

    def check_baseline(self, rows: Sequence[Row]) -> None:
        """InputError if the scores of the first variant are not those of ``--baseline``."""
        if self.baseline is None:
            return
        baseline_keys = {row.scores_key for row in self.baseline.variants[0].rows}
        is_baseline = rows[0].model.scores_key in baseline_keys
        if not is_baseline or not all(row.model.from_cache for row in rows):
            raise InputError(
                f"--baseline: {self.command.baseline}: its scores are not in the cache, or another "
                "version of the engine made them; remove --baseline"
            )

    def floors_of(self, copies: Sequence[ModelSpec]) -> dict[str, Floor]:
        """Return the noise floor on each text, from copies of the first variant.

        The more comparisons a gate makes, the higher a floor's limit: all together rarely fail by
        chance.
        """
        comparisons = sum(len(variant_pass.texts) for variant_pass in self.variant_passes)
        floors = {}
        for text in (FULL, BATCH_OF_ONE):
            copies_tokens = []
            for spec in copies:
                tokens = self.rows[text][spec.name].tokens
                if tokens is not None:
                    copies_tokens.append(tokens)
            floors[text] = Floor(copies_tokens, comparisons)
        return floors

    def verdicts_of(self, floors: Mapping[str, Floor]) -> list[Verdict]:
        """Return the verdict of each variant, with tokens if it differs."""
        verdicts = []
        first_rows: list[Row] = []
        for variant in self.variants:
            rows = [row for row, _ in self.rows_of(variant)]
            verdict = verdict_of(
                variant.spec.name, rows, floors, first_rows, must_change=variant.must_change
            )
            if verdict.outcome == "differs":
                verdict = self.with_tokens(verdict, rows)
            verdicts.append(verdict)
            if not first_rows:
                first_rows = rows
        return verdicts

    def with_places(
        self, verdicts: Sequence[Verdict], floors: Mapping[str, Floor]
    ) -> list[Verdict]:
        """Return the verdicts; those of variants that differ name the module where they do."""
        words_of_label: dict[str, str] = {}
        windows = []
        for variant, verdict in zip(self.variants, verdicts, strict=True):
            if verdict.outcome != "differs" or variant is self.variants[0]:
                continue
            row = worst_row([row for row, _ in self.rows_of(variant)], floors)
            if row is None:
                words_of_label[verdict.label] = f"{NOT_KNOWN}it does not differ in prefill"
                continue
            windows.append((variant, worst_window(self.config, row, self.windows[row.text])))
        shown = ShownOutputs(self.config, self.variants[0], self.windows[FULL].length)
        for (variant, _), words in zip(windows, shown.places(windows), strict=True):
            words_of_label[variant.spec.name] = words
        placed_verdicts = []
        for verdict in verdicts:
            words = words_of_label.get(verdict.label, "")
            placed_verdicts.append(verdict.updated(where=words))
        return placed_verdicts

    def rows_of(self, variant: Variant) -> Iterator[tuple[Row, ModelSpec]]:
        """Yield the rows of a variant, with the specs that made them."""
        for variant_pass in self.variant_passes:
            if variant_pass.variant is variant:
                for text in variant_pass.texts:
                    yield self.rows[text][variant_pass.spec.name], variant_pass.spec

    def score(self, specs: Sequence[ModelSpec]) -> None:
        """Score specs on both texts, compared with the first variant."""
        if not specs:
            return
        for row in self.run([self.first_spec, *specs], (FULL, BATCH_OF_ONE)):
            # The first variant has a row in each run; the first one counts.
            self.rows.setdefault(row.text, {}).setdefault(row.model.label, row)

    def with_tokens(self, verdict: Verdict, rows: Sequence[Row]) -> Verdict:
        """Return a verdict with the tokens on which the variant differs most."""
        worst = max(rows, key=lambda row: row.model.kld or 0.0)
        (row,) = worst_tokens.rows_with_tokens(
            [worst.model], self.windows[worst.text], self.config.cache
        )
        return verdict.updated(worst_tokens=row.worst_tokens[:SHOWN_TOKENS])

    def run(self, specs: Sequence[ModelSpec], texts: Sequence[str]) -> list[Row]:
        """Score specs on some texts; return a row for each spec on each text.

        InterruptedRun after a signal.
        """
        outcome = runner.run(self.config, {name: self.texts[name] for name in texts}, specs)
        results = outcome.results
        # Before the signal is raised: also an interrupted gate deletes what it has scored.
        for model in results.models:
            if model.scores_key and not model.from_cache:
                self.label_of_key[model.scores_key.partition("/")[0]] = model.label
                if model.reference and results.reference:
                    self.store_keys.add(results.reference["key"])
        if outcome.signal:
            raise InterruptedRun(outcome.signal)
        rows = []
        for number, text in enumerate(outcome.data.texts):
            data = outcome.data.part(number)
            self.windows.setdefault(text.name, data)
            for model in results.models:
                rows.append(self.row_on(model, text.name, data))
        return rows

    def row_on(self, model: ModelResult, text: str, data: EvalData) -> Row:
        """Return a model's row on one of the texts, whose windows are ``data``."""
        pass_name = model.label.rpartition(variants.SEPARATOR)[2]
        scores = None
        if not model.error:
            scores = stored_scores.scores_of_row(self.config.cache, model.scores_key, data)
        if scores is None:
            return Row(pass_name, text, model, None)
        slices = slices_of(scores, data, is_reference=model.reference)
        row = row_of_text(model, scores, data).updated(slices=slices)
        tokens = None
        if row.kld is not None:
            tokens = VariantTokens.of(scores)
        return Row(pass_name, text, row, tokens)

    def report(self, floors: Mapping[str, Floor], verdicts: Sequence[Verdict]) -> GateResult:
        """Return the gate's result.

        It has the rows that fulfil a failure condition, and the arbiter's answers.
        """
        origin_fields = origin(["compare-q", *sys.argv[1:]])
        compared_rows: list[ModelResult] = []
        for verdict in verdicts:
            compared_rows += [row for row in verdict.rows if not row.reference]
        answers = []
        if self.arbiter_specs:
            # A gate that ended early has the first variant's verdict alone.
            for variant, verdict in zip(self.variants, verdicts, strict=False):
                if verdict.outcome == "differs":
                    answers.append(self.answer_of_arbiter(variant))
        return GateResult(
            created=origin_fields["created"],
            command=origin_fields["command"],
            versions=origin_fields["versions"],
            hardware=origin_fields["hardware"],
            text=self.windows[FULL].subtitle,
            run=self.variants[0].run,
            variants=tuple(verdicts),
            floor=tuple(gate_report.floor_lines(floors, verdicts[0])),
            conditions=tuple(conditions.faults_of(compared_rows, self.command.fail_if)),
            nearer=tuple(answers),
        )

    def answer_of_arbiter(self, variant: Variant) -> str:
        """Return whether this or the first variant is nearer to float32.

        The answer is of the row in which the two differ most, of those over several windows.
        """
        # A row at batch 1 has a single short window, and is used only without another row.
        row, spec = max(
            self.rows_of(variant),
            key=lambda pair: (pair[0].text == FULL, pair[0].model.kld or 0.0),
        )
        # In this run the arbiter is the reference.
        first_spec = self.first_spec.model_copy(update={"reference": False})
        title = f"{self.command.arbiter} in float32"
        try:
            rows = self.run([*self.arbiter_specs, first_spec, spec], (row.text,))
        except CompareQError as error:
            return f"{title}: {error}"
        arbiter, first, other = [row.model for row in rows]
        difference = ranking.compare(other, first, "kld")
        if difference.outcome == "less":
            answer = f"{variant.spec.name} is nearer"
        elif difference.outcome == "more":
            answer = f"{self.variants[0].spec.name} is nearer"
        elif difference.outcome == "equal":
            answer = "neither is nearer"
        else:
            answer = f"which is nearer is not known: {arbiter.error or difference.reason}"
        return f"{title}: {answer} (KLD: {kld_in_words(first)}, {kld_in_words(other)})"

    def tidy(self, keep: bool = False) -> None:
        """Delete the scores and stores of this gate; no other run uses them.

        ``keep``: True to keep the first variant's scores and stores in the cache, for --baseline.
        """
        cache = self.config.cache
        store_entries = {("references", key) for key in self.store_keys}
        score_entries = {("scores", key) for key in self.label_of_key}
        entries = cache.temporary | score_entries | store_entries
        if keep:
            first_label = self.variants[0].spec.name + variants.SEPARATOR
            baseline_entries = set(store_entries)
            for key, label in self.label_of_key.items():
                if label.startswith(first_label):
                    baseline_entries.add(("scores", key))
            entries -= baseline_entries
        for section, key in sorted(entries):
            cache.clear(section, key)


def kld_in_words(row: ModelResult) -> str:
    """Return a row's label and its KLD."""
    if row.kld is None:
        return f"{row.label} n/a"
    return f"{row.label} {significant_text(row.kld, 4, row.kld_kind)}"
