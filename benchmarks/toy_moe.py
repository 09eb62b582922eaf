"""A toy mixture of experts in NVFP4, MXFP4 and FP8 blocks: what vLLM runs of it, beside the same weights dequantized.

    python -m benchmarks.toy_moe OUT [--windows 8] [--dtype float32]

OUT gets the checkpoints (a few MB), a cache, a results.json for each format, and ``toy_moe.json``: kernels, KV cache,
PPL, and KLD of every row against Transformers in float32 on the dequantized weights.  Rows called "dequantized" are
those weights in vLLM, and so the noise floors: weight-only rows belong near them, and what is above them in the other
rows is rounded activations and KV cache.  A row that this machine cannot run has vLLM's reason.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import toy_moe_files
from compare_q.backends.base import LoadRequest
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError
from compare_q.backends.layers.groups import groups_to_json
from compare_q.backends.vllm.engine import VllmEngine
from compare_q.eval.api import Comparison, compare

TEXT = Path(__file__).resolve().parent.parent / "eval" / "spec" / "opticks.txt"
TOKENS = 512
NO_FLOAT32 = ("nvfp4-modelopt", "fp8")
"""Checkpoints that vLLM refuses to run in float32."""
OPTIONS: dict[str, dict[str, Any]] = {
    "nvfp4-w4a16": {"kv_cache_dtype": "fp8"},
    "nvfp4-w4a4": {"emulate": True},
    "nvfp4-modelopt-kv8": {"kv_cache_dtype": "bfloat16"},
    "mxfp4-w4a4": {"emulate": True},
}
"""Checkpoint -> option with which it is scored once more."""


def models(folders: dict[str, Path], weights: str, dtype: str) -> list[dict[str, Any]]:
    """Model specs of all rows with these weights: Transformers as the reference, the noise floors, the formats."""
    plain = str(folders[f"{weights}-dequantized"])
    dtypes = {name: "bfloat16" if name.startswith(NO_FLOAT32) else dtype for name in toy_moe_files.FORMATS[weights]}
    found: list[dict[str, Any]] = [
        {"load_fn": "transformers", "label": "Transformers", "model_dir": plain, "engine": {"dtype": "float32"},
         "reference": True},
    ]  # fmt: skip
    for name in sorted(set(dtypes.values())):
        row = {"load_fn": "vllm_score", "label": f"dequantized, {name}", "model_dir": plain, "engine": {"dtype": name}}
        found.append(row)
    for name, own in dtypes.items():
        row = {"load_fn": "vllm_score", "label": name, "model_dir": str(folders[name]), "engine": {"dtype": own}}
        found.append(row)
        for option, value in OPTIONS.get(name, {}).items():
            engine = {"dtype": own, option: value}
            found.append(row | {"label": f"{name}, {option} {json.dumps(value)}", "engine": engine})
    return found


def refused(spec: dict[str, Any]) -> str:
    """Why compare_q refuses a model before anything loads; "" if it does not."""
    if spec["load_fn"] != "vllm_score":
        return ""
    request = LoadRequest(spec["label"], spec["load_fn"], spec["model_dir"], TOKENS, spec["engine"])
    try:
        VllmEngine.check(request)
    except InputError as error:
        return str(error)
    return ""


def rows_of(comparison: Comparison) -> list[dict[str, Any]]:
    """What is kept of each row: numbers, what ran, or the reason of its failure."""
    frame = json.loads(comparison.frame().to_json(orient="records", double_precision=15))
    keys = ("label", "kernel", "deviations", "bpw_layer", "ppl", "kld", "kld_stderr", "same_top", "error", "notes")
    return [
        {key: row[key] for key in keys}
        | {"layers": groups_to_json(model.layers), "kv_cache": model.provenance.get("kv_cache_layers")}
        for row, model in zip(frame, comparison.results.texts[0].models, strict=True)
    ]


def main(words: Sequence[str]) -> int:
    """``python -m benchmarks.toy_moe OUT``; the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.toy_moe", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("out", type=Path, help="folder for checkpoints and results")
    parser.add_argument("--windows", type=int, default=8, help=f"of {TOKENS} tokens; default: %(default)s")
    formats = list(toy_moe_files.FORMATS)
    parser.add_argument("--formats", nargs="+", choices=formats, default=formats, help="default: all")
    parser.add_argument("--dtype", default=None, help="of vLLM; default: bfloat16 on a GPU, float32 on a CPU")
    arguments = parser.parse_args(words)
    out, gpus = arguments.out.resolve(), machine.gpus()
    dtype = arguments.dtype or ("bfloat16" if gpus else "float32")
    folders = toy_moe_files.make(out / "models")
    found: dict[str, Any] = {
        "commit": machine.commit(), "gpus": [str(each) for each in gpus], "cpu": machine.cpu(),
        "versions": VllmEngine.versions(), "dtype": dtype, "shape": asdict(toy_moe_files.SHAPE), "formats": {},
    }  # fmt: skip
    for weights in arguments.formats:
        specs = models(folders, weights, dtype)
        reasons = {spec["label"]: refused(spec) for spec in specs}
        data = {"tokenizer_dir": specs[0]["model_dir"], "dataset": "text", "path": str(TEXT), "eval_len": TOKENS,
                "eval_stride": TOKENS, "max_rows": arguments.windows}  # fmt: skip
        accepted = [spec for spec in specs if not reasons[spec["label"]]]
        comparison = compare(data, accepted, cache_dir=out / "cache")
        assert isinstance(comparison, Comparison)
        comparison.save(out / f"{weights}.json")
        refusals = [{"label": label, "refused": reason} for label, reason in reasons.items() if reason]
        found["formats"][weights] = rows_of(comparison) + refusals
        text = json.dumps(found, indent=1).replace(f"{out}/", "")
        (out / "toy_moe.json").write_text(text + "\n", encoding="utf-8")
        for row in found["formats"][weights]:
            print(json.dumps({key: value for key, value in row.items() if key not in ("layers", "kv_cache")}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
