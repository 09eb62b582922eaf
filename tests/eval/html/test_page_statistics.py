"""The page's own arithmetic in Node, without a browser: differences are Python's."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import replace
from typing import Any

import pytest

from backends.base import Storage
from eval.html import report
from eval.results import differences
from eval.results.run_result import ModelResult
from tests.support.made import QUANT, REF, run_of, with_sums

NODE = shutil.which("node")
LONG_RUN = 3_000_000
MODELS = (
    REF,
    with_sums(replace(QUANT, label="a"), nll=(14.0, 24.0, 34.0, 48.0), kld=(1.0, 2.0, 1.0, 2.5)),
    with_sums(replace(QUANT, label="b"), nll=(16.0, 18.0, 36.0, 38.0), same_top=(9.0, 8.0, 9.0, 7.0)),
    with_sums(replace(QUANT, label="unquantized", storage=Storage(16.0)), nll=(1.0, 1.0, 1.0, 1.0)),
    with_sums(replace(QUANT, label="holes"), whole=("kld",)),
)
SCRIPT = """
const found = { differences: [] };
for (const name of ["nll", "kld", "same_top"]) {
  for (const a of MODELS) for (const b of MODELS) found.differences.push(pairedDifference(a, b, name));
}
console.log(JSON.stringify(found));
"""


def many(model: ModelResult, length: int, groups: int) -> ModelResult:
    """The model with other sums, of so many blocks; one of them is empty."""
    assert model.estimates
    found = model.estimates.blocks
    entries = tuple(0 if g == 1 else 10 + g % 3 for g in range(groups))
    sums: dict[str, Any] = {}
    for name in differences.SCORES:
        old = getattr(found, name)
        sums[name] = old and tuple(n * old[g % len(old)] * (1 + g % 5) for g, n in enumerate(entries))
    return with_sums(model, tokens=entries, length=length, **sums)


def in_node(models: tuple[ModelResult, ...]) -> dict[str, Any]:
    """What the report's scripts find of a run."""
    scripts = "".join((report.FOLDER / f"{name}.js").read_text() for name in ("core", "statistics"))
    payload = json.dumps(report.page_payload(run_of(*models), None, []))
    code = f"const PAYLOAD = {payload}, KEPT = {{}};\n{scripts}{SCRIPT}"
    assert NODE
    done = subprocess.run([NODE, "-"], input=code, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.skipif(NODE is None, reason="no Node on this machine")
@pytest.mark.parametrize(("length", "groups"), [(1999, 19), (2000, 3), (8703, 3), (100_000, 30), (LONG_RUN, 30)])
def test_differences_are_pythons(length: int, groups: int) -> None:
    """Of texts of every length, and of blocks as older results have them."""
    models = tuple(many(model, length, groups) for model in MODELS)
    found = in_node(models)
    expected = [
        differences.difference_with_interval(a.estimates.blocks, b.estimates.blocks, name)
        for name in ("nll", "kld", "same_top") for a in models for b in models if a.estimates and b.estimates
    ]  # fmt: skip
    assert len(found["differences"]) == len(expected) == 75
    for ours, theirs in zip(expected, found["differences"], strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            limits = ours.limits or (None, None)
            assert [theirs[key] for key in ("value", "stderr", "low", "high")] == pytest.approx(
                [ours.value, ours.stderr, *limits], rel=1e-9, abs=1e-12
            )
