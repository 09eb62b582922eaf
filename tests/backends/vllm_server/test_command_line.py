"""A server among the models of a run, also if its model changes before or while it is scored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm_server.server_engine import (
    SAMPLE_IDS,
    ServedModel,
    VllmServerEngine,
)
from compare_q.backends.worker import worker
from tests.support.toy import FAKE, Run, Specs
from tests.support.vllm_server import (
    VOCAB,
    Stub,
    another,
    by_probability,
    choice,
    gold,
    moved,
    request_for,
)

pytestmark = pytest.mark.slow


def rows_of(file: Path) -> dict[str, dict[str, Any]]:
    """Return the models in a file of results by their labels."""
    return {model["label"]: model for model in json.loads(file.read_text())["models"]}


def gold_ppl(stub: Stub) -> float:
    """Return the perplexity of the stub's model in the windows that were requested."""
    logprobs = []
    for ids in stub.windows:
        for before, token in pairwise(ids):
            logprobs.append(gold(token, before, stub.model))
    return math.exp(-np.mean(logprobs))


def kld_from_uniform(stub: Stub) -> float:
    """Return the KLD of the stub from a uniform model, in the windows that were requested."""
    klds = []
    for ids in stub.windows:
        for before in ids[:-1]:
            gold_sum = sum(gold(token, before, stub.model) for token in range(VOCAB))
            klds.append(-math.log(VOCAB) - gold_sum / VOCAB)
    return float(np.mean(klds))


def bound_from_uniform(stub: Stub) -> float:
    """Return the bound of this KLD by the 20 most probable tokens and the real one."""
    bounds = []
    for ids in stub.windows:
        for before, real in pairwise(ids):
            known = {real, *by_probability(before, stub.model)[:20]}
            values = [gold(token, before, stub.model) for token in known]
            p = len(known) / VOCAB
            q = sum(math.exp(value) for value in values)
            of_known = sum(-math.log(VOCAB) - value for value in values) / VOCAB
            bounds.append(of_known + (1 - p) * math.log((1 - p) / (1 - q)))
    return float(np.mean(bounds))


def test_command_line(stub: Stub, compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    fake = {
        "load_fn": "fake",
        "label": "uniform",
        "model_dir": "none",
        "engine": {"vocab_size": VOCAB},
    }
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}
    data, models = write_specs([{**fake, "reference": True}, served])
    out = tmp_path / "out.json"
    ran = compare_q("-d", data, "-m", models, "-o", out)
    assert ran.status == 0, ran.err
    row = rows_of(out)["served"]
    assert row["ppl"] == pytest.approx(gold_ppl(stub), rel=1e-6)
    assert row["kld_kind"] == "bound"
    assert 0 < row["kld"] < kld_from_uniform(stub)
    assert row["kld"] == pytest.approx(bound_from_uniform(stub), abs=1e-3)
    assert row["same_top"] is not None
    # This machine's hardware is irrelevant.
    assert not {"cpu", "gpus", "driver", "cores"} & row["provenance"].keys()
    stub.windows.clear()
    assert compare_q("-d", data, "-m", models).status == 0
    assert not stub.windows  # from the cache
    stub.model = 1
    assert compare_q("-d", data, "-m", models).status == 0
    assert stub.windows  # other weights


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_scores_at_another_temperature(
    stub: Stub, compare_q: Run, write_specs: Specs, tmp_path: Path, temperature: float
) -> None:
    """Scores at another temperature than the reference's give a note, and rounded scores none."""
    boost = 5.0
    fake = {
        "load_fn": "fake",
        "label": "sure",
        "model_dir": "none",
        "engine": {"vocab_size": VOCAB, "boost": boost},
    }
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}
    logit = boost / temperature
    # log softmax of one logit among VOCAB - 1 logits of 0.
    exact = logit - math.log(math.exp(logit) + VOCAB - 1)

    def scaled(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body["prompt"] == list(SAMPLE_IDS):
            return
        for at, entry in enumerate(choice(answer)["prompt_logprobs"][1:]):
            logprob = exact - 1e-3 * (at % 7)
            for token_scores in entry.values():
                token_scores["logprob"] = exact - logit
            entry[str(body["prompt"][at + 1])]["logprob"] = logprob

    stub.edit = scaled
    data, models = write_specs([{**fake, "reference": True}, served])
    out = tmp_path / "out.json"
    ran = compare_q("-d", data, "-m", models, "-o", out)
    assert ran.status == 0, ran.err
    rows = rows_of(out)
    notes = " ".join(rows["served"]["notes"])
    assert ("temperature of about 0.7" in notes) == (temperature == 0.7)
    assert "temperature" not in " ".join(rows["sure"].get("notes", ()))


@pytest.mark.parametrize("concurrency", [1, 4, 32])
def test_commits_between_windows(
    stub: Stub,
    compare_q: Run,
    write_specs: Specs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    concurrency: int,
) -> None:
    """A run that commits after every window requests a sample of the model each time.

    Its windows are compared with a reference between the commits.
    """
    monkeypatch.setattr(worker, "COMMIT_S", 0.0)
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}
    uniform = {**FAKE, "engine": {"vocab_size": VOCAB}, "reference": True}
    data, models = write_specs(
        [uniform, {**served, "engine": {"concurrency": concurrency}}], eval_len=40, eval_stride=10
    )
    out = tmp_path / "out.json"
    ran = compare_q("-d", data, "-m", models, "-o", out, "-r", 40)
    assert ran.status == 0, ran.err
    assert len(stub.windows) > 32
    row = rows_of(out)["served"]
    assert row["ppl"] == pytest.approx(gold_ppl(stub), rel=1e-6)
    assert row["kld"] == pytest.approx(bound_from_uniform(stub), abs=1e-3)


def new_weights(stub: Stub) -> None:
    stub.model = 1


def new_configuration(stub: Stub) -> None:
    stub.edit = another


def new_root(stub: Stub) -> None:
    stub.cards[0]["root"] = "/models/new"


@pytest.mark.parametrize("change", [new_weights, new_configuration, new_root])
def test_swapped_between_stamp_and_load(stub: Stub, change: Callable[[Stub], None]) -> None:
    request = request_for(stub.url)
    stamped = request.updated(stamp=ServedModel(request).stamp())
    # Rounding may move a sample; -1e-4 nats is far below MOVED = 0.05.
    moved(-1e-4)(stub)
    assert ServedModel(request).stamp() == stamped.stamp
    VllmServerEngine(stamped).load()
    stub.edit = lambda body, answer: None
    change(stub)
    assert ServedModel(request).stamp() != stamped.stamp
    with pytest.raises(ModelError) as caught:
        VllmServerEngine(stamped).load()
    message = f"{stub.url}: the server's model changed before it was scored; run again"
    assert str(caught.value) == message
    stamped_anew = request.updated(stamp=ServedModel(request).stamp())
    VllmServerEngine(stamped_anew).load()  # under its own key


def test_swapped_while_scored(
    stub: Stub, compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    """The scores of mixed weights are not stored under either key."""
    data, models = write_specs(
        [{"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}]
    )
    out = tmp_path / "out.json"

    def ppl() -> float:
        ran = compare_q("-d", data, "-m", models, "-o", out)
        assert ran.status == 0, ran.err
        value: float = rows_of(out)["served"]["ppl"]
        assert value == pytest.approx(gold_ppl(stub), rel=1e-6)
        stub.windows.clear()
        return value

    stub.hold = lambda prompt: new_weights(stub)
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    message = f"served: {stub.url}: the server's model changed while it was scored; run again"
    assert message in ran.err
    stub.hold = lambda prompt: None
    stub.windows.clear()
    ppl_of_new_weights = ppl()
    stub.model = 0
    assert ppl() != ppl_of_new_weights
