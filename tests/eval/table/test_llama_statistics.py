"""llama.cpp's block, compared with what its own format strings print of the same numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from compare_q.eval.stats.estimates import summarize
from compare_q.eval.table import llama_statistics
from compare_q.eval.table.llama_statistics import CLUSTERED, statistics_lines
from tests.support.made import COMPARED, FAILED, PPL, QUANT, REF, run_of, with_against

# As tools/perplexity/perplexity.cpp of llama.cpp writes them, %lf for %f.
FORMATS = """
====== Perplexity statistics ======
Mean PPL(Q)                   : %10.6f ± %10.6f
Mean PPL(base)                : %10.6f ± %10.6f
Cor(ln(PPL(Q)), ln(PPL(base))): %6.2f%%
Mean ln(PPL(Q)/PPL(base))     : %10.6f ± %10.6f
Mean PPL(Q)/PPL(base)         : %10.6f ± %10.6f
Mean PPL(Q)-PPL(base)         : %10.6f ± %10.6f

====== KL divergence statistics ======
Mean    KLD: %10.6f ± %10.6f
Maximum KLD: %10.6f
99.9%%   KLD: %10.6f
99.0%%   KLD: %10.6f
95.0%%   KLD: %10.6f
90.0%%   KLD: %10.6f
Median  KLD: %10.6f
10.0%%   KLD: %10.6f
 5.0%%   KLD: %10.6f
 1.0%%   KLD: %10.6f
 0.1%%   KLD: %10.6f
Minimum KLD: %10.6f

====== Token probability statistics ======
Mean    Δp: %6.3f ± %5.3f %%
Maximum Δp: %6.3f%%
99.9%%   Δp: %6.3f%%
99.0%%   Δp: %6.3f%%
95.0%%   Δp: %6.3f%%
90.0%%   Δp: %6.3f%%
75.0%%   Δp: %6.3f%%
Median  Δp: %6.3f%%
25.0%%   Δp: %6.3f%%
10.0%%   Δp: %6.3f%%
 5.0%%   Δp: %6.3f%%
 1.0%%   Δp: %6.3f%%
 0.1%%   Δp: %6.3f%%
Minimum Δp: %6.3f%%
RMS Δp    : %6.3f ± %5.3f %%
Same top p: %6.3f ± %5.3f %%
"""
SPREAD = (2.0, 0.999, 0.99, 0.95, 0.9, 0.5, 0.1, 0.05, 0.01, 0.001, -0.5)
DELTA = (200, 99.9, 99, 95, 90, 75, 50, 25, 10, 5, 1, 0.1, -50)
NUMBERS = (
    7.5, 0.0123, 7.25, 0.0111, 98.765, 0.0339, 0.001, 1.0345, 0.00103, 0.25, 0.0075, 0.01234567, 0.0002, *SPREAD,
    -1.0, 0.2, *DELTA, 4.0, 0.5, 98.765, 0.4,
)  # fmt: skip


def test_lines_are_those_of_llama_cpp() -> None:
    """Ours begin with theirs, character by character; the clustered error follows in brackets."""
    expected = (FORMATS % NUMBERS).strip().splitlines()
    lines = llama_statistics.model_lines(COMPARED)[: len(expected)]
    assert [line.partition(" (± ")[0] for line in lines] == expected
    brackets = [line.partition(" (± ")[2] for line in lines if " (± " in line]
    assert brackets == [
        "0.852000)", "0.800000)", "0.002000)", "0.002070)", "0.015000)", "0.000452)", "0.300 %)", "0.600 %)",
        "0.521 %)",
    ]  # fmt: skip


def test_what_goes_beyond_it() -> None:
    assert llama_statistics.model_lines(COMPARED)[-10:] == [
        "Same top p: 98.765 ± 0.400 % (± 0.521 %)",
        "",
        "====== KL divergence by the reference's largest probability ======",
        "p in [0.00, 0.25):  40.00% of tokens, mean KLD   0.020000 ±   0.003000 (± 0.004000), median   0.015000",
        "p in [0.95, 1.00]:  60.00% of tokens, mean KLD   0.007000 ±   0.001000 (± 0.002000), median        n/a",
        "",
        "====== Text rates (160 bytes and 32 words scored) ======",
        "Bits per byte  :   1.250000 ±   0.010000 (± 0.050000)",
        "Byte perplexity:   2.378000 ±   0.020000 (± 0.080000)",
        "Word perplexity:  55.500000 ±   1.000000 (± 3.000000)",
    ]


def test_every_measured_model_has_a_block() -> None:
    lines = statistics_lines(run_of(REF, QUANT, FAILED))
    assert lines[0] == CLUSTERED
    assert [line for line in lines if line.startswith(("bf16", "W4A16", "broken"))] == ["bf16", "W4A16 against bf16"]
    assert sum(line.startswith("Mean PPL(Q)  ") for line in lines) == 2
    assert sum(line.startswith("Mean    KLD") for line in lines) == 1


def test_what_is_not_known() -> None:
    bare = with_against(QUANT, correlation=None, kld_percentiles={})
    lines = llama_statistics.model_lines(replace(bare.estimates, ppl=replace(PPL, stderr=None), rates=None))
    assert lines[1] == "Mean PPL(Q)                   :   7.500000 ±   0.012300 (± n/a)"
    assert lines[3] == "Cor(ln(PPL(Q)), ln(PPL(base))):    n/a"
    assert "Median  KLD:        n/a" in lines
    assert not any("bytes" in line for line in lines)


def test_numbers_of_real_scores() -> None:
    """Losses ln 2 and ln 4 by turns, the reference's ln 2: ln of the ratio (ln 2) / 2, whose independent error is
    (ln 2) / 2 / sqrt(99); probabilities 1/2 and 1/4: the change is 0 or -25 %, -12.5 % in the mean."""
    n = 100
    columns = {
        "logprob": -np.log(np.tile([2.0, 4.0], n // 2)).astype(np.float32),
        "ref_logprob": np.full(n, -np.log(2), np.float32),
        "ref_top1_logprob": np.full(n, -0.1, np.float32), "kld": np.tile(np.float32([0.25, 0.75]), n // 2),
        "same_top": np.tile([True, False], n // 2),
    }  # fmt: skip
    lines = llama_statistics.model_lines(summarize(columns, np.arange(n), np.arange(1, n + 1)))
    shown = [line.partition(" (")[0] for line in lines]
    assert "Mean ln(PPL(Q)/PPL(base))     :   0.346574 ±   0.034832" in shown
    assert "Mean    KLD:   0.500000 ±   0.025126" in shown
    assert "Mean    Δp: -12.500 ± 1.256 %" in shown
    assert "Same top p: 50.000 ± 5.025 %" in shown
    assert "Maximum KLD:   0.750000" in shown
