"""The demo's models in real engines, with the real command line in a separate process.

On a CPU without arithmetic for bf16 they compute in float32, as in the demo.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from demo.__main__ import BASE, ROOT, emulates_bf16, make_models, specs_here
from tests.support.processes import users_environment

pytestmark = pytest.mark.engine
FLOAT32 = emulates_bf16()
W4A16 = "Transformers W4A16 g32" if FLOAT32 else "vLLM W4A16 g32"
"""vLLM has no int4 kernel for CPUs in float32."""
NVFP4 = "Transformers NVFP4 W4A16"
LENGTH = 256
WINDOWS = 3
N_SCORED = WINDOWS * (LENGTH - 1)


@pytest.fixture(scope="module")
def demo_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """compare_q on windows of the demo text: bf16 in both engines, W8A8, W4A16 and NVFP4.

    ``models``: label -> row, without the suffix that the demo adds to labels in float32.
    """
    make_models()
    folder = tmp_path_factory.mktemp("run")
    text = str(ROOT / "eval" / "spec" / "opticks.txt")
    data = {
        "tokenizer_dir": str(BASE),
        "dataset": "text",
        "path": text,
        "eval_len": LENGTH,
        "eval_stride": LENGTH // 2,
        "max_rows": WINDOWS,
    }
    (folder / "data.json").write_text(json.dumps(data))
    command = [
        sys.executable,
        "eval/compare_q.py",
        "-d",
        str(folder / "data.json"),
        "-m",
        *specs_here(folder, float32=FLOAT32),
        "-o",
        str(folder / "r.json"),
        "-pf",
        str(folder / "p.png"),
        "--cache-dir",
        str(folder / "cache"),
    ]
    run = partial(
        subprocess.run,
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        # As the demo sets it: a CPU with AMX would quantize the activations of W4A16.
        env=users_environment(VLLM_CPU_INT4_W4A8="0"),
    )
    done, again = run(), run()
    assert done.returncode == 0, done.stderr
    results = json.loads((folder / "r.json").read_text())
    models = {model["label"].removesuffix(" in float32"): model for model in results["models"]}
    return {"folder": folder, "first": done, "again": again, "results": results, "models": models}


def test_both_engines_agree(demo_run: dict[str, Any]) -> None:
    """Engines round in different orders: their perplexities agree within 0.3 % in bf16, but are not
    identical.
    """
    transformers, vllm = demo_run["models"]["Transformers bf16"], demo_run["models"]["vLLM bf16"]
    assert vllm["ppl"] == pytest.approx(transformers["ppl"], rel=1e-5 if FLOAT32 else 0.003)
    assert vllm["ppl"] != transformers["ppl"]
    assert transformers["tokens"] == vllm["tokens"] == N_SCORED


def test_quantization_costs_what_it_plausibly_costs(demo_run: dict[str, Any]) -> None:
    """Round to nearest on 135M weights with folded norms: W8A8 loses little, W4A16 a half to three
    quarters.
    """
    models = demo_run["models"]
    bf16 = models["vLLM bf16"]["ppl"]
    assert 1.0 < models["vLLM W8A8"]["ppl"] / bf16 < 1.1
    assert 1.3 < models[W4A16]["ppl"] / bf16 < 2
    assert 1.1 < models[NVFP4]["ppl"] / bf16 < models["vLLM NVFP4 W4A4"]["ppl"] / bf16 < 2.3
    assert models[W4A16]["bpw_layer"] == 4.5
    assert all(model["non_finite"] == 0 for model in models.values())


def test_divergence_grows_with_the_damage(demo_run: dict[str, Any]) -> None:
    """Every row has a divergence on every position of its perplexity."""
    models = demo_run["models"]
    assert demo_run["results"]["reference"]["label"] == "vLLM bf16" + " in float32" * FLOAT32
    assert models["vLLM bf16"]["reference"] is True
    assert models["vLLM bf16"]["kld"] == 0.0
    others = [models[label] for label in ("Transformers bf16", "vLLM W8A8", W4A16)]
    assert all(model["kld_tokens"] == model["tokens"] == N_SCORED for model in others)
    assert (-1e-6 if FLOAT32 else 0) < others[0]["kld"] < others[1]["kld"] < others[2]["kld"] < 1
    assert 1 >= others[0]["same_top"] > others[1]["same_top"] > others[2]["same_top"] > 0.5


def test_every_row_says_what_ran(demo_run: dict[str, Any]) -> None:
    """No row deviates from its checkpoint, because the demo turns int8 activations of W4A16 off."""
    dequantized = "torch linear (dequantized)"
    dtype = "float32" if FLOAT32 else "bfloat16"
    kernels = {
        "Transformers bf16": "torch linear",
        "vLLM bf16": "Unquantized",
        "vLLM W8A8": "CPUInt8",
        W4A16: dequantized if FLOAT32 else "CPUWNA16",
        NVFP4: dequantized,
        "vLLM NVFP4 W4A4": "EmulationNvFp4",
    }
    models = demo_run["models"]
    assert {label: model["kernel"] for label, model in models.items()} == kernels
    assert not any(model["deviations"] for model in models.values())
    ran = {
        label: {
            (group["weights"], group["activations"], group["count"])
            for group in model["provenance"]["layers"]
        }
        for label, model in models.items()
    }
    head = (dtype, dtype, 1)
    assert ran["vLLM W8A8"] == {("int8 channel", "int8 token", 30), head}
    assert {(weights, activations) for weights, activations, _ in ran[W4A16]} == {
        ("int4 g32", dtype),
        head[:2],
    }
    assert {each[:2] for each in ran[NVFP4]} == {
        ("nvfp4 g16", "bfloat16"),
        ("bfloat16", "bfloat16"),
    }
    assert ran["vLLM NVFP4 W4A4"] == {("nvfp4 g16", "nvfp4 g16", 30), head}


def test_second_run_comes_from_the_cache(demo_run: dict[str, Any]) -> None:
    assert demo_run["again"].returncode == 0
    assert "loading" not in demo_run["again"].stderr
    assert all(model["from_cache"] for model in demo_run["models"].values())


def test_a_checkpoint_that_vllm_refuses(demo_run: dict[str, Any], tmp_path: Path) -> None:
    """9 heads cannot be split over 2 ranks: the model is a failed row, and the other model
    finishes.
    """
    engine = {"tensor_parallel_size": 2, "enforce_eager": True}
    refused = {
        "load_fn": "vllm_score",
        "label": "refused",
        "model_dir": str(BASE),
        "engine": engine,
    }
    fake = {
        "load_fn": "fake",
        "label": "fake",
        "model_dir": "none",
        "engine": {"vocab_size": 50000},
    }
    (tmp_path / "m.json").write_text(json.dumps([refused, fake]))
    command = [
        sys.executable,
        "eval/compare_q.py",
        "-d",
        str(demo_run["folder"] / "data.json"),
        "-m",
        str(tmp_path / "m.json"),
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=users_environment()
    )
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    (reason,) = [line for line in done.stdout.splitlines() if line.startswith("refused: failed: ")]
    assert "attention heads" in reason
    assert "fake" in done.stdout
