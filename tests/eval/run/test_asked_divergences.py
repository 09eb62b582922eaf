"""``--divergences``: reverse KLD, Jensen-Shannon, total variation and top-5 agreement, from logits to results.json."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.comparisons import N_WINDOWS, Compare, Models, fake, text_windows, whole_logits
from tests.support.definitions import divergence_definitions

NAMES = ("reverse_kld", "js", "tv", "top5")


def test_every_token_and_every_mean(
    measured: Compare, pair: Models, stub_model: Path, noisy_stub: Path, toy_text: Path
) -> None:
    """Against float64; the reference's own row has none."""
    ran = measured(pair, "--divergences")
    assert ran.status == 0, ran.err
    windows = text_windows(toy_text)
    before, after = (
        torch.cat([logits[:-1] for logits in whole_logits(folder, windows)]) for folder in (stub_model, noisy_stub)
    )
    gold, found, model = divergence_definitions(after, before), ran.tokens("noisy"), ran.models["noisy"]
    against = model["estimates"]["against"]
    for name in NAMES:
        np.testing.assert_allclose(found[name], gold[name], rtol=0, atol=1e-5, err_msg=name)
        assert model[name] == pytest.approx(np.mean(gold[name]), abs=1e-5)
        assert model[f"{name}_stderr"] == against[name]["stderr"] > 0
        assert against["divergence_percentiles"][name]["50"] == pytest.approx(np.median(gold[name]), abs=1e-5)
        assert ran.models["ref"][name] is None
    assert 0 < model["js"] <= math.log(2)
    assert 0 < model["tv"] <= 1


def test_what_the_cache_has_of_them(measured: Compare) -> None:
    """Scores without them are measured again when they are asked for; scores with them serve every run."""
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    plain = measured(models)
    assert not set(NAMES) & set(plain.tokens("uniform"))
    asked = measured(models, "--divergences")
    assert asked.loaded == ["uniform"]
    assert set(NAMES) <= set(asked.tokens("uniform"))
    assert measured(models, "--divergences").loaded == []
    again = measured(models)
    assert (again.loaded, again.tokens("uniform").keys()) == ([], plain.tokens("uniform").keys())

    measured(models, "--divergences", "-cc")
    served = measured(models)
    assert served.loaded == []
    assert served.tokens("uniform") == plain.tokens("uniform")


def shown(model: dict[str, Any]) -> list[Any]:
    return [model[name] for name in NAMES]


def test_finished_runs_keep_them(measured: Compare, compare_q: Any, tmp_path: Path) -> None:
    """And the results of a run that did not ask for them have none."""
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    for flags in ([], ["--divergences"]):
        given = measured(models, *flags).models["uniform"]
        ran = compare_q("show", tmp_path / "results.json", "-o", tmp_path / "copy.json")
        assert ran.status == 0, ran.err
        copied = json.loads((tmp_path / "copy.json").read_text())["texts"][0]["models"][1]
        assert copied["estimates"] == given["estimates"]
        assert shown(copied) == shown(given)
        assert all((value is None) == (not flags) for value in shown(given))


def test_tokens_that_have_none_are_counted(measured: Compare) -> None:
    ran = measured([fake("ref", boost=3.0, reference=True), fake("holes", nan_windows=[2])], "--divergences")
    against = ran.models["holes"]["estimates"]["against"]
    assert [against[name]["non_finite"] for name in NAMES] == [1] * 4
    assert [against[name]["tokens"] for name in NAMES] == [N_WINDOWS * 99 - 1] * 4


def test_they_need_a_reference(measured: Compare) -> None:
    ran = measured([fake("uniform")], "--divergences")
    assert ran.status == 2
    assert "--divergences: there is no reference; mark a model" in ran.err
