"""Remove each tensor of quantized toy models, one at a time, and run the rest in two engines.

    python -m benchmarks.missing_tensors OUT.json

The engines are vLLM and Transformers.  A row must be refused, or its scores must equal the intact
model's scores at every token; then the missing tensor is not needed.  Exit status 1 if a row was
scored with other numbers.  If an engine does not run a format on this machine, "intact" has the
reason.
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
    """Write a Llama of two layers in bf16 with random weights and a byte tokenizer."""
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
    """Write the checkpoint of ``source`` with random 4-bit weights in the layout of GPTQ or AWQ."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, out)
    is_gptq = method == "gptq"
    random = torch.Generator().manual_seed(0)
    tensors: dict[str, Any] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if "proj" not in name:
            tensors[name] = tensor.half()
            continue
        outputs, inputs = tensor.shape
        module = name.removesuffix(".weight")
        # An int32 holds eight values: GPTQ packs the rows of inputs, AWQ the columns of outputs.
        if is_gptq:
            words = (inputs // 8, outputs)
        else:
            words = (inputs, outputs // 8)
        tensors[f"{module}.qweight"] = torch.randint(
            -(2**31), 2**31 - 1, words, generator=random, dtype=torch.int32
        )
        # GPTQ stores a zero point minus 1: 7 is the 8 of symmetric weights.  For AWQ 7 is a zero
        # point as any other.
        tensors[f"{module}.qzeros"] = torch.full(
            (inputs // GROUP, outputs // 8), 0x77777777, dtype=torch.int32
        )
        tensors[f"{module}.scales"] = (
            torch.rand(inputs // GROUP, outputs, generator=random).half() / 40
        )
        if is_gptq:
            tensors[f"{module}.g_idx"] = torch.arange(inputs, dtype=torch.int32) // GROUP
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    quantization: dict[str, Any] = {"quant_method": method, "bits": 4, "group_size": GROUP}
    if is_gptq:
        quantization |= {"desc_act": False, "sym": True}
    else:
        quantization |= {"zero_point": True, "version": "gemm"}
    config["quantization_config"] = quantization
    (out / "config.json").write_text(json.dumps(config))


def checkpoints_without_a_tensor(
    scratch: Path, source: Path, engine: str, tensors: dict[str, Any]
) -> dict[str, Path]:
    """Write a copy of the checkpoint without each tensor; return tensor -> folder."""
    from safetensors.torch import save_file

    folders = {}
    for number, name in enumerate(tensors):
        folder = scratch / f"{source.name}-{engine}-{number}"
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        others = {key: tensor for key, tensor in tensors.items() if key != name}
        save_file(others, folder / "model.safetensors", {"format": "pt"})
        folders[name] = folder
    return folders


def outcomes_of(
    folders: dict[str, Path], engine: str, data: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Score the checkpoints; return (label -> log-probabilities, label -> why it was refused)."""
    import compare_q
    from compare_q.backends.common.errors import InputError

    scores: dict[str, Any] = {}
    refused: dict[str, str] = {}
    while True:
        specs = []
        for label, folder in folders.items():
            if label not in refused and label not in scores:
                specs.append({"load_fn": engine, "label": label, "model_dir": str(folder)})
        if not specs:
            return scores, refused
        try:
            comparison = compare_q.compare(data, specs)
        except InputError as error:
            # Refused before any model loads, one line for each; the others run in the next round.
            for line in str(error).splitlines():
                label, _, reason = line.partition(": ")
                refused[label] = reason
            continue
        for model in comparison.results.models:
            if model.error:
                refused[model.label] = model.error
            else:
                scores[model.label] = list(comparison.tokens(model.label)["logprob"])


def outcome_of(scratch: Path, source: Path, engine: str, data: dict[str, Any]) -> dict[str, Any]:
    """Return the outcome of one checkpoint in one engine, intact and without each tensor."""
    from safetensors.torch import load_file

    tensors = load_file(source / "model.safetensors")
    folders = {"intact": source}
    folders |= checkpoints_without_a_tensor(scratch, source, engine, tensors)
    scores, refused = outcomes_of(folders, engine, data)
    n_refused = 0
    equal = []
    wrong = []
    reasons: list[str] = []
    for label in tensors:
        if label in refused:
            n_refused += 1
            reason = refused[label].partition(": ")[2]
            if reason not in reasons:
                reasons.append(reason)
        if label in scores:
            if scores[label] == scores.get("intact"):
                equal.append(label)
            else:
                wrong.append(label)
    return {
        "tensors": len(tensors),
        "intact": refused.get("intact", "scored"),
        "refused": n_refused,
        "equal": equal,
        "wrong": wrong,
        "reasons": reasons[:4],
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
        base = make_base(scratch / "base")
        text = scratch / "text.txt"
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
            elif name == "W4A16":
                quantize(base, name, scratch / name, group_size=GROUP)
            else:
                quantize(base, name, scratch / name)
            for engine in ENGINES:
                title = f"{name} in {engine}"
                outcome = outcome_of(scratch, scratch / name, engine, data)
                runs[title] = outcome
                print(f"{title}: {json.dumps(outcome)[:400]}", flush=True)
                Path(sys.argv[1]).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    return int(any(run["wrong"] for run in runs.values()))


if __name__ == "__main__":
    sys.exit(main())
