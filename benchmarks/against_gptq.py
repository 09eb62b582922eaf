"""compare_q's method "gptq" beside GPTQ's own evaluation, written down again with plain Transformers in float64.

    python benchmarks/against_gptq.py --model FOLDER --text rows.jsonl --seqlen 2048 --windows 4 --output table.json

``--text``: JSON lines with a row in ``text`` each, blank ones too (``benchmarks/wikitext_rows.py`` makes the rows of
WikiText-2), or a plain text file.  Nothing of compare_q takes part in the first line: the rows are read and joined
here, the tokenizer is called as GPTQ calls it, the model runs in float64 with eager attention, and the loss of each
window is torch's cross-entropy, times ``seqlen``, summed and divided by ``windows * seqlen``, as GPTQ's ``llama.py``
has it.  compare_q runs the same files in float32 and in the model's own dtype, by the way of its command line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from compare_q.eval.common.cache import Cache  # noqa: E402
from compare_q.eval.common.progress import Progress  # noqa: E402
from compare_q.eval.run import hosts, runner  # noqa: E402
from compare_q.eval.run.hosts import Session  # noqa: E402
from compare_q.eval.specs import reading  # noqa: E402

ENGINES: dict[str, dict[str, Any]] = {"float32": {"dtype": "float32"}, "own dtype": {}}


def joined(file: Path) -> str:
    """``"\\n\\n".join(rows)`` of every row, or the whole of a plain file."""
    content = file.read_text(encoding="utf-8")
    if file.suffix != ".jsonl":
        return content
    return "\n\n".join(json.loads(line)["text"] for line in content.split("\n") if line.strip())


@torch.inference_mode()
def gptq(model_dir: Path, text: str, seqlen: int, windows: int) -> dict[str, Any]:
    """GPTQ's perplexity in float64: of each window, and of all."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_dir)
    ids = tokenizer(text, return_tensors="pt").input_ids
    whole = ids.numel() // seqlen
    samples = min(whole, windows or whole)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float64, attn_implementation="eager"
    ).eval()
    losses = []
    for i in range(samples):
        batch = ids[:, i * seqlen : (i + 1) * seqlen]
        logits = model(batch, use_cache=False).logits
        if logits.dtype != torch.float64:
            sys.exit(f"--model: its logits are {logits.dtype} though it was loaded in float64")
        loss = torch.nn.functional.cross_entropy(logits[0, :-1], batch[0, 1:])
        losses.append(float(loss))
        print(f"window {i + 1} of {samples}: {torch.tensor(losses[-1]).exp():.6f}", file=sys.stderr, flush=True)
    total = torch.tensor([loss * seqlen for loss in losses], dtype=torch.float64).sum()
    perplexity = float(torch.exp(total / (samples * seqlen)))
    return {"tokens": ids.numel(), "windows_in_all": whole, "windows": samples, "losses": losses, "ppl": perplexity}


def compare_q(args: argparse.Namespace, folder: Path, engine: dict[str, Any]) -> tuple[dict[str, Any], float]:
    """Tokens and windows that compare_q scored, and its perplexity, run as its command line would."""
    data = {"tokenizer_dir": str(args.model.resolve()), "dataset": "text", "path": str(args.text.resolve()),
            "method": "gptq", "eval_len": args.seqlen}  # fmt: skip
    model = {"load_fn": "transformers", "label": "model", "model_dir": str(args.model.resolve()), "engine": engine}
    here = Path.cwd() / "spec.json"
    session = Session(Cache(folder / "cache"), Progress(), hosts=hosts.of_this_machine()[0])
    specs = {"text": reading.parse_data_spec(data, here)}, [reading.parse_model_spec(model, here)]
    (result,) = runner.run(session, *specs, args.windows).results.texts
    (scored,) = result.models
    if scored.estimates is None or scored.estimates.ppl.value is None:
        sys.exit(f"compare_q: {scored.error or 'no perplexity'}")
    return {key: result.data[key] for key in ("text_tokens", "windows", "scored_tokens")}, scored.estimates.ppl.value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face model and its tokenizer")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--seqlen", type=int, default=2048)
    parser.add_argument("--windows", type=int, default=0, help="only the first; 0: all")
    parser.add_argument("--output", type=Path, help="the table as JSON")
    args = parser.parse_args()
    table: dict[str, Any] = {"GPTQ in float64": gptq(args.model, joined(args.text), args.seqlen, args.windows)}
    gold = table["GPTQ in float64"]["ppl"]
    print(f"{'GPTQ in float64':24}{gold:12.7f}")
    for name, engine in ENGINES.items():
        with tempfile.TemporaryDirectory() as folder:
            seen, perplexity = compare_q(args, Path(folder), engine)
        print(f"{f'compare_q, {name}':24}{perplexity:12.7f}{perplexity / gold - 1:10.1e}")
        table[f"compare_q, {name}"] = {**seen, "ppl": perplexity}
    if args.output:
        args.output.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
