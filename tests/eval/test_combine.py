"""``show a.json b.json``: rows of several runs in one table."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q.eval import merging
from compare_q.eval.ranking import best_labels
from compare_q.eval.results import ModelResult, RunResult
from tests.support.made import (
    BASE,
    FAILED,
    KLD_BLOCKS,
    QUANT,
    REF,
    raw_of,
    replace,
    run_of,
    with_sums,
)
from tests.support.toy import Run, Specs, refusal

DATA = {"windows_sha256": "w", "vocabulary_sha256": "v", "windows": 2, "scored_tokens": 40}
TEXT = {"name": "text", "windows": 2, "text_tokens": 400, "scored_tokens": 40}
CPU = {"cpu": "AMD EPYC"}
GPU = {"gpus": ["NVIDIA H200"] * 2, "driver": "580.1"}
IDENTITY = {
    "label": "bf16",
    "key": "a" * 40,
    "model": "m",
    "engine": "fake",
    "hardware": CPU,
    "version": 3,
}
ON_GPU = {**IDENTITY, "key": "b" * 40, "hardware": GPU, "bytes": 5}
MEASURED = (
    "scores_key",
    "ppl",
    "kld",
    "blocks",
    "curve",
    "slices",
    "reference",
    "notes",
    "worst_tokens",
)
"""Fields that do not depend on when and where a row was measured."""
Write = Callable[..., Path]


def on(model: ModelResult, key: str, machine: dict[str, Any] = CPU, **fields: Any) -> ModelResult:
    """Return the model with this key of its scores, as measured on this machine."""
    return replace(model, scores_key=key, provenance={**model.provenance, **machine}, **fields)


REF_A = on(REF, "ref")
QUANT_A = on(QUANT, "w4")
FP8_B = on(QUANT, "fp8", label="FP8")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Return a function that writes a results.json of another machine.

    ``write(name, models..., reference=, ...)``
    """

    def written(name: str, *models: ModelResult, **keys: Any) -> Path:
        reference = keys.get("reference", IDENTITY)
        text = {**TEXT, **keys.get("text", {})}
        data = {**DATA, **keys.get("data", {})}
        run = run_of(*models, reference=reference, texts=[text], data=data, title=keys.get("title"))
        raw = raw_of(run, ["compare_q.py", "-d", name])
        raw |= {
            "hardware": keys.get("hardware", CPU),
            "versions": {"torch": keys.get("torch", "2.13")},
        }
        raw |= {"created": keys.get("created", "2026-11-20T00:00:00+00:00"), "commit": "c"}
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(raw))
        return tmp_path / name

    return written


def test_the_same_row_appears_once_and_others_of_its_label_get_a_number(write: Write) -> None:
    other = on(QUANT, "w4 elsewhere")
    run = merging.load(
        [
            write("a.json", REF_A, QUANT_A),
            write("b.json", REF_A, FP8_B, QUANT_A),
            write("c.json", other),
        ]
    )
    assert run.models == (REF_A, QUANT_A, FP8_B, replace(other, label="W4A16 (2)"))
    assert run.reference == IDENTITY
    assert run.command == ()


def test_a_reference_of_another_label_is_the_same_by_its_key(write: Write) -> None:
    files = [
        write("a.json", REF_A),
        write("b.json", FP8_B, reference={**IDENTITY, "label": "other"}),
    ]
    assert merging.load(files).labels == ("bf16", "FP8")


@pytest.mark.parametrize("order", [1, -1])
def test_a_measured_row_replaces_a_failed_one(write: Write, order: int) -> None:
    failed = replace(FAILED, label=QUANT_A.label)
    files = [write("a.json", REF_A, failed), write("b.json", REF_A, QUANT_A)]
    assert merging.load(files[::order]).models == (REF_A, QUANT_A)


def test_runs_on_other_machines_share_what_they_share(write: Write) -> None:
    files = [
        write("a.json", REF_A),
        write("b.json", on(BASE, "base", GPU), hardware=GPU, torch="2.14"),
    ]
    run = merging.load(files)
    assert run.labels == ("bf16", "base")
    # What differs between the runs is left out; the commit is the same.
    assert (run.versions, run.hardware, run.commit) == ({}, {}, "c")


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"data": {"vocabulary_sha256": "x"}}, ["tokenizer", "x, not vocabulary v"]),
        (
            {"data": {"windows_sha256": "x", "windows": 3}, "text": {"method": "once"}},
            ["windows", "3 windows by method once, x"],
        ),
        (
            {"reference": {**ON_GPU, "label": "fp16"}},
            ["reference", "fp16, bbbbbbbbbbbb, not bf16, aaaaaaaaaaaa"],
        ),
        # Results of others may have control characters, which must not break the line.
        (
            {"reference": {"key": "a\nb", "label": "l\nm"}},
            ["reference", "l\\nm, a\\nb, not bf16, aaaaaaaaaaaa"],
        ),
        ({"reference": None}, ["reference", "none, not bf16"]),
    ],
)
def test_what_does_not_belong_in_one_table_is_refused(
    write: Write, keys: dict[str, Any], named: list[str]
) -> None:
    first = write("a.json", REF_A)
    second = write("b.json", REF_A, **keys)
    message = refusal(merging.load, [first, second])
    assert message.startswith(f"{second}: ")
    for word in (*named, str(first)):
        assert word in message
    assert "\n" not in message


def test_one_file_twice_is_refused(write: Write) -> None:
    first = write("a.json", REF_A)
    # Another spelling of the same path.
    assert "a.json" in refusal(merging.load, [first, first.parent / "." / "a.json"])


def test_two_runs_become_one_table(compare_q: Run, write: Write, tmp_path: Path) -> None:
    """A combined run is shown, written and drawn like a single run."""
    third = with_sums(
        on(QUANT, "w2", label="AWQ"), kld=(2.0, 2.0, 2.0, 2.0), tokens=KLD_BLOCKS.tokens
    )
    first = write("a.json", REF_A, QUANT_A, title="Two boxes")
    second = write("b.json", REF_A, third)
    files = ("-o", tmp_path / "o.json", "--csv", tmp_path / "o.csv", "-pf", tmp_path / "o.svg")
    ran = compare_q("show", first, second, *files, "--pair", "AWQ", "W4A16")
    assert (ran.status, "AWQ against W4A16" in ran.out) == (0, True), ran.err
    assert "Two boxes" in (tmp_path / "o.svg").read_text()
    with (tmp_path / "o.csv").open(newline="") as stream:
        rows = [(row["label"], row["where"]) for row in csv.DictReader(stream)]
    assert rows == [(label, "AMD EPYC") for label in ("bf16", "W4A16", "AWQ")]
    assert json.loads((tmp_path / "o.json").read_text())["title"] == "Two boxes"
    assert compare_q("show", tmp_path / "o.json").out == compare_q("show", first, second).out
    ran = compare_q("show", first, write("c.json", QUANT_A, reference=ON_GPU))
    assert (ran.status, ran.out) == (2, "")
    assert "--csv: " in compare_q("show", first, second, "--csv", second).err


def test_runs_of_two_caches_are_the_run_of_all_models(
    compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    """Rows are the same if models are measured in two runs.

    Each run has its own cache and reference store.
    """
    specs: list[dict[str, Any]] = []
    for boost in (3.0, 2.0, 1.0):
        engine = {"vocab_size": 500, "boost": boost}
        label = f"boost {boost}"
        specs.append({"load_fn": "fake", "model_dir": "none", "label": label, "engine": engine})
    reference, *others = specs
    reference["reference"] = True
    for name, models in {"a": others[:1], "b": others[1:], "all": others}.items():
        data, spec = write_specs([reference, *models], max_rows=4)
        ran = compare_q(
            "-d", data, "-m", spec, "-o", tmp_path / f"{name}.json", "--cache-dir", tmp_path / name
        )
        assert ran.status == 0, ran.err
    run_of_all = RunResult.read(tmp_path / "all.json")
    run = merging.load([tmp_path / "a.json", tmp_path / "b.json"])
    assert run.labels == run_of_all.labels
    for one, other in zip(run.models, run_of_all.models, strict=True):
        for field in MEASURED:
            assert getattr(one, field) == getattr(other, field), (one.label, field)
        assert one.worst_tokens
    assert best_labels(run.models, "kld") == best_labels(run_of_all.models, "kld")
