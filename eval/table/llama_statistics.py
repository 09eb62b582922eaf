"""llama.cpp's statistics (``llama-perplexity --kl-divergence``), line for line, and lines that llama.cpp has not.

Names, order, units and digits are taken from tools/perplexity/perplexity.cpp, so that the lines of both programs can be
compared by eye or by diff.  The first error of a line takes tokens as independent, as llama.cpp does; the error in
brackets behind it is clustered by blocks of the text (``eval/stats/uncertainty.py``), and is the one to believe.
"""

from __future__ import annotations

from compare_q.backends.common.messages import printable
from compare_q.eval.results.run_result import TextResult
from compare_q.eval.stats.estimates import AgainstReference, Bucket, Estimates, TextRates
from compare_q.eval.stats.uncertainty import Mean, Perplexity, Value

Estimate = Mean | Perplexity | Value
KLD_LINES = (
    ("Maximum KLD", "max"), ("99.9%   KLD", "99.9"), ("99.0%   KLD", "99"), ("95.0%   KLD", "95"),
    ("90.0%   KLD", "90"), ("Median  KLD", "50"), ("10.0%   KLD", "10"), (" 5.0%   KLD", "5"), (" 1.0%   KLD", "1"),
    (" 0.1%   KLD", "0.1"), ("Minimum KLD", "min"),
)  # fmt: skip
DELTA_LINES = (
    ("Maximum Δp", "max"), ("99.9%   Δp", "99.9"), ("99.0%   Δp", "99"), ("95.0%   Δp", "95"), ("90.0%   Δp", "90"),
    ("75.0%   Δp", "75"), ("Median  Δp", "50"), ("25.0%   Δp", "25"), ("10.0%   Δp", "10"), (" 5.0%   Δp", "5"),
    (" 1.0%   Δp", "1"), (" 0.1%   Δp", "0.1"), ("Minimum Δp", "min"),
)  # fmt: skip
CLUSTERED = "(±: tokens taken as independent, as llama.cpp does; in brackets: clustered by blocks of the text)"


def statistics_lines(run: TextResult) -> list[str]:
    """The lines of every measured model; ``CLUSTERED`` first."""
    lines = [CLUSTERED]
    for model in run.models:
        if model.estimates:
            against = f" against {run.reference['label']}" if model.estimates.against and run.reference else ""
            lines += ["", printable(model.label + against), "", *model_lines(model.estimates)]
    return lines


def model_lines(found: Estimates) -> list[str]:
    """One model's lines: perplexity and rates, and everything else if it was compared with a reference."""
    lines = ["====== Perplexity statistics ======", ppl_line("Mean PPL(Q)", found.ppl)]
    if found.against is not None:
        lines += [*against_lines(found.against), *confidence_lines(found.against.confidence)]
    return [*lines, *rate_lines(found.rates)]


def against_lines(found: AgainstReference) -> list[str]:
    """llama.cpp's lines after the first, which need the reference."""
    correlation = "   n/a" if found.correlation is None else f"{100 * found.correlation:6.2f}%"
    return [
        ppl_line("Mean PPL(base)", found.ref_ppl),
        f"Cor(ln(PPL(Q)), ln(PPL(base))): {correlation}",
        ppl_line("Mean ln(PPL(Q)/PPL(base))", found.ln_ppl_ratio),
        ppl_line("Mean PPL(Q)/PPL(base)", found.ppl_ratio),
        ppl_line("Mean PPL(Q)-PPL(base)", found.ppl_difference),
        "",
        "====== KL divergence statistics ======",
        f"Mean    KLD: {value_in_nats(found.kld)}",
        *(f"{name}: {right_aligned(found.kld_percentiles.get(key), 10, 6)}" for name, key in KLD_LINES),
        "",
        "====== Token probability statistics ======",
        f"Mean    Δp: {value_in_percent(found.delta_p)}",
        *(f"{name}: {right_aligned(found.delta_p_percentiles.get(key), 6, 3, 100)}%" for name, key in DELTA_LINES),
        f"RMS Δp    : {value_in_percent(found.delta_p_rms)}",
        f"Same top p: {value_in_percent(found.same_top)}",
    ]


def confidence_lines(buckets: tuple[Bucket, ...]) -> list[str]:
    """KLD by the reference's largest probability."""
    lines = ["", "====== KL divergence by the reference's largest probability ======"]
    for bucket in buckets:
        end = "]" if bucket.high == 1 else ")"
        lines.append(
            f"p in [{bucket.low:.2f}, {bucket.high:.2f}{end}: {100 * bucket.share:6.2f}% of tokens, mean KLD "
            f"{value_in_nats(bucket.kld)}, median {right_aligned(bucket.median, 10, 6)}"
        )
    return lines


def rate_lines(rates: TextRates | None) -> list[str]:
    """Perplexity over bytes and words of the text; nothing where they are not known."""
    if rates is None:
        return []
    return [
        "",
        f"====== Text rates ({rates.n_bytes:,.0f} bytes and {rates.n_words:,.0f} words scored) ======",
        *(
            f"{name}: {value_in_nats(value)}"
            for name, value in (
                ("Bits per byte  ", rates.bits_per_byte),
                ("Byte perplexity", rates.byte_perplexity),
                ("Word perplexity", rates.word_perplexity),
            )
        ),
    ]


def ppl_line(name: str, of: Estimate) -> str:
    """A line of the first part."""
    return f"{name:<30}: {value_in_nats(of)}"


def value_in_nats(of: Estimate) -> str:
    """A value with both errors, six decimals."""
    return value_with_errors(of, (10, 10), 6)


def value_in_percent(of: Estimate) -> str:
    """A value with both errors, in percent, three decimals."""
    return value_with_errors(of, (6, 5), 3, 100, " %")


def value_with_errors(of: Estimate, widths: tuple[int, int], digits: int, times: float = 1, unit: str = "") -> str:
    """A value, the error of independent tokens, and in brackets the clustered one."""
    value = right_aligned(of.value, widths[0], digits, times)
    independent = right_aligned(of.stderr_independent, widths[1], digits, times)
    return f"{value} ± {independent}{unit} (± {right_aligned(of.stderr, 1, digits, times)}{unit})"


def right_aligned(value: float | None, width: int, digits: int, times: float = 1) -> str:
    """A number flush right in so many columns, or n/a."""
    return "n/a".rjust(width) if value is None else f"{times * value:{width}.{digits}f}"
