"""A server among the models of a run: its scores, its place in the cache, what it cannot be."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from compare_q.backends.base import Task
from compare_q.backends.common.errors import ModelError
from tests.support.command_line import Run, Specs
from tests.support.toy import toy_windows
from tests.support.vllm_server import VOCAB, Stub, gold, loaded

pytestmark = pytest.mark.slow


def test_command_line(stub: Stub, compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    fake = {"load_fn": "fake", "label": "uniform", "model_dir": "none", "engine": {"vocab_size": VOCAB}}
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}
    data, models = write_specs([{**fake, "reference": True}, served])
    out = tmp_path / "out.json"
    ran = compare_q("-d", data, "-m", models, "-o", out)
    assert ran.status == 0, ran.err
    found = next(model for model in json.loads(out.read_text())["texts"][0]["models"] if model["label"] == "served")
    sent = [[gold(ids[at], ids[at - 1]) for at in range(1, 100)] for ids in stub.windows]
    assert found["ppl"] == pytest.approx(math.exp(-np.mean(sent)), rel=1e-6)
    assert "no KLD: this engine gives no more than the real tokens' log-probabilities" in json.dumps(found)
    assert not {"cpu", "gpus", "driver", "cores"} & found["provenance"].keys()  # those of this machine say nothing
    stub.windows.clear()
    assert compare_q("-d", data, "-m", models, "--divergences", "-o", out).status == 0
    assert not stub.windows  # from the cache
    assert "no KLD, nor what --divergences asks for: this engine gives no more than" in out.read_text()
    stub.model = 1
    assert compare_q("-d", data, "-m", models).status == 0
    assert stub.windows  # other weights


def test_command_line_refusals(stub: Stub, compare_q: Run, write_specs: Specs) -> None:
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}
    data, models = write_specs([served])
    stub.tokens = {"tokens": [65], "token_strs": ["A"]}  # the toy tokenizer's 65 is another letter
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    assert "tokenizer_dir: is not this model's tokenizer: token 65" in ran.err
    stub.cards = []
    assert compare_q("-d", data, "-m", models).status == 2
    assert not stub.windows


def test_no_reference(stub: Stub, compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    """Refused before anything loads; the engine itself refuses too."""
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url, "reference": True}
    data, models = write_specs([served])
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    assert "served: reference: 'vllm_server' gives no logits to compare with; mark another model" in ran.err
    with pytest.raises(ModelError, match="cannot be the reference"):
        list(loaded(stub).score(toy_windows(1), Task(record=tmp_path)))
    assert not stub.windows
