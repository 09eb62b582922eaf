"""The gate: its limit by hand, how often it is wrong, its verdicts, and its exit statuses."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.base import KldKind
from compare_q.eval.gate.floor import FLOOR_COPIES, Floor, VariantTokens
from compare_q.eval.gate.verdicts import Row, Verdict, first_verdict, verdict_of, where
from compare_q.eval.results import ModelResult
from tests.support.made import BLOCKS
from tests.support.toy import FAKE, Ran, Run, Specs, assert_refused

WINDOWS = 4
LENGTH = 60
ENTRIES = 16
TEXTS = {"full batch": WINDOWS, "batch 1": 1}
PASSES = ("prefill", "prefill again", "decode")


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def tokens_of(first: np.ndarray, logits: np.ndarray) -> VariantTokens:
    """Return tokens by brute force in float64.

    ``first`` and ``logits``: [windows, length, entries]; the target is entry 0.
    """
    one = log_softmax(first)
    two = log_softmax(logits)
    position = np.indices(one.shape[:2])[1].ravel().astype(np.int32)
    kld = (np.exp(one) * (one - two)).sum(-1).ravel()
    logprob = two[..., 0].ravel()
    return VariantTokens(position, logprob, kld, np.abs(logprob - one[..., 0].ravel()))


class Engine:
    """A closed-form engine: its roundings are normal noise on its logits.

    The size of the noise depends on the seed.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.first = self.random.normal(size=(WINDOWS, LENGTH, ENTRIES)) * 2
        self.size = 10 ** self.random.uniform(-4, -2)

    def scored(self, windows: int = WINDOWS, fault: float = 0.0) -> VariantTokens:
        """Return scores with other roundings, and with ``fault`` on the first logit."""
        noise = self.random.normal(size=(windows, LENGTH, ENTRIES)) * self.size
        logits = self.first[:windows] + noise
        logits[..., 0] += fault
        return tokens_of(self.first[:windows], logits)

    def floors(self, comparisons: int = 2 * len(PASSES) * len(TEXTS)) -> dict[str, Floor]:
        floors = {}
        for text, count in TEXTS.items():
            copies = [self.scored(count) for _ in range(FLOOR_COPIES)]
            floors[text] = Floor(copies, comparisons)
        return floors

    def verdict(self, fault: float = 0.0) -> Verdict:
        """Return the verdict on the second of two variants, which has ``fault``.

        It is scored in three passes over two texts.
        """
        rows = []
        for pass_name in PASSES:
            for text, count in TEXTS.items():
                rows.append(row_of(pass_name, text, self.scored(count, fault)))
        # The second run is equal: the engine is deterministic.
        rows[2:4] = [row._replace(pass_name="prefill again") for row in rows[:2]]
        first = [row_of(row.pass_name, row.text, self.scored(1), "old") for row in rows]
        return verdict_of("new", rows, self.floors(), first)


def row_of(pass_name: str, text: str, tokens: VariantTokens, digest: str = "new") -> Row:
    kld = float(tokens.kld.mean())
    model = ModelResult(
        label=f"new | {pass_name}", engine="fake", scores_digest=digest, kld=kld, kld_stderr=1e-9
    )
    return Row(pass_name, text, model, tokens)


def test_the_floor_follows_a_prediction_limit_of_the_normal_distribution() -> None:
    """Three copies with ln KLD -8, -7, -6: m = -7, s = 1; t(0.99, 2) = 6.9646 by table; sqrt(1 +
    1/3) = 1.1547.
    """
    zero = np.zeros(4)
    position = np.arange(4, dtype=np.int32)
    copies = []
    for power in (-8, -7, -6):
        # Right kernels may round at other places than a copy does: 1.25 times the limit.
        copies.append(VariantTokens(position, zero, np.full(4, math.exp(power)), zero))
    assert Floor(copies, 1).limit == pytest.approx(
        1.25 * math.exp(-7 + 6.96456 * 1.154701), rel=1e-4
    )
    # Twelve comparisons share the level of 1 %.
    tail = 0.01 / 12
    # The quantile of Student's t has a closed form for two degrees of freedom.
    quantile = (1 - 2 * tail) / math.sqrt(2 * tail * (1 - tail))
    reach = quantile * math.sqrt(4 / 3)
    assert Floor(copies, 12).limit == pytest.approx(1.25 * math.exp(-7 + reach), rel=1e-9)
    # Equal to the bit.
    assert Floor(copies, 1).change_limit == 0


def test_right_variants_are_as_before_and_three_floors_are_found() -> None:
    """1,000 gates of a correct variant: at most 2 % false alarms.  20 with three times the floor:
    all differ.
    """
    outcomes = [Engine(seed).verdict().outcome for seed in range(1000)]
    # The level of 1 % is 10 of 1,000, with a standard error of 3.1.
    assert outcomes.count("as before") >= 980
    assert set(outcomes) <= {"as before", "differs", "not deterministic"}
    for seed in range(20):
        engine = Engine(seed)
        p = np.exp(log_softmax(engine.first)[..., 0])
        limit = engine.floors()["full batch"].limit
        # The KLD of a small shift is shift^2 p (1 - p) / 2.
        fault = math.sqrt(2 * 3 * limit / np.mean(p * (1 - p)))
        assert engine.verdict(fault).outcome == "differs"


def test_a_first_variant_that_is_wrong_at_batch_1_differs() -> None:
    """The variant's KLD from itself is 0 in both texts, but its log-probabilities of the same
    tokens differ.
    """
    engine = Engine(0)
    right = tokens_of(engine.first, engine.first)
    for change, outcome in ((0.0, "as before"), (0.5, "differs")):
        alone = VariantTokens(*(values[:LENGTH] for values in right))._replace(
            logprob=right.logprob[:LENGTH] + change
        )
        rows = [row_of("prefill", "full batch", right), row_of("prefill", "batch 1", alone)]
        assert verdict_of("old", rows, engine.floors(), []).outcome == outcome
    # Other tokens are not compared.
    elsewhere = alone._replace(position=alone.position + 1)
    rows = [rows[0], row_of("prefill", "batch 1", elsewhere)]
    assert verdict_of("old", rows, engine.floors(), []).outcome == "as before"


@pytest.mark.parametrize(
    ("kind", "times", "outcome"),
    [
        ("exact", 0.5, "as before"),
        ("exact", 2.0, "differs"),
        # The KLD is at least this: above the floor it differs, below it nothing is known.
        ("bound", 0.5, "failed"),
        ("bound", 2.0, "differs"),
        # Its interval is +- 3.18 * 0.1 floors.
        ("estimate", 0.5, "as before"),
        ("estimate", 0.9, "failed"),
        ("estimate", 1.1, "failed"),
        ("estimate", 2.0, "differs"),
    ],
)
def test_a_kld_that_may_be_above_the_floor_is_not_as_before(
    kind: KldKind, times: float, outcome: str
) -> None:
    engine = Engine(0)
    floors = engine.floors()
    limit = floors["full batch"].limit
    row = row_of("decode", "full batch", engine.scored())
    model = row.model.updated(
        kld=times * limit, kld_stderr=0.1 * limit, kld_kind=kind, blocks=BLOCKS
    )
    verdict = verdict_of("new", [row._replace(model=model)], floors, [])
    assert verdict.outcome == outcome
    assert ("undecided" in verdict.words) == (outcome == "failed")
    assert (">=" in verdict.words) == (kind == "bound")


def test_a_noise_floor_needs_exact_klds() -> None:
    row = row_of("copy", "full batch", Engine(0).scored())
    assert first_verdict("old", [row], {}) is None
    bounded = row._replace(model=row.model.updated(kld_kind="bound"))
    verdict = first_verdict("old", [bounded], {})
    assert verdict is not None
    assert verdict.outcome == "failed"


@pytest.mark.parametrize(
    ("ratios", "words"),
    [
        (np.ones(200), ""),
        (np.full(200, 5.0), ""),
        (np.where(np.arange(200) < 120, 1.0, 50.0), "from position 120 on"),
        # 0 has no logarithm.
        (np.where(np.arange(200) < 120, 0.0, 50.0), "from position 120 on"),
        # On average 3 times the copies' KLD in the first quarter, and 9 times in the last.
        (np.linspace(2.0, 10.0, 200), "growing"),
    ],
)
def test_where_a_fault_begins(ratios: np.ndarray, words: str) -> None:
    noise = np.random.default_rng(0).lognormal(sigma=0.3, size=200)
    place = where(1e-3 * ratios * noise, np.full(200, 1e-3))
    if words == "growing":
        place = place.partition(" ")[0]
    assert place == words


@pytest.fixture
def gate(compare_q: Run, write_specs: Specs, tmp_path: Path) -> Callable[..., Any]:
    def run(*words: str, **spec: Any) -> tuple[Ran, dict[str, str], dict[str, Any]]:
        data, models = write_specs([{**FAKE, "label": "fake", **spec}])
        file = tmp_path / "gate.json"
        ran = compare_q("gate", "-m", models, "-d", data, "-r", 4, "-o", file, *words)
        content: dict[str, Any] = {}
        if file.exists():
            content = json.loads(file.read_text())
        outcomes = {}
        for variant in content.get("variants", ()):
            outcomes[variant["label"]] = variant["outcome"]
        return ran, outcomes, content

    return run


VARIANTS = ("--variant", "old:", "--variant")


@pytest.mark.parametrize(
    ("variants", "status", "outcomes"),
    [
        (("--sweep", "engine.seconds=0.0,0.001"), 0, ["as before", "as before"]),
        ((*VARIANTS, "new:engine.shift=0.5"), 1, ["as before", "differs"]),
        ((*VARIANTS, "new:engine.random=0.01"), 1, ["as before", "not deterministic"]),
        # Another kernel should change roundings: equal scores show that it did not run.
        ((*VARIANTS, "new:engine.kernel=other"), 1, ["as before", "not applied"]),
        ((*VARIANTS, "new:engine.nan_windows=[0]"), 1, ["as before", "differs"]),
        (
            (*VARIANTS, "new:engine.fail=1", "--variant", "b:engine.shift=0.5"),
            3,
            ["as before", "failed", "differs"],
        ),
        # A first variant that is no baseline ends the gate.
        (("--variant", "old:engine.random=0.01", "--variant", "new:"), 1, ["not deterministic"]),
        (("--variant", "old:engine.fail=1", "--variant", "new:"), 3, ["failed"]),
        (("--fail-if", "kld > 1"), 0, ["as before"]),
        (("--fail-if", "ppl > 1"), 1, ["as before"]),
    ],
)
def test_verdicts_and_exit_statuses(
    gate: Any, variants: Sequence[str], status: int, outcomes: list[str]
) -> None:
    ran, outcome_of, _ = gate(*variants)
    assert (ran.status, list(outcome_of.values())) == (status, outcomes), ran.out + ran.err


def test_where_gives_the_reason_of_an_engine_that_does_not_show_its_layers(gate: Any) -> None:
    """Without the flag, no variant has a place; the verdicts and the exit status are the same."""
    words = (*VARIANTS, "new:engine.shift=0.5")
    ran, outcome_of, content = gate(*words, "--where")
    assert (ran.status, list(outcome_of.values())) == (1, ["as before", "differs"])
    assert [variant["where"] for variant in content["variants"]] == [
        "",
        "not known: fake does not show its layers",
    ]
    assert "where: not known: fake" in ran.out
    ran, outcome_of, content = gate(*words)
    assert (ran.status, list(outcome_of.values())) == (1, ["as before", "differs"])
    assert {variant["where"] for variant in content["variants"]} == {""}
    assert "where:" not in ran.out


def test_a_condition_on_a_slice_is_about_the_row_of_the_gate(gate: Any) -> None:
    """A row of the gate is of the whole text or of a part; its slices are of the same tokens."""
    ran, _, content = gate("--fail-if", "ppl:begin > 1")
    assert ran.status == 1, ran.err
    (variant,) = content["variants"]
    counts = set()
    for row in variant["rows"]:
        counts.add(row["tokens"])
        assert row["slices"]["begin"]["tokens"] == row["tokens"]
    assert len(counts) > 1
    assert content["conditions"]
    assert all("ppl:begin > 1 (1,000.000" in line for line in content["conditions"])


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("--sweep", "engine.shift"), ["--sweep", "engine.shift"]),
        (("--sweep", "load_fn=a,b"), ["sweep.load_fn"]),
        (("--variant", "engine.shift=1"), ["--variant"]),
        (("--variant", "a:engine.nothing=1"), ["a", "nothing"]),
        (("--fail-if", "kld"), ["--fail-if", "kld"]),
        (("--fail-if", "kdl > 1"), ["--fail-if", "kdl"]),
        (("--fail-if", "label > 1"), ["--fail-if", "label"]),
        (("--fail-if", "kld:prose > 1"), ["--fail-if", "prose", "special"]),
        (("--phase", "both"), ["--phase", "both"]),
        (("--arbiter", "nothing"), ["--arbiter", "nothing"]),
        (("--baseline", "nothing.json"), ["nothing.json"]),
        (("--junit", "no/such/folder/x.xml"), ["no/such/folder/x.xml"]),
    ],
)
def test_bad_words_are_refused_in_a_line(gate: Any, words: Sequence[str], parts: list[str]) -> None:
    ran, _, _ = gate(*words)
    assert_refused(ran, *parts)


def test_a_baseline_of_an_older_layout_is_refused(gate: Any, tmp_path: Path) -> None:
    """Layout 1 kept the digest of a row in another form, so comparing with it would be refused for
    a wrong reason.
    """
    old = tmp_path / "old.json"
    old.write_text('{"gate": 1}')
    assert_refused(gate("--baseline", str(old))[0], "old.json", "older")


ROW = {"label": "a | prefill", "engine": "fake", "scores_key": "k"}
VERDICT = {"label": "a", "outcome": "as before", "words": "as before", "rows": [ROW]}
BASELINE = {"gate": 2, "text": "t", "run": "x", "floor": [], "variants": [VERDICT]}


@pytest.mark.parametrize(
    ("content", "part"),
    [
        (json.dumps({**BASELINE, "variants": []}), "variants"),
        (json.dumps({**BASELINE, "variants": [{**VERDICT, "rows": []}]}), "rows"),
        (json.dumps(BASELINE)[:-1] + ', "run": "y"}', "run: stands twice"),
        (json.dumps(BASELINE)[:-1] + ', "run": NaN}', "base.json"),
        (
            json.dumps({**BASELINE, "variants": "[" * 70 + "]" * 70})
            .replace('"[', "[")
            .replace(']"', "]"),
            "deep",
        ),
        ("[]", "base.json"),
        (json.dumps(BASELINE), "scores are not in the cache"),
    ],
)
def test_a_baseline_that_names_no_scores_is_refused(
    gate: Any, tmp_path: Path, content: str, part: str
) -> None:
    (tmp_path / "base.json").write_text(content)
    ran = gate(*VARIANTS, "new:", "--baseline", str(tmp_path / "base.json"))[0]
    assert (ran.status, ran.out) == (2, "")
    last = ran.err.splitlines()[-1]
    assert last.startswith("error: ")
    assert part in last


def test_keys_of_the_gate_cannot_be_set(gate: Any) -> None:
    assert_refused(gate(phase="decode")[0], "fake", "phase")


def test_an_engine_without_decode_is_refused(
    compare_q: Run, toy_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("abc de " * 600)
    ran = compare_q("gate", f"{toy_model}@hf", "-d", tmp_path / "t.txt", "--phase", "decode")
    assert (ran.status, ran.out) == (2, "")
    assert "error: --phase: " in ran.err
    assert "'transformers' has no decode" in ran.err


def test_a_gate_scores_everything_anew(gate: Any, own_cache: Path, tmp_path: Path) -> None:
    first, _, one = gate(*VARIANTS, "new:engine.shift=0.5")
    cached = {file.name for file in (own_cache / "scores").iterdir() if file.is_dir()}
    old, new = one["variants"]
    assert all(row["scores_key"].partition("/")[0] in cached for row in old["rows"])
    assert not any(row["scores_key"].partition("/")[0] in cached for row in new["rows"])
    (tmp_path / "gate.json").rename(tmp_path / "base.json")
    second, _, two = gate(
        *VARIANTS, "new:engine.shift=0.5", "--baseline", str(tmp_path / "base.json")
    )
    assert (first.status, second.status, one["run"]) == (1, 1, two["run"])
    assert one["variants"][1]["rows"][0]["kld"] == two["variants"][1]["rows"][0]["kld"]
    assert "loading old" not in second.out + second.err
    third, _, three = gate(*VARIANTS, "new:engine.shift=0.5")
    assert one["run"] != three["run"]
    assert third.status == 1
    other = gate("--variant", "old:engine.boost=1", "--baseline", str(tmp_path / "base.json"))[0]
    assert other.status == 2
    assert "base.json" in other.err.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "outcome", "status"),
    [("random=0.1", "not deterministic", 1), ("nan_windows=[0]", "failed", 3)],
)
def test_a_first_variant_that_is_no_baseline_leaves_nothing(
    gate: Any, own_cache: Path, tmp_path: Path, option: str, outcome: str, status: int
) -> None:
    """Its first pass succeeds, but a later gate cannot use its scores, and is refused early."""
    ran, outcome_of, _ = gate("--variant", f"old:engine.{option}", "--variant", "new:")
    assert (ran.status, list(outcome_of.values())) == (status, [outcome])
    for section in ("scores", "references"):
        assert not [entry for entry in (own_cache / section).glob("*") if entry.is_dir()]
    (tmp_path / "gate.json").rename(tmp_path / "base.json")
    refused = gate(*VARIANTS, "new:", "--baseline", str(tmp_path / "base.json"))[0]
    assert (refused.status, refused.out, "loading" in refused.err) == (2, "", False)
    assert outcome in refused.err.splitlines()[-1]


def test_reports(gate: Any, tmp_path: Path) -> None:
    """The JUnit file has a case per variant and per failed condition; the Markdown names variants
    and command.
    """
    files = ("--junit", str(tmp_path / "j.xml"), "--markdown", str(tmp_path / "m.md"))
    faults = (
        "n<e>w:engine.shift=0.5",
        "--variant",
        "broken:engine.fail=1",
        "--fail-if",
        "kld > 0.01",
    )
    gate(*VARIANTS, *faults, *files)
    suite = ET.parse(tmp_path / "j.xml").getroot()
    assert suite.get("errors") == "1"
    # A variant that differs, and the failed variant's six rows without a KLD.
    assert suite.get("failures") == "7"
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert cases["old"].find("failure") is None
    assert cases["n<e>w"].find("failure").get("type") == "differs"  # type: ignore[union-attr]
    assert cases["broken"].find("error").get("type") == "failed"  # type: ignore[union-attr]
    assert int(suite.get("tests", "0")) == len(cases)
    text = (tmp_path / "m.md").read_text()
    assert all(name in text for name in ("old", "n\\<e\\>w", "broken", "```sh"))


def test_control_characters_leave_the_junit_file_xml(
    compare_q: Run, toy_model: Path, tmp_path: Path
) -> None:
    """Source code has form feeds, and errors of engines have escape sequences; XML can have
    neither.
    """
    (tmp_path / "t.txt").write_text("a\x0c\x1b[1mb\uffff " * 200)
    file = tmp_path / "j.xml"
    variants = ("--variant", "old:", "--variant", "new:engine.shift=0.5")
    words = (
        "gate",
        f"{toy_model}@fake:vocab_size=400",
        "-d",
        tmp_path / "t.txt",
        "--eval-len",
        100,
        "-r",
        2,
    )
    ran = compare_q(
        *words, "--phase", "prefill", *variants, "--fail-if", "ppl > 1", "--junit", file
    )
    assert ran.status == 1, ran.err
    cases = list(ET.parse(file).getroot().iter("testcase"))
    output = cases[1].find("system-out").text or ""  # type: ignore[union-attr]
    assert "\\x1b" in output
    assert "KLD" in output
    # The failed conditions.
    assert len(cases) > 2


@pytest.mark.parametrize(
    ("keys", "scored"),
    [
        ({"warmup_tokens": 50}, {49, 11}),
        ({"warmup_tokens": 98}, {1}),
        ({"score_every": 60, "score_last": 10}, {10}),
        ({}, {99, 24}),
    ],
)
def test_a_text_with_warm_up_tokens(
    compare_q: Run, write_specs: Specs, tmp_path: Path, keys: dict[str, int], scored: set[int]
) -> None:
    """At batch 1 a part of a window is scored, and at full batch a whole one: positions of both are
    compared.
    """
    data, models = write_specs([{**FAKE, "label": "fake"}], **keys)
    file = tmp_path / "gate.json"
    ran = compare_q("gate", "-m", models, "-d", data, "-r", 1, "-o", file, *VARIANTS, "new:")
    assert ran.status == 0, ran.err
    (first, _) = json.loads(file.read_text())["variants"]
    assert {row["tokens"] for row in first["rows"]} == scored


def test_a_window_that_is_too_short_for_a_gate_names_its_spec(
    compare_q: Run, write_specs: Specs
) -> None:
    data, models = write_specs([{**FAKE, "label": "fake"}], eval_len=3, eval_stride=3)
    assert_refused(
        compare_q("gate", "-m", models, "-d", data),
        "data.json: eval_len: 3 is too short for a gate",
    )


def test_the_arbiter_says_which_is_nearer_or_why_that_is_not_known(gate: Any) -> None:
    """The text has 396 tokens, too few to decide which variant is nearer; the arbiter compares on
    the full batch.
    """
    words = (*VARIANTS, "new:engine.shift=0.5", "--variant", "same:", "--arbiter", "fake")
    _, _, content = gate(*words)
    (line,) = content["nearer"]
    for part in ("fake", "old | prefill 0,", "new | ", "too short"):
        assert part in line
    worst = content["variants"][1]["worst_tokens"]
    assert len(worst) == 3
    assert worst[0]["kld"] == max(token["kld"] for token in worst)
    assert not content["variants"][2]["worst_tokens"]


def test_windows_of_a_gate_are_as_long_as_the_flag_says(
    compare_q: Run, toy_model: Path, tmp_path: Path
) -> None:
    (tmp_path / "t.txt").write_text("abc de " * 200)
    words = ("gate", f"{toy_model}@fake", "-d", tmp_path / "t.txt", "--phase", "prefill", "-r", 2)
    assert "2 × 600 tokens" in compare_q(*words, "--eval-len", 600).out


def test_conditions_have_a_status_of_their_own_on_ordinary_runs(
    compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    options: dict[str, dict[str, Any]] = {"a": {}, "b": {"shift": 0.1}, "c": {"fail": 1}}
    specs = []
    for label, engine in options.items():
        specs.append({**FAKE, "label": label, "engine": engine, "reference": label == "a"})
    data, models = write_specs(specs)
    words = ("-d", data, "-m", models, "-mask", "b", "-o", tmp_path / "r.json")
    assert compare_q(*words, "--fail-if", "kld > 1", "--fail-if", "same_top < 0").status == 0
    ran = compare_q(*words, "--fail-if", "kld > 0.000001")
    assert ran.status == 4
    assert "b: kld > 1e-06" in ran.err
    assert compare_q("show", tmp_path / "r.json", "--fail-if", "kld > 0.000001").status == 4
    # PPL is never below 0, but a row that failed fails every condition.
    failed = compare_q("-d", data, "-m", models, "--fail-if", "ppl < 0")
    assert failed.status == 4
    assert "c: ppl < 0 (n/a" in failed.err
