"""The backend around the engine: what it says of a run, why it refuses a model, what it leaves behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from backends.common.errors import ModelError
from backends.vllm import install
from backends.vllm.backend import VllmScoreBackend
from tests.support.toy import ATOL_BATCH
from tests.support.vllm_engine import WINDOWS, engine, scores_of


@pytest.mark.engine
def test_provenance_says_what_ran(toy_engine: VllmScoreBackend) -> None:
    scores_of(toy_engine, WINDOWS)
    said = toy_engine.provenance()
    json.dumps(said)
    assert said["dtype"] == "float32"
    assert said["enforce_eager"] is True
    assert said["max_num_batched_tokens"] == 64
    assert said["model_class"] == "LlamaForCausalLM"
    longest = sorted(len(window.token_ids) for window in WINDOWS)[-2:]  # the probe takes these
    assert longest == [100, 150]
    assert said["scorer"]["checked"] == (2 * 63 if install.is_cpu_build() else 99 + 149)
    assert said["scorer"]["largest"] < ATOL_BATCH
    assert said["scorer"]["gathered"] is False


@pytest.mark.engine
def test_refused_checkpoint_gives_the_reason(toy_model: Path, tmp_path: Path) -> None:
    """A config that asks for one layer more than the file holds: found in the worker, reported in one line."""
    broken = tmp_path / "broken"
    shutil.copytree(toy_model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps({**config, "intermediate_size": 160}))
    reason = pytest.raises(ModelError, match=r"vLLM refused .*broken: .*exceeds dimension size")
    with reason as failure, engine(broken, tmp_path / "log"):
        pass
    assert "root cause" not in str(failure.value)
    assert "\n" not in str(failure.value)


def test_kernel_settings_of_the_environment_are_part_of_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_INT4_W4A8", raising=False)
    before = VllmScoreBackend.versions()
    assert "torch" in before
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    assert VllmScoreBackend.versions() == before
    monkeypatch.setenv("VLLM_CPU_INT4_W4A8", "0")
    assert VllmScoreBackend.versions() == {**before, "VLLM_CPU_INT4_W4A8": "0"}
