"""A 4-bit checkpoint by llm-compressor's GPTQ, so that not every 4-bit row of the table is rounded to nearest.

    pip install llmcompressor        # in a separate environment: it requires another Transformers
    python -m demo.h200.gptq OUT/models/bf16 OUT/models/gptq-w4a16-g128

Groups of 128, symmetric, 32 windows of 512 tokens from the end of the demo's text.
"""

from __future__ import annotations

import argparse
from pathlib import Path

WINDOWS, LENGTH = 32, 512


def main() -> None:
    """``python -m demo.h200.gptq SOURCE OUT``."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parser = argparse.ArgumentParser(description="Quantize a model to W4A16 by llm-compressor's GPTQ.")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--text", type=Path, default=Path(__file__).resolve().parents[2] / "eval" / "spec" / "opticks.txt"
    )
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.source)
    model = AutoModelForCausalLM.from_pretrained(arguments.source, dtype="bfloat16")
    tokens = tokenizer(arguments.text.read_text(encoding="utf-8"), verbose=False)["input_ids"][-WINDOWS * LENGTH :]
    rows = [tokens[i : i + LENGTH] for i in range(0, len(tokens), LENGTH)]
    data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * LENGTH for _ in rows]})
    recipe = GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"])
    oneshot(model=model, dataset=data, recipe=recipe, max_seq_length=LENGTH, num_calibration_samples=len(rows))
    model.save_pretrained(arguments.out, save_compressed=True)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()
