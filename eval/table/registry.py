"""Every column that a table can have, each in one line: terminal, Markdown, CSV, report, ``--sort`` and Python read it.

A column of numbers shows a flat field of results.json (``eval/results.py``) and, where that has one, the
field's error beside it.  So a field of ``ModelResult`` becomes a column by a line of ``COLUMNS``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.messages import nearest
from compare_q.eval.stats.estimates import DIVERGENCES
from compare_q.eval.table.numbers import KLD_DIGITS, PPL_DIGITS


@dataclass(frozen=True)
class Column:
    """A column: the ``name`` that chooses it, its ``header`` (two lines at most), what it ``means``, and its ``field``.

    ``field``: of results.json; empty: called like the column.  ``digits``: decimals of a number, None for words.
    ``times`` and ``plus``: what is shown is times * field + plus.  ``error``: there is a field ``..._stderr``.
    ``exact``: the field's value for the reference, by definition, of what is measured against a reference; else None.
    ``best``: the score (``SCORES`` of ``eval/ranking.py``) by which the best rows are marked.  ``more``:
    more is better, so that sorting begins with the largest.
    """

    name: str
    header: str
    means: str
    field: str = ""
    digits: int | None = None
    times: float = 1.0
    plus: float = 0.0
    signed: bool = False
    error: bool = False
    exact: float | None = None
    best: str = ""
    more: bool = False

    @property
    def source(self) -> str:
        """The field of results.json."""
        return self.field or self.name

    @property
    def fields(self) -> tuple[str, ...]:
        """The field of results.json, and that of its error."""
        return (self.source, f"{self.source}_stderr") if self.error else (self.source,)

    @property
    def title(self) -> str:
        """The header on one line."""
        return self.header.replace("-\n", "-").replace("\n", " ")


COLUMNS = (
    Column("label", "label", "the model, with its marks"),
    Column("engine", "engine", "the load_fn of its spec"),
    Column("kernel", "kernel", "what computed most quantized layers, by the engine's own name"),
    Column("where", "where", "the machine that it ran on"),
    Column("phase", "phase", "prefill, or decode SxB: in steps of S tokens of each of B windows"),
    Column("kv_cache", "KV\ncache", "the precision in which keys and values were kept"),
    Column("kv_mb", "KV MB /\n1k tok", "the KV cache of 1,000 tokens: 10^6 bytes, all layers, all GPUs", digits=1),
    Column("bpw_layer", "layer\nbpw", "stored bits per weight of the layers", digits=2),
    Column("bpw_head", "head\nbpw", "stored bits per weight of the output head", digits=2),
    Column("vram_gib", "VRAM\nGiB", "stored layers and head, 2^30 bytes", digits=2),
    Column("size", "file\nGB", "weight files on disk, 10^9 bytes", "file_bytes", 2, 1e-9),
    Column("ppl", "PPL", "perplexity: how well the model predicts the text; lower is better, within one table",
           digits=PPL_DIGITS, error=True, best="nll"),
    Column("ratio", "PPL vs\nref %", "how far perplexity is above the reference's, with the paired error", "ppl_ratio",
           2, 100, -100, signed=True, error=True, exact=1),
    Column("kld", "KLD", "how far predictions are from the reference's: mean KL(reference || model) over tokens, nats",
           digits=KLD_DIGITS, error=True, exact=0, best="kld"),
    Column("kld_median", "median\nKLD", "half of the tokens have a smaller KLD", digits=KLD_DIGITS, exact=0),
    Column("kld_p99", "99 %\nKLD", "99 % of the tokens have a smaller KLD", digits=4, exact=0),
    Column("kld_p99.9", "99.9 %\nKLD", "99.9 % of the tokens have a smaller KLD", digits=4, exact=0),
    Column("kld_max", "max\nKLD", "the largest KLD of a token", digits=4, exact=0),
    Column("reverse_kld", "reverse\nKLD", "mean KL(model || reference), nats", digits=KLD_DIGITS, error=True, exact=0),
    Column("js", "JS", "mean Jensen-Shannon divergence, nats", digits=KLD_DIGITS, error=True, exact=0),
    Column("tv", "TV %", "total variation: how often, at least, a sampled token is another one", digits=2, times=100,
           error=True, exact=0),
    Column("same_top", "same\ntop %", "tokens at which model and reference have the same most probable token",
           digits=2, times=100, error=True, exact=1, best="same_top", more=True),
    Column("top5", "top 5\n%", "how many of the five most probable tokens are the reference's", digits=2,
           times=100, error=True, exact=1, more=True),
    Column("top1", "hits\n%", "tokens of the text that are the model's most probable", digits=2, times=100, more=True),
    Column("entropy", "entropy", "mean entropy of the model's predictions, nats", digits=4),
    Column("bits_per_byte", "bits /\nbyte", "bits per byte of the text", digits=4),
    Column("questions", "ques-\ntions", "questions whose answers were scored", digits=0),
    Column("acc", "acc\n%", "questions whose most probable answer is right", digits=2, times=100, error=True,
           more=True),
    Column("acc_norm", "acc\nnorm %", "the same by log-probability per character of the answer", digits=2, times=100,
           error=True, more=True),
    Column("flips", "flips\n%", "questions that only one of model and reference has right, by acc", digits=2,
           times=100, error=True, exact=0),
    Column("flips_norm", "flips\nnorm %", "the same by acc_norm", digits=2, times=100, error=True, exact=0),
    Column("changed", "changed\n%", "questions with another answer than the reference's, by acc", digits=2,
           times=100, error=True, exact=0),
    Column("changed_norm", "changed\nnorm %", "the same by acc_norm", digits=2, times=100, error=True, exact=0),
    Column("mcnemar_p", "McNemar\np", "exact test of acc against the reference's, two-sided", digits=4),
    Column("mcnemar_p_norm", "McNemar\nnorm p", "the same of acc_norm", digits=4),
    Column("non_finite", "non-\nfinite", "tokens without a finite log-probability, left out of PPL", digits=0),
    Column("load", "load\ns", "seconds of loading", "load_seconds", 1),
    Column("seconds", "seconds", "seconds of scoring", "score_seconds", 1),
    Column("speed", "tok/s", "scored tokens a second of scoring", "tokens_per_second", 0, more=True),
)  # fmt: skip
"""In the order in which a table has them, unless ``--columns`` orders them otherwise."""
BY_NAME = {column.name: column for column in COLUMNS}
NEEDS = dict.fromkeys(DIVERGENCES, "--divergences") | dict.fromkeys(
    ("questions", "acc", "acc_norm", "flips", "flips_norm", "changed", "changed_norm", "mcnemar_p", "mcnemar_p_norm"),
    "a task of questions (-d lm_eval:TASK)",
)
"""Columns that not every run with a reference has -> what a run needs to have them."""
OF_MODEL = (
    "label", "engine", "kernel", "where", "phase", "kv_cache", "kv_mb", "bpw_layer", "bpw_head", "vram_gib", "size",
    "load",
)  # fmt: skip
"""Columns of what a model is, whatever text it scores; a run of several texts has the others once a text."""
LABEL, KERNEL, WORDS = "label", "kernel", ("label", "text", "kernel", "engine", "phase")
"""``WORDS``: columns of words, which wrap where a terminal is narrow."""


def checked(names: Sequence[str]) -> tuple[str, ...]:
    """Names of columns, each once, the label first where it is not among them; InputError for a name that is none."""
    for name in names:
        if name not in BY_NAME:
            raise InputError(f"{name!r} is no column{nearest(name, BY_NAME)}; there are: {', '.join(BY_NAME)}")
    if not names:
        raise InputError(f"names no column; there are: {', '.join(BY_NAME)}")
    return tuple(dict.fromkeys(names if LABEL in names else (LABEL, *names)))
