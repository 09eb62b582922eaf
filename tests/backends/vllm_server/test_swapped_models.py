"""A server whose model changes: before it is loaded, while it is scored, and after."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm_server.engine import VllmServerEngine
from compare_q.backends.vllm_server.served import ServedModel
from tests.support.command_line import Run, Specs
from tests.support.toy import toy_windows
from tests.support.vllm_server import (
    Stub,
    another,
    assert_gold,
    choice,
    failure,
    gold,
    loaded,
    moved,
    new_weights,
    request_for,
    scores_of,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("by", "fits"), [(-0.03, True), (-0.06, False)])
def test_a_sample_that_moves(stub: Stub, by: float, fits: bool) -> None:
    """By what other traffic does to bfloat16, and by more; all else of the server stays."""

    def one_value(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body["prompt_logprobs"]:
            choice(answer)["prompt_logprobs"][9][str(body["prompt"][9])]["logprob"] += by

    engine, windows = loaded(stub), toy_windows(2, 20)
    stub.edit = one_value
    if fits:
        assert_gold(scores_of(engine, windows), windows)
    else:
        changed = f"{stub.url}: the server's model changed while it was scored; run again"
        assert failure(engine, windows) == changed
    assert len(stub.windows) == 2


def new_configuration(stub: Stub) -> None:
    stub.edit = another


def new_root(stub: Stub) -> None:
    stub.cards[0]["root"] = "/models/new"


@pytest.mark.parametrize("change", [new_weights, new_configuration, new_root])
def test_swapped_between_stamp_and_load(stub: Stub, change: Callable[[Stub], None]) -> None:
    request = request_for(stub.url)
    stamped = replace(request, stamp=ServedModel(request).stamp())
    moved(-1e-4)(stub)
    assert ServedModel(request).stamp() == stamped.stamp
    VllmServerEngine(stamped).load()
    stub.edit = lambda body, answer: None
    change(stub)
    assert ServedModel(request).stamp() != stamped.stamp
    with pytest.raises(ModelError) as caught:
        VllmServerEngine(stamped).load()
    assert str(caught.value) == f"{stub.url}: the server's model changed before it was scored; run again"
    VllmServerEngine(replace(request, stamp=ServedModel(request).stamp())).load()  # under a key of its own


def test_a_server_that_goes_after_its_last_window(stub: Stub) -> None:
    engine = loaded(stub)
    stub.edit = lambda body, answer: 400 if body["prompt_logprobs"] else None
    assert failure(engine).startswith(f"{stub.url}: HTTP 400 from /v1/completions: ")


def test_swapped_while_scored(stub: Stub, compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    """The other weights' scores are under neither key afterwards."""
    data, models = write_specs([{"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}])
    out = tmp_path / "out.json"

    def ppl() -> float:
        ran = compare_q("-d", data, "-m", models, "-o", out)
        assert ran.status == 0, ran.err
        found: float = json.loads(out.read_text())["texts"][0]["models"][0]["ppl"]
        sent = [gold(ids[at], ids[at - 1], stub.model) for ids in stub.windows for at in range(1, 100)]
        assert found == pytest.approx(math.exp(-np.mean(sent)), rel=1e-6)
        stub.windows.clear()
        return found

    stub.hold = lambda prompt: new_weights(stub)
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    assert f"served: {stub.url}: the server's model changed while it was scored; run again" in ran.err
    stub.hold = lambda prompt: None
    stub.windows.clear()
    after = ppl()
    stub.model = 0
    assert ppl() != after
