"""The drop-in for exllamav3's old compare_q, and the score-mode command line, in a real vLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import compare_q_vllm
from compare_q.backends.base import ScoreRequest
from compare_q.backends.common.errors import ModelError
from tests.support import ROOT
from tests.support.processes import users_environment
from tests.support.toy import ATOL_BATCH, ATOL_LOGIT, TOY_VOCAB, brute_force, toy_windows
from tests.support.vllm_engine import EAGER, as_before, in_one_process

LINKED = """
import runpy, sys
from pathlib import Path
sys.path[:] = [entry for entry in sys.path if not (Path(entry) / "compare_q").is_dir()]
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in str(finder)]
names = runpy.run_path(sys.argv[1])
print(names["load_vllm_score"].__module__, sys.modules["compare_q"].__file__)
"""
"""A Python in which compare_q is not installed runs a file as exllamav3's compare_q would import
it."""


@pytest.mark.engine
def test_logits_are_the_models_own(toy_model: Path) -> None:
    """Logits [1, L, V] for every position including the last.

    The windows are prefilled in chunks of 64.
    """
    from transformers import AutoModelForCausalLM

    with as_before(), in_one_process():
        model, bpw_layer, bpw_head, vram_bits = compare_q_vllm.load_vllm_score(
            [str(toy_model), {**EAGER, "max_num_batched_tokens": 64}], size=150 + 512
        )
    try:
        # 2 layers x (4 x 64 x 64 + 3 x 64 x 128) = 81,920 weights, the head 320 x 64 = 20,480.
        assert (bpw_layer, bpw_head, vram_bits) == (16.0, 16.0, 16 * (81_920 + 20_480))
        # Upstream requests length + 512; the toy's context is 256.
        assert model.planned.max_tokens == 256
        reference = AutoModelForCausalLM.from_pretrained(toy_model, dtype=torch.float32)
        windows = toy_windows(2, 150)
        # The first one again: no position comes from the cache of prefixes.
        for window in [*windows, windows[0]]:
            ids = torch.from_numpy(window.token_ids).long()[None]
            logits = compare_q_vllm.fwd_vllm_score(model, ids)
            assert logits.shape == (1, 150, TOY_VOCAB)
            with torch.inference_mode():
                torch.testing.assert_close(
                    logits[0], reference(ids).logits[0], atol=ATOL_LOGIT, rtol=0
                )
            (scores,) = model.score([window], ScoreRequest())
            np.testing.assert_allclose(
                brute_force(logits[0], window), scores.logprob, atol=ATOL_BATCH
            )
        with pytest.raises(ModelError, match=r"must be \[1, L\]"):
            compare_q_vllm.fwd_vllm_score(model, torch.zeros(2, 5, dtype=torch.long))
    finally:
        with as_before(), in_one_process():
            model.close()


@pytest.mark.engine
def test_score_mode_command_line(toy_model: Path, toy_text: Path, tmp_path: Path) -> None:
    """The result equals compare_q's on the same windows, in a separate process."""
    flags = ["--model", toy_model, "--text", toy_text, "--context-length", "100", "--stride", "50"]
    first = run("compare_q_vllm.py", *flags)
    printed = dict(line.split(": ") for line in first.splitlines())
    assert printed["Windows"] == "18"  # ceil((1000 - 100) / 50)
    assert printed["Tokens"] == str(18 * 99)
    data = {
        "tokenizer_dir": str(toy_model),
        "dataset": "text",
        "path": str(toy_text),
        "eval_len": 100,
        "eval_stride": 50,
    }
    model = {
        "load_fn": "vllm_score",
        "label": "x",
        "model_dir": str(toy_model),
        "engine": {"tensor_parallel_size": 1, "trust_remote_code": False},
    }
    (tmp_path / "d.json").write_text(json.dumps(data))
    (tmp_path / "m.json").write_text(json.dumps(model))
    out = run(
        "eval/compare_q.py",
        "-d",
        tmp_path / "d.json",
        "-m",
        tmp_path / "m.json",
        "-o",
        tmp_path / "r.json",
    )
    assert "1 of 1 rows come from the cache" in out  # one entry: same windows, model and options
    (result,) = json.loads((tmp_path / "r.json").read_text())["models"]
    assert float(printed["Perplexity"]) == pytest.approx(result["ppl"], abs=1e-3)


def run(script: str, *words: object) -> str:
    command = [sys.executable, str(ROOT / script), *map(str, words)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env=users_environment()
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_log_has_a_new_name_and_is_deleted_at_the_end(tmp_path: Path) -> None:
    """In a shared folder, a name that can be guessed could be another user's link."""
    code = """
import compare_q_vllm, os
logs = [compare_q_vllm.new_log() for _ in range(2)]
print(*logs)
print(*(oct(os.stat(log).st_mode & 0o777) for log in logs))
"""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    logs, modes = [line.split() for line in done.stdout.splitlines()]
    assert len(set(logs)) == 2
    assert {Path(log).parent for log in logs} == {tmp_path}
    assert modes == ["0o600"] * 2
    assert list(tmp_path.iterdir()) == []


def test_a_link_beside_another_program_finds_its_checkout(tmp_path: Path) -> None:
    (tmp_path / "eval").mkdir()
    link = tmp_path / "eval" / "compare_q_vllm.py"
    link.symlink_to(ROOT / "compare_q_vllm.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", LINKED, str(link)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment
    )
    assert done.stdout == f"<run_path> {ROOT / 'compare_q' / '__init__.py'}\n", done.stderr
