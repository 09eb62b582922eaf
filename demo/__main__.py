"""``make demo``: make the models once, then run compare_q on them exactly as a user would.

``python -m demo --all``: GGUF in llama.cpp as well.  ``python -m demo PRESET ...``: only make these
checkpoints.

If the CPU has no arithmetic for bf16, the models compute in float32, and their labels show it.
With AVX2 alone, four windows of the bf16 model took 80.8 s in bf16 and 17.9 s in float32; the KLD
between the two is 0.0010.  Where vLLM has no kernel for a model, Transformers runs it, as in a run
that names no engine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from compare_q import backends
from compare_q.backends.checkpoint.checkpoint_config import CheckpointConfig
from compare_q.backends.common import machine
from demo.recipes import (
    BASE,
    HERE,
    MODELS,
    ROOT,
    make_checkpoint,
    make_gguf,
    make_models,
    make_once,
)

__all__ = ["BASE", "MODELS", "ROOT", "make_models"]

RESULTS = HERE / "results"
SPECS = "eval/spec"
MODEL_SPECS = [
    f"{SPECS}/demo_vllm_bf16.json",
    f"{SPECS}/demo_transformers.json",
    f"{SPECS}/demo_vllm.json",
]
"""The models by engine: the reference, those that Transformers runs, and the quantized ones that
vLLM runs."""
GGUF_SPEC = f"{SPECS}/demo_gguf.json"
OWN_MODELS = """
Compare your own models: the first is the reference, and each is a folder, a hub id, a .gguf file \
or a server's address.
$ source {environment}/bin/activate
$ compare-q BF16 QUANTIZED ... -p --html report.html"""
ONLY_BF16 = "nvfp4"
"""Format that Transformers dequantizes to bf16 only."""
FLOAT32_WINDOWS = 8
"""Windows of the text's 16 to score in float32, at a fifth of the speed of real bf16; the table
takes minutes."""


def command(*, everything: bool, float32: bool = False) -> list[str]:
    """Return the command line of the demo.

    ``everything``: with GGUF; ``float32``: the models compute in float32.
    """
    words = ["eval/compare_q.py", "-d", f"{SPECS}/demo_text.json"]
    words += ["-m", *specs_here(RESULTS, float32=float32)]
    if everything:
        words.append(GGUF_SPEC)
    if float32:
        words += ["-r", str(FLOAT32_WINDOWS)]
    words += ["-p", "-pf", "demo/results/plot.png", "--html", "demo/results/report.html"]
    words += ["-o", "demo/results/results.json", "-t", "SmolLM2-135M, round-to-nearest"]
    return words


def emulates_bf16() -> bool:
    """Return True if the models would run on a CPU without arithmetic for bf16."""
    if not machine.emulates_bf16():
        return False
    return machine.cpu_build_of_torch() or not machine.installed_gpus()


def specs_here(folder: Path, *, float32: bool) -> list[str]:
    """Return the files of the models' specs.

    Those that must change on this machine are copies in a folder.  ``float32``: the models compute
    in float32, and their labels show it.
    """
    files = []
    for name in MODEL_SPECS:
        place = (ROOT / name).parent
        original = json.loads((ROOT / name).read_text())
        models = [model_here(model, place, float32=float32) for model in original]
        if models == original:
            files.append(name)
            continue
        for model in models:
            model["model_dir"] = str((place / model["model_dir"]).resolve())
        copy = folder / f"here_{Path(name).name}"
        copy.write_text(json.dumps(models, indent=4))
        # The printed command starts in the checkout.
        if copy.is_relative_to(ROOT):
            copy = copy.relative_to(ROOT)
        files.append(str(copy))
    return files


def model_here(model: dict[str, Any], place: Path, *, float32: bool) -> dict[str, Any]:
    """Return a model's spec for this machine; ``place``: the folder of the spec file."""
    config = CheckpointConfig.read((place / model["model_dir"]).resolve())
    is_nvfp4 = ONLY_BF16 in str(config.quantization.get("format"))
    only_bf16 = is_nvfp4 and not model["load_fn"].startswith("vllm")
    in_float32 = float32 and not only_bf16
    dtype = {}
    if in_float32:
        dtype = {"dtype": "float32"}
    options = {**model.get("engine", {}), **dtype}
    changed = dict(model)
    if options:
        changed["engine"] = options
    _, engine = backends.resolve(model["load_fn"], None)
    kernel = engine.missing_kernel(config.quantization, options)
    if kernel:
        print(f"vLLM has no kernel for {kernel}: Transformers runs {model['label']!r}")
        changed["load_fn"] = backends.DEQUANTIZING
        changed["fwd_fn"] = "transformers"
        changed["label"] = model["label"].replace("vLLM", "Transformers")
        changed["engine"] = dtype
    if in_float32:
        changed["label"] += " in float32"
    return changed


def introduction(*, everything: bool, float32: bool) -> str:
    """Return what the demo will do, and how long it takes."""
    text = json.loads((ROOT / SPECS / "demo_text.json").read_text())
    files = list(MODEL_SPECS)
    more_time = ""
    if everything:
        files.append(GGUF_SPEC)
        more_time = ", and more with GGUF"
    labels = []
    for file in files:
        for model in json.loads((ROOT / file).read_text()):
            label = model["label"]
            if model.get("reference", False):
                label += " (the reference)"
            labels.append(label)
    windows = text["max_rows"]
    if float32:
        windows = FLOAT32_WINDOWS
    length = text["eval_len"]
    tokens = f"{windows * (length - 1):,} tokens of {text['dataset_display_name']}"
    return f"""\
The demo measures on this machine what quantization costs SmolLM2-135M.
1. It makes the checkpoints in demo/models, once: bf16, W8A8, W4A16, and NVFP4 with bf16 and with \
4-bit activations.
2. It scores {tokens} ({windows} windows of {length:,}) with each of {len(labels)} models:
   {", ".join(labels)}.
3. It writes table, plot, report and results to demo/results.
It takes three to six minutes on two CPU cores{more_time}."""


def in_shell(words: list[str]) -> str:
    """Return a command line for a shell; words with spaces are quoted."""
    quoted = []
    for word in words:
        if " " in word:
            word = f'"{word}"'
        quoted.append(word)
    return " ".join(quoted)


def main() -> int:
    """Make missing models and run the command; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m demo", description="Make the demo's models and compare them."
    )
    parser.add_argument(
        "presets", nargs="*", help="schemes of compressed-tensors: make only these checkpoints"
    )
    parser.add_argument("--all", action="store_true", help="GGUF in llama.cpp as well")
    arguments = parser.parse_args()
    machine.keep_compiled_kernels_apart()
    # Before tqdm is imported: no progress bars of three libraries.
    os.environ["TQDM_DISABLE"] = "1"
    float32 = emulates_bf16()
    if not arguments.presets:
        print(introduction(everything=arguments.all, float32=float32), flush=True)
    make_models()
    for preset in arguments.presets:
        folder = MODELS / f"smollm2-135m-{preset.lower()}"
        make_once(folder, partial(make_checkpoint, preset=preset))
    if arguments.presets:
        return 0
    if arguments.all:
        make_gguf()
    # On CPUs with AMX vLLM would run W4A16 checkpoints with int8 activations, and the row's label
    # would be wrong.
    os.environ.setdefault("VLLM_CPU_INT4_W4A8", "0")
    RESULTS.mkdir(exist_ok=True)
    if float32:
        print(
            "this CPU has no arithmetic for bf16: the models compute in float32, on fewer windows"
        )
    words = command(everything=arguments.all, float32=float32)
    print(f"\n$ python {in_shell(words)}", flush=True)
    status = subprocess.run([sys.executable, *words], cwd=ROOT, check=False).returncode
    if not status:
        print(OWN_MODELS.format(environment=os.path.relpath(sys.prefix)))
    return status


if __name__ == "__main__":
    sys.exit(main())
