"""Leave every tensor of quantized toys out, one at a time, and run what is left in vLLM and in Transformers.

    python -m benchmarks.missing_tensors OUT.json [--engines vllm_score transformers_auto_bf16] [--formats W4A16 ...]

A row must be refused, or its scores must equal those of the intact model at every token: what is missing changes
nothing then.  Exit status 1 if a row was scored with other numbers, or an intact model was refused.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

FORMATS = ("W4A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "NVFP4", "gptq", "awq")
GROUP = 32


def make_base(folder: Path) -> Path:
    """A Llama of two layers in bf16 with random weights and a byte tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from benchmarks.shapes import write_tokenizer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=300, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False, dtype="bfloat16",
        initializer_range=0.1, bos_token_id=256, eos_token_id=256,
    )  # fmt: skip
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
        tensors[f"{module}.qweight"] = torch.randint(-(2**31), 2**31 - 1, words, generator=random, dtype=torch.int32)
        tensors[f"{module}.qzeros"] = torch.full((inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32)
        tensors[f"{module}.scales"] = torch.rand(inputs // GROUP, outputs, generator=random).half() / 40
        if method == "gptq":
            tensors[f"{module}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // GROUP
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    own = {"desc_act": False, "sym": True} if method == "gptq" else {"zero_point": True, "version": "gemm"}
    config |= {
        "dtype": "float16",
        "quantization_config": {"quant_method": method, "bits": 4, "group_size": GROUP, **own},
    }
    (out / "config.json").write_text(json.dumps(config))


def without(source: Path, out: Path, tensors: dict[str, Any], name: str) -> Path:
    """A copy of a checkpoint without one tensor."""
    from safetensors.torch import save_file

    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(
        {key: tensor for key, tensor in tensors.items() if key != name}, out / "model.safetensors", {"format": "pt"}
    )
    return out


def tried(scratch: Path, source: Path, engine: str, data: dict[str, Any]) -> dict[str, Any]:
    """What became of each variant of one checkpoint in one engine."""
    from safetensors.torch import load_file

    import compare_q
    from compare_q.backends.common.errors import CompareQError

    tensors = load_file(source / "model.safetensors")
    folders = {"intact": source} | {
        name: without(source, scratch / f"{source.name}-{at}", tensors, name) for at, name in enumerate(tensors)
    }
    options = {"enforce_eager": True} if engine.startswith("vllm") else {}
    specs = [{"load_fn": engine, "label": label, "model_dir": str(folder), "engine": options}
             for label, folder in folders.items()]  # fmt: skip
    try:
        found = compare_q.compare(data, specs)
    except CompareQError as error:
        return {"tensors": len(tensors), "cannot run here": str(error).splitlines()[0], "wrong": []}
    rows = {model.label: model.error for text in found.results.texts for model in text.models}
    counts: dict[str, Any] = {"tensors": len(tensors), "refused": 0, "equal": [], "wrong": [], "intact": rows["intact"]}
    gold = None if rows["intact"] else found.tokens("intact")["logprob"].to_numpy()
    for label in tensors:
        if rows[label]:
            counts["refused"] += 1
            counts.setdefault("first_reason", rows[label])
        else:
            equal = gold is not None and (found.tokens(label)["logprob"].to_numpy() == gold).all()
            counts["equal" if equal else "wrong"].append(label)
    for label in tensors:
        shutil.rmtree(folders[label])
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--engines", nargs="+", default=["vllm_score", "transformers_auto_bf16"])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    options = parser.parse_args()
    from compare_q.backends.common import machine
    from demo.quantize import quantize

    found: dict[str, Any] = {
        "commit": machine.commit(),
        "versions": machine.versions(),
        "cpu": machine.cpu(),
        "runs": {},
    }
    wrong = False
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        base = make_base(scratch / "base")
        text = scratch / "text.txt"
        text.write_text("Pack my box with five dozen liquor jugs. " * 20, encoding="utf-8")
        data = {"tokenizer_dir": str(base), "dataset": "text", "path": str(text), "eval_len": 128, "eval_stride": 128,
                "max_rows": 2}  # fmt: skip
        for name in options.formats:
            if name in ("gptq", "awq"):
                packed_integers(base, scratch / name, name)
            else:
                quantize(base, name, scratch / name, group_size=GROUP)
            for engine in options.engines:
                found["runs"][f"{name} in {engine}"] = counts = tried(scratch, scratch / name, engine, data)
                wrong = wrong or bool(counts["wrong"])
                print(f"{name} in {engine}: {json.dumps(counts)[:600]}", flush=True)
                options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
