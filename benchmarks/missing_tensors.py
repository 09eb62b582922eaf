"""Remove each tensor of quantized toy models, one at a time, and run the rest in vLLM and in
Transformers.

    python -m benchmarks.missing_tensors OUT.json

A row must be refused, or its scores must equal the intact model's scores at every token; then the
missing tensor is not needed.  Exit status 1 if a row was scored with other numbers.  If an engine
does not run a format on this machine, "intact" has the reason.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FORMATS = ("W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "NVFP4", "gptq", "awq")
ENGINES = ("vllm_score", "transformers_auto_bf16")
GROUP = 32


def make_base(folder: Path) -> Path:
    """A Llama of two layers in bf16 with random weights and a byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.shapes import write_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        dtype="bfloat16",
        initializer_range=0.1,
        bos_token_id=256,
        eos_token_id=256,
    )
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def packed_integers(source: Path, out: Path, method: str) -> None:
    """The checkpoint of ``source`` with random 4-bit weights in the layout of GPTQ or AWQ."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, out)
    random, tensors = torch.Generator().manual_seed(0), dict[str, Any]()
    for name, tensor in load_file(source / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = tensor.half()
            continue
        (outputs, inputs), module = tensor.shape, name.removesuffix(".weight")
        words = (inputs // 8, outputs) if method == "gptq" else (inputs, outputs // 8)
        tensors[f"{module}.qweight"] = torch.randint(
            -(2**31), 2**31 - 1, words, generator=random, dtype=torch.int32
        )
        tensors[f"{module}.qzeros"] = torch.full(
            (inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32
        )
        tensors[f"{module}.scales"] = (
            torch.rand(inputs // GROUP, outputs, generator=random).half() / 40
        )
        if method == "gptq":
            tensors[f"{module}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // GROUP
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    own = (
        {"desc_act": False, "sym": True}
        if method == "gptq"
        else {"zero_point": True, "version": "gemm"}
    )
    config["quantization_config"] = {"quant_method": method, "bits": 4, "group_size": GROUP, **own}
    (out / "config.json").write_text(json.dumps(config))


def tried(scratch: Path, source: Path, engine: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of each variant of one checkpoint in one engine."""
    from safetensors.torch import load_file, save_file

    import compare_q
    from compare_q.backends.common.errors import InputError

    tensors, folders, refused = (
        load_file(source / "model.safetensors"),
        {"intact": source},
        dict[str, str](),
    )
    for at, name in enumerate(tensors):
        folders[name] = scratch / f"{source.name}-{engine}-{at}"
        shutil.copytree(source, folders[name], ignore=shutil.ignore_patterns("*.safetensors"))
        kept = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(kept, folders[name] / "model.safetensors", {"format": "pt"})
    scores: dict[str, Any] = {}
    while left := [label for label in folders if label not in refused and label not in scores]:
        specs = [
            {"load_fn": engine, "label": label, "model_dir": str(folders[label])} for label in left
        ]
        try:
            found = compare_q.compare(data, specs)
        except InputError as error:  # refused before any model loads, one line for each
            refused |= {
                line.partition(": ")[0]: line.partition(": ")[2] for line in str(error).splitlines()
            }
            continue
        rows = {model.label: model.error for model in found.results.models}
        refused |= {label: error for label, error in rows.items() if error}
        scores |= {
            label: list(found.tokens(label)["logprob"])
            for label, error in rows.items()
            if not error
        }
    same = {label: label in scores and scores[label] == scores.get("intact") for label in tensors}
    return {
        "tensors": len(tensors),
        "intact": refused.get("intact", "scored"),
        "refused": sum(label in refused for label in tensors),
        "equal": [label for label in same if same[label]],
        "wrong": [label for label in tensors if label in scores and not same[label]],
        "reasons": list(
            dict.fromkeys(
                refused[label].partition(": ")[2] for label in tensors if label in refused
            )
        )[:4],
    }


def main() -> int:
    """Write the outcome of every format in every engine; return the exit status."""
    from compare_q.backends.common import machine
    from demo.quantize import quantize

    runs: dict[str, Any] = {}
    facts = {
        "commit": machine.commit(),
        "versions": machine.versions(),
        "cpu": machine.cpu(),
        "runs": runs,
    }
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        base, text = make_base(scratch / "base"), scratch / "text.txt"
        text.write_text("Pack my box with five dozen liquor jugs. " * 20, encoding="utf-8")
        data = {
            "tokenizer_dir": str(base),
            "dataset": "text",
            "path": str(text),
            "eval_len": 128,
            "eval_stride": 128,
            "max_rows": 2,
        }
        for name in FORMATS:
            if name in ("gptq", "awq"):
                packed_integers(base, scratch / name, name)
            else:
                quantize(base, name, scratch / name, group_size=GROUP if name == "W4A16" else None)
            for engine in ENGINES:
                runs[f"{name} in {engine}"] = tried(scratch, scratch / name, engine, data)
                print(
                    f"{name} in {engine}: {json.dumps(runs[f'{name} in {engine}'])[:400]}",
                    flush=True,
                )
                Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return int(any(run["wrong"] for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
