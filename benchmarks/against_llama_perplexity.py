"""Compare method "llamacpp" with your own llama-perplexity: the same files, the same text, every printed number.

    python benchmarks/against_llama_perplexity.py --binary llama-perplexity --base f16.gguf --model q4.gguf \\
        --text wiki.test.raw --tokenizer FOLDER --chunks 32 --output table.json

The result has four columns:

- *tool*: the numbers that llama-perplexity prints;
- *compare_q*: the same statistics, computed as on the command line;
- *exact*: float64, from the logits of both models;
- *16-bit*: like *exact*, with the tool's own shortcuts.  Its store holds the reference's log-probabilities in 65,536
  steps over the 16 nats below the largest logit.  A less probable token counts as if it were 16 nats below.  The tool's
  divergence leaves out tokens below exp(-16).  It computes in float32.

If *16-bit* equals *tool*, these shortcuts are the whole difference.  Both models are in memory at the same time.
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
from compare_q.eval.run import runner, token_scores  # noqa: E402
from compare_q.eval.run.run_config import local_config  # noqa: E402
from compare_q.eval.specs import spec_files  # noqa: E402
from compare_q.eval.stats.estimates import Estimates, summarize  # noqa: E402
from compare_q.eval.stats.uncertainty import Mean, Perplexity, Value  # noqa: E402
from compare_q.eval.text.eval_data import EvalData  # noqa: E402


def run_tool(args: argparse.Namespace, model: Path, *extra: str) -> str:
    """Return the output of llama-perplexity on one file, with one sequence and one batch per chunk.

    The tool exits with lines still in its logger's queue (issue 22142 of llama.cpp), so that its
    last lines may be missing on a busy machine.  It is then run again, at most twice.
    """
    length = str(args.eval_len)
    words = [
        *(
            args.binary,
            "-m",
            str(model),
            "-f",
            str(args.text),
            "-c",
            length,
            "-b",
            length,
            "-ub",
            length,
        ),
        *(
            "-t",
            str(args.threads),
            "--chunks",
            str(args.chunks),
            "--no-log-timestamps",
            "--no-log-prefix",
        ),
        *(*extra, *shlex.split(args.tool_args)),
    ]
    for _ in range(3):
        done = subprocess.run(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
        )
        if done.returncode == 0 and llama_formulas.printed_numbers(done.stdout).keys() & {
            "PPL",
            "Same top p",
        }:
            return done.stdout
    sys.exit(f"{shlex.join(words)}: status {done.returncode}\n{done.stdout[-2000:]}")


def read_store(file: Path) -> tuple[Array, Array]:
    """Tokens int32 [chunks, L] of a --kl-divergence-base file, and its rows uint16 [chunks, T, 4 +
    V, V even].
    """
    length, vocab, chunks = map(int, np.fromfile(file, np.int32, 3, offset=8))
    tokens = np.fromfile(file, np.int32, length * chunks, offset=20).reshape(chunks, length)
    shape = (chunks, length - 1 - length // 2, 2 * ((vocab + 1) // 2) + 4)
    return tokens, np.memmap(file, np.uint16, "r", offset=20 + tokens.nbytes, shape=shape)


def compare_q(args: argparse.Namespace, folder: Path) -> tuple[EvalData, Estimates]:
    """Run compare_q on both files; return its windows and the model's estimates."""
    data = {
        "tokenizer_dir": str(args.tokenizer),
        "dataset": "text",
        "path": str(args.text),
        "method": "llamacpp",
        "eval_len": args.eval_len,
    }
    models = [
        {
            "load_fn": "llamacpp",
            "label": label,
            "model_dir": str(file.resolve()),
            "engine": options(args),
        }
        for label, file in (("base", args.base), ("model", args.model))
    ]
    here = Path.cwd() / "spec.json"
    parsed = [
        spec_files.parse_model_spec({**model, "reference": model["label"] == "base"}, here)
        for model in models
    ]
    cache = Cache(folder)
    config = local_config(cache)
    finished = runner.run(
        config, {"text": spec_files.parse_data_spec(data, here)}, parsed, args.chunks
    )
    result = finished.results.models[1]
    if result.error:
        sys.exit(f"compare_q: {result.error}")
    stored = token_scores.of_row(cache, result.scores_key, finished.data)
    if stored is None:
        sys.exit("compare_q: the scores of the model are no longer in the cache")
    places = token_scores.places_in(finished.data, stored)
    return finished.data, summarize(stored.columns, places, stored.position)


def options(args: argparse.Namespace) -> dict[str, int]:
    """Return the engine options that equal the tool's settings."""
    return {"n_threads": args.threads, "n_batch": args.eval_len, "n_ubatch": args.eval_len}


def ours(of: Estimates) -> Numbers:
    """llama-perplexity's block from compare_q's estimates, with the errors that take tokens as
    independent.
    """
    against = of.against
    assert against is not None
    pairs: dict[str, Perplexity | Mean | Value] = {
        "Mean PPL(Q)": of.ppl,
        "Mean PPL(base)": against.ref_ppl,
        "Mean ln(PPL(Q)/PPL(base))": against.ln_ppl_ratio,
        "Mean PPL(Q)/PPL(base)": against.ppl_ratio,
        "Mean PPL(Q)-PPL(base)": against.ppl_difference,
        "Mean KLD": against.kld,
        "Mean Δp": against.delta_p,
        "RMS Δp": against.delta_p_rms,
        "Same top p": against.same_top,
    }
    found: dict[str, tuple[float | None, ...]] = {
        name: (each.value, each.stderr_independent) for name, each in pairs.items()
    }
    found |= {name_of(p, "KLD"): (against.kld_percentiles[p],) for p in KLD_PERCENTS}
    found |= {name_of(p, "Δp"): (against.delta_p_percentiles[p],) for p in DELTA_PERCENTS}
    found[CORRELATION] = (against.correlation,)
    return {
        name: tuple(scale(name) * (np.nan if v is None else v) for v in values)
        for name, values in found.items()
    }


def scale(name: str) -> float:
    """Return 100 for a line in percent, 1 for others."""
    return 100.0 if name.endswith("p") or name == CORRELATION else 1.0


def by_logits(
    args: argparse.Namespace, windows: Sequence[Window], rows: Array | None = None
) -> tuple[llama_formulas.Positions, llama_formulas.Positions, int]:
    """Return (exact positions, positions through 16 bits, number of uint16 that differ between
    ``rows`` and ours).
    """
    engines = [
        LlamacppEngine(
            PlannedModel(
                label=file.stem,
                engine="llamacpp",
                load_fn="llamacpp",
                model_dir=str(file),
                max_tokens=args.eval_len,
                options=options(args),
            )
        )
        for file in (args.base, args.model)
    ]
    for engine in engines:
        engine.load()
    true, rounded, differing = [], [], 0
    for window in windows:
        targets, scored = window.targets, window.positions - 1
        base, model = (engine.logits(window)[scored].cpu().numpy() for engine in engines)
        store = llama_formulas.store16(base)
        differing += 0 if rows is None else int((store != rows[window.index]).sum())
        true.append(llama_formulas.exact_positions(model, base, targets))
        rounded.append(llama_formulas.through_16_bits(model, store, targets))
    for engine in engines:
        engine.close()
    return (
        llama_formulas.joined_positions(true),
        llama_formulas.joined_positions(rounded),
        differing,
    )


def same_tokens(ours: Sequence[Window], theirs: Array) -> None:
    """Stop unless both cut the same windows; where a BOS replaces the first token, the tool's file
    has that token.
    """
    cut = np.stack([window.token_ids for window in ours])
    if cut.shape != theirs.shape or (cut[:, 1:] != theirs[:, 1:]).any():
        sys.exit(f"the tokenizer cuts other windows than the tool: {cut.shape}, {theirs.shape}")


def table(tool: Mapping[str, tuple[str, ...]], columns: Sequence[Numbers]) -> list[list[str]]:
    """Return rows of the comparison; every number has as many decimals as the tool prints."""
    rows = []
    for name, values in tool.items():
        for i, value in enumerate(values):
            decimals = len(value.partition(".")[2])
            others = [f"{column[name][i]:.{decimals}f}" for column in columns]
            rows.append([f"  +/- of {name}" if i else name, value, *others])
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
        data, estimates = compare_q(args, Path(folder))
        tokens, rows = read_store(store)
        same_tokens(data.windows, tokens)
        true, rounded, differing = by_logits(args, data.windows, rows)
    tool = {"PPL": plain, **llama_formulas.printed_numbers(output)}
    columns = [
        ours(estimates),
        llama_formulas.tool_statistics(true),
        llama_formulas.tool_statistics(rounded),
    ]
    found = table(tool, [{"PPL": column["Mean PPL(Q)"], **column} for column in columns])
    for row in [["", "tool", "compare_q", "exact", "16-bit"], *found]:
        print(
            f"{row[0]:42}"
            + "".join(f"{cell:>12}" for cell in row[1:])
            + ("  *" if row[1] != row[4] and row[0] else "")
        )
    print(
        f"{differing} of {rows.size} numbers in the tool's store differ from ours; * marks 16-bit unlike the tool"
    )
    if args.output:
        names = ("tool", "compare_q", "exact", "16-bit")
        table_json = {row[0]: dict(zip(names, row[1:], strict=True)) for row in found}
        args.output.write_text(
            json.dumps(
                {"store_differs": differing, "rows": table_json}, indent=1, ensure_ascii=False
            )
        )


if __name__ == "__main__":
    main()
