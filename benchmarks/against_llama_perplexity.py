"""Compare method "llamacpp" with your own llama-perplexity.

Both score the same text with the same files; every number that the tool prints is compared.

    python benchmarks/against_llama_perplexity.py --binary llama-perplexity \\
        --base f16.gguf --model q4.gguf --text wiki.test.raw --tokenizer FOLDER \\
        --chunks 32 --output table.json

The result has four columns:

- *tool*: the numbers that llama-perplexity prints;
- *compare_q*: the same statistics, computed as on the command line;
- *exact*: float64, from the logits of both models;
- *16-bit*: like *exact*, with the tool's own shortcuts.  Its store holds the reference's
  log-probabilities in 65,536 steps over the 16 nats below the largest logit.  A less probable token
  counts as if it were 16 nats below.  The tool's divergence leaves out tokens below exp(-16).  It
  computes in float32.

If *16-bit* equals *tool*, these shortcuts are the whole difference.  Both models are in memory at
the same time.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import llama_formulas  # noqa: E402
from benchmarks.llama_formulas import (  # noqa: E402
    CORRELATION,
    DELTA_PERCENTS,
    KLD_PERCENTS,
    Array,
    Numbers,
    name_of,
)
from compare_q.backends.base import PlannedModel, Window  # noqa: E402
from compare_q.backends.llamacpp import LlamacppEngine  # noqa: E402
from compare_q.eval.common.cache import Cache  # noqa: E402
from compare_q.eval.run import runner, stored_scores  # noqa: E402
from compare_q.eval.run.run_config import local_config  # noqa: E402
from compare_q.eval.specs import spec_files  # noqa: E402
from compare_q.eval.stats.row_statistics import (  # noqa: E402
    Average,
    RowStatistics,
    averages_of,
    statistics_of,
)
from compare_q.eval.text.eval_data import EvalData  # noqa: E402

AVERAGES = {
    "Mean PPL(Q)": "ppl",
    "Mean PPL(base)": "ref_ppl",
    "Mean ln(PPL(Q)/PPL(base))": "ln_ppl_ratio",
    "Mean PPL(Q)/PPL(base)": "ppl_ratio",
    "Mean PPL(Q)-PPL(base)": "ppl_difference",
    "Mean KLD": "kld",
    "Mean Δp": "delta_p",
    "RMS Δp": "delta_p_rms",
    "Same top p": "same_top",
}
"""Line of the tool -> average of a row."""
COLUMNS = ("tool", "compare_q", "exact", "16-bit")
TRIES = 3


class ModelScores(NamedTuple):
    """A model's averages, with both errors, and the statistics of its row."""

    averages: dict[str, Average]
    statistics: RowStatistics


def run_tool(args: argparse.Namespace, model: Path, *extra: str) -> str:
    """Return the output of llama-perplexity on one file, with one sequence and one batch per chunk.

    The tool exits with lines still in its logger's queue (issue 22142 of llama.cpp), so that its
    last lines may be missing on a busy machine.  It is then run again, at most twice.
    """
    length = str(args.eval_len)
    words = [args.binary, "-m", str(model), "-f", str(args.text)]
    words += ["-c", length, "-b", length, "-ub", length]
    words += ["-t", str(args.threads), "--chunks", str(args.chunks)]
    words += ["--no-log-timestamps", "--no-log-prefix"]
    words += [*extra, *shlex.split(args.tool_args)]
    for _ in range(TRIES):
        process = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        printed = llama_formulas.printed_numbers(process.stdout)
        if process.returncode == 0 and printed.keys() & {"PPL", "Same top p"}:
            return process.stdout
    sys.exit(f"{shlex.join(words)}: status {process.returncode}\n{process.stdout[-2000:]}")


def read_store(file: Path) -> tuple[Array, Array]:
    """Return the tokens int32 [chunks, L] of a --kl-divergence-base file, and its rows.

    A row, uint16 [chunks, T, 4 + V], has an even number V of log-probabilities.
    """
    # The header is 8 bytes of magic, then n_ctx, n_vocab and n_chunk.
    length, vocab, chunks = map(int, np.fromfile(file, np.int32, 3, offset=8))
    tokens = np.fromfile(file, np.int32, length * chunks, offset=20).reshape(chunks, length)
    # The tool scores only the second half of a chunk.
    # A row begins with two float32: its scale and its smallest log-probability.
    shape = (chunks, length - 1 - length // 2, 2 * ((vocab + 1) // 2) + 4)
    return tokens, np.memmap(file, np.uint16, "r", offset=20 + tokens.nbytes, shape=shape)


def compare_q(args: argparse.Namespace, folder: Path) -> tuple[EvalData, ModelScores]:
    """Run compare_q on both files; return its windows and the model's scores."""
    data = {
        "tokenizer_dir": str(args.tokenizer),
        "dataset": "text",
        "path": str(args.text),
        "method": "llamacpp",
        "eval_len": args.eval_len,
    }
    here = Path.cwd() / "spec.json"
    specs = []
    for label, file in (("base", args.base), ("model", args.model)):
        spec = {
            "load_fn": "llamacpp",
            "label": label,
            "model_dir": str(file.resolve()),
            "engine": options(args),
            "reference": label == "base",
        }
        specs.append(spec_files.parse_model_spec(spec, here))
    cache = Cache(folder)
    outcome = runner.run(
        local_config(cache), {"text": spec_files.parse_data_spec(data, here)}, specs, args.chunks
    )
    row = outcome.results.models[1]
    if row.error:
        sys.exit(f"compare_q: {row.error}")
    stored = stored_scores.scores_of_row(cache, row.scores_key, outcome.data)
    if stored is None:
        sys.exit("compare_q: the scores of the model are no longer in the cache")
    assignment = stored_scores.block_assignment(outcome.data, stored)
    scores = ModelScores(
        averages_of(stored.columns, assignment),
        statistics_of(stored.columns, assignment, stored.position),
    )
    return outcome.data, scores


def options(args: argparse.Namespace) -> dict[str, int]:
    """Return the engine options that equal the tool's settings."""
    return {"n_threads": args.threads, "n_batch": args.eval_len, "n_ubatch": args.eval_len}


def ours(scores: ModelScores) -> Numbers:
    """Return the numbers of llama-perplexity's block, by compare_q.

    Their errors are those that take tokens as independent, as the tool's.
    """
    statistics = scores.statistics
    numbers: dict[str, tuple[float | None, ...]] = {}
    for line, name in AVERAGES.items():
        average = scores.averages[name]
        numbers[line] = (average.value, average.stderr_independent)
    for percent in KLD_PERCENTS:
        numbers[name_of(percent, "KLD")] = (statistics.kld_percentiles[percent],)
    for percent in DELTA_PERCENTS:
        numbers[name_of(percent, "Δp")] = (statistics.delta_p_percentiles[percent],)
    numbers[CORRELATION] = (statistics.correlation,)
    scaled = {}
    for line, values in numbers.items():
        scaled[line] = tuple(scaled_number(value, line) for value in values)
    return scaled


def scaled_number(value: float | None, line: str) -> float:
    """Return a number as the tool prints it in this line; NaN for None."""
    if value is None:
        return np.nan
    return scale(line) * value


def scale(name: str) -> float:
    """Return 100 for a line in percent, 1 for others."""
    if name.endswith("p") or name == CORRELATION:
        return 100.0
    return 1.0


def by_logits(
    args: argparse.Namespace, windows: Sequence[Window], rows: Array | None = None
) -> tuple[llama_formulas.Positions, llama_formulas.Positions, int]:
    """Return (exact positions, positions through 16 bits, number of different uint16).

    Compared are the ``rows`` of the tool's store with ours.
    """
    engines = []
    for file in (args.base, args.model):
        model = PlannedModel(
            label=file.stem,
            engine="llamacpp",
            load_fn="llamacpp",
            model_dir=str(file),
            max_tokens=args.eval_len,
            options=options(args),
        )
        engines.append(LlamacppEngine(model))
    for engine in engines:
        engine.load()
    exact = []
    rounded = []
    n_different = 0
    for window in windows:
        # The logits at a position predict the token after it.
        scored = window.positions - 1
        base, model_logits = (engine.logits(window)[scored].cpu().numpy() for engine in engines)
        store = llama_formulas.store16(base)
        if rows is not None:
            n_different += int((store != rows[window.index]).sum())
        exact.append(llama_formulas.exact_positions(model_logits, base, window.targets))
        rounded.append(llama_formulas.through_16_bits(model_logits, store, window.targets))
    for engine in engines:
        engine.close()
    return (
        llama_formulas.joined_positions(exact),
        llama_formulas.joined_positions(rounded),
        n_different,
    )


def same_tokens(ours: Sequence[Window], theirs: Array) -> None:
    """Stop unless both cut the same windows.

    The first token of a window may differ: where BOS replaces it, the tool's file has that token.
    """
    cut = np.stack([window.token_ids for window in ours])
    if cut.shape != theirs.shape or (cut[:, 1:] != theirs[:, 1:]).any():
        sys.exit(f"the tokenizer cuts other windows than the tool: {cut.shape}, {theirs.shape}")


def table(tool: Mapping[str, tuple[str, ...]], columns: Sequence[Numbers]) -> list[list[str]]:
    """Return rows of the comparison; every number has as many decimals as the tool prints."""
    rows = []
    for name, values in tool.items():
        for number, value in enumerate(values):
            decimals = len(value.partition(".")[2])
            others = [f"{column[name][number]:.{decimals}f}" for column in columns]
            title = name
            if number:
                title = f"  +/- of {name}"
            rows.append([title, value, *others])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--binary", default="llama-perplexity")
    for name in ("base", "model", "text", "tokenizer"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--eval-len", type=int, default=512)
    parser.add_argument("--chunks", type=int, default=32)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--tool-args", default="", help='more arguments of the tool, e.g. "-ngl 99"'
    )
    parser.add_argument("--output", type=Path, help="the table as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder) / "base.kld"
        run_tool(args, args.base, "--kl-divergence-base", str(store))
        output = run_tool(args, args.model, "--kl-divergence", "--kl-divergence-base", str(store))
        plain = llama_formulas.printed_numbers(run_tool(args, args.model))["PPL"]
        data, scores = compare_q(args, Path(folder))
        tokens, rows = read_store(store)
        same_tokens(data.windows, tokens)
        exact, rounded, n_different = by_logits(args, data.windows, rows)
    tool = {"PPL": plain, **llama_formulas.printed_numbers(output)}
    columns = [
        ours(scores),
        llama_formulas.tool_statistics(exact),
        llama_formulas.tool_statistics(rounded),
    ]
    lines = table(tool, [{"PPL": column["Mean PPL(Q)"], **column} for column in columns])
    print_table(lines)
    print(
        f"{n_different} of {rows.size} numbers in the tool's store differ from ours; "
        "* marks 16-bit unlike the tool"
    )
    if args.output:
        by_line = {line[0]: dict(zip(COLUMNS, line[1:], strict=True)) for line in lines}
        content = {"store_differs": n_different, "rows": by_line}
        args.output.write_text(json.dumps(content, indent=1, ensure_ascii=False))


def print_table(lines: Sequence[Sequence[str]]) -> None:
    """Print the comparison; ``*`` marks numbers that differ between the tool and 16-bit."""
    for line in [["", *COLUMNS], *lines]:
        title, tool, _, _, rounded = line
        text = f"{title:42}"
        for cell in line[1:]:
            text += f"{cell:>12}"
        if title and tool != rounded:
            text += "  *"
        print(text)


if __name__ == "__main__":
    main()
