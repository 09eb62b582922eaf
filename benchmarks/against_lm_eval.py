"""Compare method "lm_eval" with an installed lm-eval: the perplexities of one text.

    python benchmarks/against_lm_eval.py --binary lm-eval --model FOLDER --text documents.jsonl \\
        --max-length 1024 --output table.json

Word perplexity, byte perplexity and bits per byte are compared.  ``--text``: JSON lines with one
document per line in ``text``, or a plain text file, which is one document.  With ``--wikitext``
each line has a page of WikiText in ``page`` (for example of WikiText-2).  lm-eval then scores and
counts the page by the functions of its task ``wikitext``.  It logs the rewritten pages, which must
equal compare_q's character for character.  lm-eval may be installed in another environment than
compare_q.

Both tools run the model in float32 through Transformers, one window at a time.  lm-eval runs twice:
with its defaults, and with ``softmax_dtype=float64``.  On a CPU, torch's float32 log_softmax of
49,152 logits is too high by 8.5e-6 nats per token (SmolLM2-135M, compared with float64), and
lm-eval's numbers are off by this amount.  compare_q sums its softmax differently.
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
WIKITEXT_CODE = "!function lm_eval.tasks.wikitext.preprocess_wikitext"
WIKITEXT = {
    "doc_to_target": f"{WIKITEXT_CODE}.wikitext_detokenizer",
    "process_results": f"{WIKITEXT_CODE}.process_results",
}


def lm_eval(args: argparse.Namespace, folder: Path, softmax: str) -> dict[str, Any]:
    """Return lm-eval's results file for a task that is the text, made in ``folder``."""
    write_task(args, folder)
    model_arguments = [
        f"pretrained={args.model.resolve()}",
        "dtype=float32",
        f"softmax_dtype={softmax}",
        f"max_length={args.max_length}",
    ]
    words = [*shlex.split(args.binary), "run", "--model", "hf"]
    words += ["--model_args", ",".join(model_arguments), "--tasks", str(TASK["task"])]
    words += ["--include_path", str(folder), "--batch_size", "1", "--device", args.device]
    words += ["--output_path", str(folder / softmax), "--log_samples"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    files = sorted((folder / softmax).rglob("results_*.json"))
    if process.returncode or not files:
        sys.exit(f"{shlex.join(words)}: status {process.returncode}\n{process.stderr[-3000:]}")
    results: dict[str, Any] = json.loads(files[-1].read_text(encoding="utf-8"))
    return results


def write_task(args: argparse.Namespace, folder: Path) -> None:
    """Write the text as documents, and the task that scores them."""
    documents = folder / "documents.jsonl"
    content = args.text.read_text(encoding="utf-8")
    if args.text.suffix != ".jsonl":
        content = json.dumps({"text": content})
    documents.write_text(content, encoding="utf-8")
    task: dict[str, Any] = dict(TASK)
    if args.wikitext:
        task |= WIKITEXT
    task["dataset_kwargs"] = {"data_files": {"test": str(documents)}}
    # JSON is YAML, except for the tags, which have no quotes.
    tagged = re.sub(r'"(!function [\w.]+)"', r"\1", json.dumps(task))
    (folder / "task.yaml").write_text(tagged, encoding="utf-8")


def same_pages(folder: Path) -> int:
    """Return the number of pages that lm-eval logged.

    SystemExit if it rewrote a page differently from compare_q.
    """
    (log,) = sorted(folder.rglob("samples_*.jsonl"))
    n_pages = 0
    # A page may have line breaks of Unicode, which are not escaped in JSON.
    for line in log.read_text(encoding="utf-8").split("\n"):
        if not line:
            continue
        sample = json.loads(line)
        if sample["target"] != detokenized(sample["doc"]["page"]):
            sys.exit(f"page {sample['doc_id']}: lm-eval rewrites it differently")
        n_pages += 1
    return n_pages


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
    }
    if args.wikitext:
        data |= {"text_column": "page", "detokenize": "wikitext"}
    model = {
        "load_fn": "transformers",
        "label": "model",
        "model_dir": str(args.model.resolve()),
        "engine": {"dtype": "float32"},
    }
    place = Path.cwd() / "spec.json"
    config = local_config(Cache(folder / "cache"))
    texts = {"text": spec_files.parse_data_spec(data, place)}
    outcome = runner.run(config, texts, [spec_files.parse_model_spec(model, place)])
    row = outcome.results.models[0]
    if row.bits_per_byte is None:
        sys.exit(f"compare_q: {row.error or 'no rates: bytes and words are not known'}")
    return row


def numbers_of(results: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of lm-eval's results file and its versions, without paths and machine."""
    scores = results["results"][TASK["task"]]
    numbers = {name: scores[f"{name},none"] for name in METRICS}
    for name in ("lm_eval_version", "transformers_version"):
        numbers[name] = results.get(name)
    return numbers


def parsed() -> argparse.Namespace:
    """Return the flags."""
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
    return parser.parse_args()


def main() -> None:
    """Run both tools and print their numbers next to each other."""
    args = parsed()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        tool = numbers_of(lm_eval(args, folder, "float32"))
        wide = numbers_of(lm_eval(args, folder, "float64"))
        row = compare_q(args, folder)
        if args.wikitext:
            print(f"{same_pages(folder / 'float64')} pages: rewritten to the same texts")
    ours = {name: getattr(row, name) for name in METRICS}
    titles = f"{'':16}{'lm-eval':>14}{'float64':>14}{'compare_q':>14}"
    print(f"{titles}{'off lm-eval':>13}{'off float64':>13}")
    for name in METRICS:
        numbers = f"{tool[name]:14.8g}{wide[name]:14.8g}{ours[name]:14.8g}"
        off_tool = ours[name] / tool[name] - 1
        off_wide = ours[name] / wide[name] - 1
        print(f"{name:16}{numbers}{off_tool:13.1e}{off_wide:13.1e}")
    if args.output:
        table = {"lm-eval": tool, "lm-eval, float64 softmax": wide, "compare_q": ours}
        args.output.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
