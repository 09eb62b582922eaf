"""A server among the models of a run: its scores, its key in the cache, refused uses; and a server
whose model changes before it is loaded, while it is scored, and after.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compare_q.backends.common.errors import ModelError
from compare_q.backends.vllm_server.server_engine import ServedModel, VllmServerEngine
from compare_q.backends.worker import worker
from tests.support.toy import Run, Specs
from tests.support.vllm_server import VOCAB, Stub, another, choice, gold, moved, request_for

pytestmark = pytest.mark.slow


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
    found = next(
        model for model in json.loads(out.read_text())["models"] if model["label"] == "served"
    )
    sent = [[gold(ids[at], ids[at - 1]) for at in range(1, 100)] for ids in stub.windows]
    assert found["ppl"] == pytest.approx(math.exp(-np.mean(sent)), rel=1e-6)
    assert (
        "no KLD: this engine gives no more than the real tokens' log-probabilities"
        in json.dumps(found)
    )
    assert (
        not {"cpu", "gpus", "driver", "cores"} & found["provenance"].keys()
    )  # this machine's hardware is irrelevant
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
    """A row has a note if its scores are the reference's at another temperature, and none if they
    only round.
    """
    boost = 5.0
    fake = {
        "load_fn": "fake",
        "label": "sure",
        "model_dir": "none",
        "engine": {"vocab_size": VOCAB, "boost": boost},
    }
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}
    logit = boost / temperature
    exact = logit - math.log(math.exp(logit) + VOCAB - 1)

    def scaled(body: dict[str, Any], answer: dict[str, Any]) -> None:
        if body["prompt_logprobs"] == 0:
            for at, entry in enumerate(choice(answer)["prompt_logprobs"][1:]):
                for found in entry.values():
                    found["logprob"] = exact - 1e-3 * (at % 7)

    stub.edit = scaled
    data, models = write_specs([{**fake, "reference": True}, served])
    out = tmp_path / "out.json"
    ran = compare_q("-d", data, "-m", models, "-o", out)
    assert ran.status == 0, ran.err
    rows = {row["label"]: row for row in json.loads(out.read_text())["models"]}
    noted = " ".join(rows["served"]["notes"])
    assert ("temperature of about 0.7" in noted) == (temperature == 0.7)
    assert not any("temperature" in note for note in rows["sure"].get("notes", ()))


@pytest.mark.parametrize("concurrency", [1, 4, 32])
def test_commits_between_windows(
    stub: Stub,
    compare_q: Run,
    write_specs: Specs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    concurrency: int,
) -> None:
    """A run that commits after every window, as a run does every two seconds, asks the server about
    its model again.
    """
    monkeypatch.setattr(worker, "COMMIT_S", 0.0)
    served = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}
    data, models = write_specs(
        [{**served, "engine": {"concurrency": concurrency}}], eval_len=40, eval_stride=10
    )
    out = tmp_path / "out.json"
    ran = compare_q("-d", data, "-m", models, "-o", out)
    assert ran.status == 0, ran.err
    assert len(stub.windows) > 32
    sent = [gold(ids[at], ids[at - 1]) for ids in stub.windows for at in range(1, 40)]
    row = json.loads(out.read_text())["models"][0]
    assert row["ppl"] == pytest.approx(math.exp(-np.mean(sent)), rel=1e-6)


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
    moved(-1e-4)(stub)
    assert ServedModel(request).stamp() == stamped.stamp
    VllmServerEngine(stamped).load()
    stub.edit = lambda body, answer: None
    change(stub)
    assert ServedModel(request).stamp() != stamped.stamp
    with pytest.raises(ModelError) as caught:
        VllmServerEngine(stamped).load()
    assert (
        str(caught.value)
        == f"{stub.url}: the server's model changed before it was scored; run again"
    )
    VllmServerEngine(
        request.updated(stamp=ServedModel(request).stamp())
    ).load()  # under its own key


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
        found: float = json.loads(out.read_text())["models"][0]["ppl"]
        sent = [
            gold(ids[at], ids[at - 1], stub.model) for ids in stub.windows for at in range(1, 100)
        ]
        assert found == pytest.approx(math.exp(-np.mean(sent)), rel=1e-6)
        stub.windows.clear()
        return found

    stub.hold = lambda prompt: new_weights(stub)
    ran = compare_q("-d", data, "-m", models)
    assert ran.status == 2
    assert (
        f"served: {stub.url}: the server's model changed while it was scored; run again" in ran.err
    )
    stub.hold = lambda prompt: None
    stub.windows.clear()
    after = ppl()
    stub.model = 0
    assert ppl() != after
