"""What a row and a run say of themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compare_q.backends.base import Storage
from compare_q.eval.results.run_result import MARK, ModelResult, TextResult
from compare_q.eval.stats.estimates import Estimates, summarize
from compare_q.eval.stats.uncertainty import Perplexity
from tests.support.made import QUANT, REF, run_of, with_against


def scored(kld: float) -> Estimates:
    """Three tokens against a reference, of this KLD each."""
    half = np.log(np.full(3, 0.5, np.float32))
    columns = {
        "logprob": half, "ref_logprob": half, "ref_top1_logprob": half, "kld": np.full(3, kld, np.float32),
        "same_top": np.ones(3, np.bool_),
    }  # fmt: skip
    return summarize(columns, np.arange(3), np.arange(1, 4))


def floor(label: str, kld: float | None) -> ModelResult:
    """A row that its spec calls the noise floor; failed if there is no KLD."""
    spec = {"noise_floor": True}
    if kld is None:
        return ModelResult(label, "fake", spec=spec, error="no")
    return ModelResult(label, "fake", spec=spec, estimates=scored(kld))


def run(*models: ModelResult) -> TextResult:
    return TextResult("text", {}, "", models)


def test_a_row_has_its_estimates() -> None:
    """All of them against a reference, only perplexity without one, and none if it failed."""
    row, failed = ModelResult("a", "fake", estimates=scored(0.25)), ModelResult("a", "fake", error="no")
    assert (round(row.ppl.value or 0, 5), row.kld.value, row.same_top.value) == (2, 0.25, 1)
    assert (failed.ppl, failed.kld, failed.same_top) == (None, None, None)
    alone = summarize({"logprob": np.full(2, -1, np.float32)}, np.arange(2), np.arange(2))
    row = ModelResult("a", "fake", estimates=alone)
    assert row.ppl
    assert (row.kld, row.same_top) == (None, None)
    assert run(row, failed).failed == (failed,)


def test_the_noise_floor_is_the_row_whose_spec_says_so() -> None:
    """Of several the largest KLD; not one that failed or has no KLD, nor a row with a larger one that is none."""
    other = ModelResult("other", "fake", spec={"noise_floor": False}, estimates=scored(0.5))
    assert not other.is_noise_floor
    assert run(other).noise_floor is None
    small, large = floor("small", 0.001), floor("large", 0.01)
    assert run(other, small, large, floor("failed", None)).noise_floor is large
    assert run(large, small).noise_floor is large
    assert run(floor("failed", None)).noise_floor is None
    assert run(floor("no KLD is finite", np.nan)).noise_floor is None
    alone = ModelResult("reference", "fake", spec={"noise_floor": True}, estimates=summarize(
        {"logprob": np.full(2, -1, np.float32)}, np.arange(2), np.arange(2)))  # fmt: skip
    assert run(alone).noise_floor is None
    same = floor("the reference again, bit for bit the same", 0.0)
    assert run(same).noise_floor is same


def test_a_deviation_marks_the_label() -> None:
    """NVFP4 weights whose activations were to be NVFP4 and stayed bfloat16."""
    group = {"layers": "*.q_proj", "count": 3, "weights": "nvfp4 g16", "activations": "bfloat16", "kernel": "Marlin",
             "asked": "nvfp4"}  # fmt: skip
    row = ModelResult("a", "fake", provenance={"layers": [group]})
    assert len(row.deviations) == 1
    assert row.marked_label == f"a {MARK}"
    assert ModelResult("a", "fake").marked_label == "a"


def test_a_reference_without_a_row_has_the_perplexity_of_most_of_its_tokens() -> None:
    fewer = with_against(QUANT, ref_ppl=Perplexity(6.0, -70.0, 39, 1))
    assert run_of(fewer, QUANT).reference_ppl == 7.25
    assert run_of(fewer, QUANT, REF).reference_ppl == 7.5
    assert run_of(with_against(QUANT, ref_ppl=Perplexity(None, -1e9, 40, 0))).reference_ppl is None


@pytest.mark.parametrize(("bpw", "weights", "quantized"), [
    (16.0, ["int4 g128"], False), (32.0, [], False), (8.02, ["bfloat16"], True), (None, [], True),
    (None, ["bfloat16", "float32"], False), (None, ["bfloat16", "nvfp4 g16"], True),
])  # fmt: skip
def test_what_is_quantized(bpw: float | None, weights: list[str], quantized: bool) -> None:
    """The size decides, or else the layers' weights; a row of which nothing is known counts as quantized."""
    layers = [{"layers": "a", "count": 1, "weights": each, "activations": "bfloat16", "kernel": "K", "asked": ""}
              for each in weights]  # fmt: skip
    assert replace(QUANT, storage=Storage(bpw), provenance={"layers": layers}).is_quantized == quantized
