"""Compare method "lm_eval" with your own lm-eval: word and byte perplexity and bits per byte of one text.

    python benchmarks/against_lm_eval.py --binary lm-eval --model FOLDER --text documents.jsonl --max-length 1024 \\
        --output table.json

``--text``: JSON lines with one document per line in ``text``, or a plain text file, which is one document.  With
``--wikitext`` each line has a page of WikiText in ``page`` (for example of WikiText-2).  lm-eval then scores and counts
the page by the functions of its task ``wikitext``.  It logs the rewritten pages, which must equal compare_q's character
for character.  lm-eval may be installed in another environment than compare_q.

Both tools run the model in float32 through Transformers, one window at a time.  lm-eval runs twice: with its defaults,
and with ``softmax_dtype=float64``.  On a CPU, torch's float32 log_softmax of 49,152 logits is too high by 8.5e-6 nats
per token (SmolLM2-135M, compared with float64), and lm-eval's numbers are off by this amount.  compare_q sums its
softmax differently.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from compare_q.eval.common.cache import Cache  # noqa: E402
from compare_q.eval.results import ModelResult  # noqa: E402
from compare_q.eval.run import runner  # noqa: E402
from compare_q.eval.run.run_config import local_config  # noqa: E402
from compare_q.eval.specs import spec_files  # noqa: E402
from compare_q.eval.text.corpus import TABLES  # noqa: E402
from compare_q.eval.text.text_tokens import detokenized  # noqa: E402

METRICS = ("word_perplexity", "byte_perplexity", "bits_per_byte")
TASK = {
    "task": "compare_q_text",
    "dataset_path": "json",
    "test_split": "test",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": name} for name in METRICS],
}
ITS_CODE = "!function lm_eval.tasks.wikitext.preprocess_wikitext"
WIKITEXT = {
    "doc_to_target": f"{ITS_CODE}.wikitext_detokenizer",
    "process_results": f"{ITS_CODE}.process_results",
}


def lm_eval(args: argparse.Namespace, folder: Path, softmax: str) -> dict[str, Any]:
    """lm-eval's results file for a task that is the text, made in ``folder``."""
    text, documents = args.text, folder / "documents.jsonl"
    lines = text.read_text(encoding="utf-8")
    documents.write_text(
        lines if text.suffix == ".jsonl" else json.dumps({"text": lines}), encoding="utf-8"
    )
    task = {
        **TASK,
        **(WIKITEXT if args.wikitext else {}),
        "dataset_kwargs": {"data_files": {"test": str(documents)}},
    }
    tagged = re.sub(r'"(!function [\w.]+)"', r"\1", json.dumps(task))
    (folder / "task.yaml").write_text(tagged, encoding="utf-8")  # JSON is YAML, except for the tags
    model = f"pretrained={args.model.resolve()},dtype=float32,softmax_dtype={softmax},max_length={args.max_length}"
    words = [
        *(
            *shlex.split(args.binary),
            "run",
            "--model",
            "hf",
            "--model_args",
            model,
            "--tasks",
            str(TASK["task"]),
        ),
        *("--include_path", str(folder), "--batch_size", "1", "--device", args.device),
        *("--output_path", str(folder / softmax), "--log_samples"),
    ]
    done = subprocess.run(
        words,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    files = sorted((folder / softmax).rglob("results_*.json"))
    if done.returncode or not files:
        sys.exit(f"{shlex.join(words)}: status {done.returncode}\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(files[-1].read_text(encoding="utf-8"))
    return found


def same_pages(folder: Path) -> int:
    """Return the number of pages that lm-eval logged; SystemExit if it rewrote a page differently
    from compare_q.
    """
    (log,) = sorted(folder.rglob("samples_*.jsonl"))
    samples = [json.loads(line) for line in log.read_text(encoding="utf-8").split("\n") if line]
    for sample in samples:
        if sample["target"] != detokenized(sample["doc"]["page"]):
            sys.exit(f"page {sample['doc_id']}: lm-eval rewrites it differently")
    return len(samples)


def compare_q(args: argparse.Namespace, folder: Path) -> ModelResult:
    """Return compare_q's row, computed as on the command line."""
    if args.text.suffix not in (".txt", *TABLES):
        sys.exit(f"--text: {args.text}: .jsonl or .txt")
    data = {
        "tokenizer_dir": str(args.model.resolve()),
        "dataset": "text",
        "path": str(args.text.resolve()),
        "method": "lm_eval",
        "eval_len": args.max_length,
        **({"text_column": "page", "detokenize": "wikitext"} if args.wikitext else {}),
    }
    model = {
        "load_fn": "transformers",
        "label": "model",
        "model_dir": str(args.model.resolve()),
        "engine": {"dtype": "float32"},
    }
    here = Path.cwd() / "spec.json"
    config = local_config(Cache(folder / "cache"))
    specs = (
        {"text": spec_files.parse_data_spec(data, here)},
        [spec_files.parse_model_spec(model, here)],
    )
    result = runner.run(config, *specs).results.models[0]
    if result.bits_per_byte is None:
        sys.exit(f"compare_q: {result.error or 'no rates: bytes and words are not known'}")
    return result


def kept(results: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of lm-eval's results file and their settings, without paths and machine."""
    scores = results["results"][TASK["task"]]
    names = ("lm_eval_version", "transformers_version")
    return {
        **{name: scores[f"{name},none"] for name in METRICS},
        **{name: results.get(name) for name in names},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--binary", default="lm-eval", help="its command, which may have several words"
    )
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of a Hugging Face model and its tokenizer"
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument(
        "--wikitext", action="store_true", help="the documents are pages, as in its task wikitext"
    )
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, help="the table as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tool, wide = (
            kept(lm_eval(args, Path(folder), softmax)) for softmax in ("float32", "float64")
        )
        ours = compare_q(args, Path(folder))
        if args.wikitext:
            print(f"{same_pages(Path(folder) / 'float64')} pages: rewritten to the same texts")
    rows = {name: (tool[name], wide[name], getattr(ours, name)) for name in METRICS}
    print(
        f"{'':16}{'lm-eval':>14}{'float64':>14}{'compare_q':>14}{'off lm-eval':>13}{'off float64':>13}"
    )
    for name, (a, b, c) in rows.items():
        print(f"{name:16}{a:14.8g}{b:14.8g}{c:14.8g}{c / a - 1:13.1e}{c / b - 1:13.1e}")
    if args.output:
        table = {
            "lm-eval": tool,
            "lm-eval, float64 softmax": wide,
            "compare_q": {name: rows[name][2] for name in METRICS},
        }
        args.output.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
