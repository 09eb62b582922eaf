"""Checkpoints of a given shape with random weights: bf16, and the same weights quantized.

    python -m benchmarks.shapes OUT --shape llama-8b --formats bf16 fp8 w4a16

For an engine, random weights take the same time as trained ones, and need no download.  Matrices
are normal with the standard deviation of Llama's initialization (0.02 at a hidden size of 4,096).
Matrices that write to the residual stream are divided by the root of their number.  The head is
scaled so that logits have a standard deviation of 2.5: changes by quantization then stay small and
are visible in KLD.  Decoder layers are made one at a time, on a GPU if the machine has one, and
quantized with ``demo/quantize.py``'s arithmetic.  They are written in parallel while the next ones
are made.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

LOGITS_STD = 2.5
SHARD_BYTES = 5_000_000_000
PRESETS: dict[str, str | None] = {
    "bf16": None,
    "fp8": "FP8_DYNAMIC",
    "w4a16": "W4A16",
    "nvfp4a16": "NVFP4A16",
}
"""Format -> preset of compressed-tensors; W4A16 has groups of 128."""


@dataclass(frozen=True)
class Shape:
    """A Llama's sizes; ``context`` is the longest window."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    context: int

    def config(self) -> dict[str, Any]:
        """Keys of config.json."""
        return {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
            # The special token of the byte tokenizer (write_tokenizer).
            "bos_token_id": 256,
            "eos_token_id": 256,
            "dtype": "bfloat16",
            "architectures": ["LlamaForCausalLM"],
        }

    def matrices(self) -> dict[str, tuple[int, int]]:
        """Return name -> (rows, columns) of a decoder layer's matrices."""
        kv_rows = self.hidden // self.heads * self.kv_heads
        return {
            "self_attn.q_proj": (self.hidden, self.hidden),
            "self_attn.k_proj": (kv_rows, self.hidden),
            "self_attn.v_proj": (kv_rows, self.hidden),
            "self_attn.o_proj": (self.hidden, self.hidden),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }


SHAPES = {
    "llama-8b": Shape(4096, 32, 32, 8, 14336, 128_256, 131_072),
    "toy": Shape(256, 2, 4, 2, 512, 49_152, 4096),
}


@dataclass
class Shards:
    """The safetensors files of one checkpoint, written by a pool while tensors still come."""

    folder: Path
    pool: ThreadPoolExecutor
    waiting: dict[str, Any] = field(default_factory=dict)
    written: list[tuple[Path, list[str], Future[None]]] = field(default_factory=list)
    total: int = 0

    def add(self, tensors: dict[str, Any]) -> None:
        """Take tensors of any device."""
        for name, tensor in tensors.items():
            n_bytes = sum(waiting.nbytes for waiting in self.waiting.values())
            if self.waiting and n_bytes + tensor.nbytes > SHARD_BYTES:
                self.flush()
            # On a GPU only one layer is kept at a time.
            self.waiting[name] = tensor.detach().cpu().contiguous()
            self.total += tensor.nbytes

    def flush(self) -> None:
        """Start writing the waiting tensors."""
        from safetensors.torch import save_file

        # Final names contain the number of files, which is not known before close().
        file = self.folder / f"part-{len(self.written)}.safetensors"
        tensors = self.waiting
        self.waiting = {}
        writing = self.pool.submit(save_file, tensors, file, {"format": "pt"})
        self.written.append((file, list(tensors), writing))

    def close(self) -> None:
        """Wait for the files, and rename them as Transformers names them."""
        self.flush()
        file_of_tensor: dict[str, str] = {}
        count = len(self.written)
        for number, (file, names, writing) in enumerate(self.written, 1):
            writing.result()
            final_name = "model.safetensors"
            if count > 1:
                final_name = f"model-{number:05}-of-{count:05}.safetensors"
            file.rename(self.folder / final_name)
            file_of_tensor |= dict.fromkeys(names, final_name)
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": file_of_tensor}
            index_file = self.folder / "model.safetensors.index.json"
            index_file.write_text(json.dumps(index, indent=1), encoding="utf-8")


def random_matrix(rows: int, columns: int, std: float, generator: Any) -> Any:
    """Return normal weights, bf16 [rows, columns], on the generator's device."""
    import torch

    weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=generator.device)
    return weight.normal_(0.0, std, generator=generator)


def decoder_layers(shape: Shape, generator: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield (matrices, norms) by their full names, one decoder layer at a time."""
    import torch

    # 0.02 at a hidden size of 4,096, as Llama is initialized.
    std = 1.28 / math.sqrt(shape.hidden)
    std_of_residual = std / math.sqrt(2 * shape.layers)
    for number in range(shape.layers):
        prefix = f"model.layers.{number}"
        matrices = {}
        for name, (rows, columns) in shape.matrices().items():
            matrix_std = std
            if name.endswith(("o_proj", "down_proj")):
                matrix_std = std_of_residual
            weight = random_matrix(rows, columns, matrix_std, generator)
            matrices[f"{prefix}.{name}.weight"] = weight
        norms = {}
        for name in ("input_layernorm", "post_attention_layernorm"):
            norms[f"{prefix}.{name}.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)
        yield matrices, norms


def outer_tensors(shape: Shape, generator: Any) -> dict[str, Any]:
    """Return the embedding, the last norm and the head, which no format quantizes."""
    import torch

    # The last norm gives its output a root mean square of 1.
    head_std = LOGITS_STD / math.sqrt(shape.hidden)
    # In this order, since both take the numbers of one generator.
    embedding = random_matrix(shape.vocabulary, shape.hidden, 1.0, generator)
    head = random_matrix(shape.vocabulary, shape.hidden, head_std, generator)
    return {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(shape.hidden, dtype=torch.bfloat16),
        "lm_head.weight": head,
    }


def quantized(matrices: dict[str, Any], scheme: Any) -> dict[str, Any]:
    """Return the tensors that compressed-tensors stores for these matrices, by their full names."""
    import torch
    from compressed_tensors.compressors import compress_module
    from compressed_tensors.quantization.lifecycle.initialize import (
        initialize_module_for_quantization,
    )

    from demo.quantize import set_scales

    layers = {}
    for name, weight in matrices.items():
        # On "meta" no weights are made, which would be replaced at once.
        layer = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        initialize_module_for_quantization(layer, scheme.model_copy(deep=True))
        layers[name.removesuffix(".weight")] = layer
    set_scales(layers)
    tensors: dict[str, Any] = {}
    for name, layer in layers.items():
        compress_module(layer)
        for part, tensor in layer.state_dict().items():
            tensors[f"{name}.{part}"] = tensor
    return tensors


def write_config(folder: Path, shape: Shape, scheme: Any) -> None:
    """Write config.json as Transformers and compressed-tensors do."""
    from transformers import LlamaConfig

    LlamaConfig(**shape.config()).save_pretrained(folder)
    if scheme is None:
        return
    import torch
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    scheme.format = infer_module_format(torch.nn.Linear, scheme)
    config = QuantizationConfig(
        config_groups={"group_0": scheme},
        ignore=["lm_head"],
        format=scheme.format.value,
        quantization_status=QuantizationStatus.COMPRESSED,
    )
    ModelCompressor(config).update_config(str(folder))


def write_tokenizer(folder: Path, **config: str) -> None:
    """Write a tokenizer of one token per byte, ids 0 to 255, and one special token, 256."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")


def make(
    out: Path, shape: Shape, formats: Sequence[str] = ("bf16",), seed: int = 0
) -> dict[str, Path]:
    """Write one checkpoint per format, all of the same random weights, as ``out/FORMAT``.

    Returns format -> folder.  FileExistsError if a folder exists.
    """
    import torch
    from compressed_tensors.quantization import preset_name_to_scheme

    schemes: dict[str, Any] = {}
    for name in formats:
        preset = PRESETS[name]
        schemes[name] = None
        if preset:
            schemes[name] = preset_name_to_scheme(preset, ["Linear"])
    device = "cpu"
    if torch.cuda.is_available():
        device = "cuda"
    generator = torch.Generator(device).manual_seed(seed)
    folders = {name: out / name for name in formats}
    with ThreadPoolExecutor() as pool, torch.inference_mode():
        shards = {}
        for name, folder in folders.items():
            folder.mkdir(parents=True)
            shards[name] = Shards(folder, pool)
            write_tokenizer(folder)
        for matrices, norms in decoder_layers(shape, generator):
            for name, files in shards.items():
                tensors = matrices
                if schemes[name]:
                    tensors = quantized(matrices, schemes[name])
                files.add({**tensors, **norms})
        outer = outer_tensors(shape, generator)
        for name, files in shards.items():
            files.add(outer)
            files.close()
            write_config(folders[name], shape, schemes[name])
            print(f"{folders[name]}: {files.total / 1e9:.2f} GB", flush=True)
    return folders


def make_apart(*arguments: Any) -> None:
    """Run ``make`` in a separate process.

    A process that has used a GPU keeps some of the GPU's memory.
    """
    process = multiprocessing.get_context("spawn").Process(target=make, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        raise ChildProcessError(f"no models were made: exit status {process.exitcode}")


def add_shape(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags that choose a shape."""
    parser.add_argument(
        "--shape", choices=list(SHAPES), default=default, help="default: %(default)s"
    )
    for field_of_shape in fields(Shape):
        flag = "--" + field_of_shape.name.replace("_", "-")
        words = field_of_shape.name.replace("_", " ")
        parser.add_argument(flag, type=int, metavar="N", help=f"replaces the shape's {words}")


def shape_of(arguments: argparse.Namespace) -> Shape:
    """Return the shape that the flags of ``add_shape`` choose."""
    changes = {}
    for field_of_shape in fields(Shape):
        value = getattr(arguments, field_of_shape.name)
        if value is not None:
            changes[field_of_shape.name] = value
    return replace(SHAPES[arguments.shape], **changes)


def main(words: Sequence[str]) -> int:
    """Run ``python -m benchmarks.shapes OUT``; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shapes", description="Make checkpoints of a shape."
    )
    parser.add_argument("out", type=Path, help="folder in which each format gets a folder")
    parser.add_argument(
        "--formats", nargs="+", choices=list(PRESETS), default=["bf16", "fp8", "w4a16"]
    )
    add_shape(parser, "llama-8b")
    arguments = parser.parse_args(words)
    shape = shape_of(arguments)
    began = time.perf_counter()
    if shape.hidden % shape.heads or shape.heads % shape.kv_heads or shape.vocabulary < 257:
        parser.error(
            "heads must divide hidden, kv heads must divide heads, and the byte tokens need 257 "
            "entries"
        )
    try:
        make(arguments.out, shape, arguments.formats)
    except FileExistsError as error:
        parser.error(f"{error.filename}: already exists; remove it or name another folder")
    print(f"made in {time.perf_counter() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
