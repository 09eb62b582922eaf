"""``--phases``: decode beside the prefill of the same model, and a bug that decode alone has."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.common.errors import InputError
from compare_q.backends.hf.engine import TransformersEngine
from compare_q.eval.phases import NO_MODEL, with_decode
from compare_q.eval.run import runner
from compare_q.eval.specs.reading import parse_model_spec
from tests.support.command_line import in_transformers
from tests.support.comparisons import Compare, fake, store_of
from tests.support.toy import Ran

BROKEN_FROM = 40


def has_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of V is lost in steps of one token, as in a decode kernel (turboquant_plus, issue 99), behind 40 tokens."""
    load = TransformersEngine.load

    def with_bug(engine: TransformersEngine) -> None:
        load(engine)
        past: dict[str, int] = {}

        def before(module: Any, _: Any, keys: dict[str, Any]) -> None:
            cache = keys.get("past_key_values")
            past["tokens"] = 0 if cache is None else cache.get_seq_length(module.layer_idx)

        def halved(_: Any, __: Any, value: Any) -> Any:
            if value.shape[1] == 1 and past["tokens"] >= BROKEN_FROM:
                value = value.clone()
                value[..., value.shape[-1] // 2 :] = 0
            return value

        for layer in engine.model.model.layers:
            layer.self_attn.register_forward_pre_hook(before, with_kwargs=True)
            layer.self_attn.v_proj.register_forward_hook(halved)

    monkeypatch.setattr(TransformersEngine, "load", with_bug)


@pytest.mark.engine
def test_a_bug_of_decode_is_found_and_a_right_decode_is_not(
    measured: Compare, compare_q: Callable[..., Ran], toy_model: Path, own_cache: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The bug is invisible in prefill, whose scores are the right ones to the bit."""
    models = [in_transformers(toy_model, reference=True)]
    right = measured(models, "--phases", max_rows=9)
    assert right.status == 0, right.err
    own = right.models["toy decode"]["own_prefill"]
    assert own["kld"]["value"] < own["noise"]["value"] < 1e-4
    assert (own["is_above"], own["begins"], own["no_noise"]) == (False, None, "")
    assert right.models["toy"]["own_prefill"] is None
    assert "Decode is the same model's prefill within rounding noise: toy decode." in right.out
    assert " nowhere " in right.out
    again = measured(models, "--phases", max_rows=9)
    assert again.loaded == []
    assert again.models["toy decode"]["own_prefill"] == own
    kept = store_of(own_cache)  # the reference's; those of other models' own prefills are gone

    has_bug(monkeypatch)
    wrong = measured(models, "--phases", "--cache-dir", tmp_path / "fresh", max_rows=9)
    assert wrong.status == 0, wrong.err
    own = wrong.models["toy decode"]["own_prefill"]
    assert own["kld"]["value"] > 0.1 > 1000 * own["noise"]["value"]
    assert own["is_above"]
    assert 0.75 * BROKEN_FROM <= own["begins"] <= 2 * BROKEN_FROM
    assert wrong.tokens("toy") == right.tokens("toy")
    assert "Decode differs from the same model's prefill by more than rounding noise: toy decode." in wrong.out
    assert f"it shows from about token {own['begins']} of a window on" in wrong.out
    shown = compare_q(
        "show", tmp_path / "results.json", "--markdown", tmp_path / "table.md", "--html", tmp_path / "r.html"
    )
    for text in (shown.out, (tmp_path / "table.md").read_text(), (tmp_path / "r.html").read_text()):
        assert "‼" in text
        assert "Decode beside prefill" in text
    assert kept.is_dir()


def test_an_engine_without_noise_has_no_noise_floor(measured: Compare, own_cache: Path) -> None:
    models = [
        fake("ref", boost=3.0, reference=True),
        fake("uniform"),
        {**fake("floor", boost=2.9), "noise_floor": True},
    ]
    ran = measured(models, "--phases", "--columns", "label,kld,own_kld,own_noise,own_begins")
    assert ran.status == 0, ran.err
    assert list(ran.models) == ["ref", "ref decode", "uniform", "uniform decode", "floor"]
    own = ran.models["uniform decode"]["own_prefill"]
    assert own["kld"]["value"] == pytest.approx(0, abs=1e-6)
    assert own["noise"] is None
    assert "ref decode, uniform decode: KLD of noise n/a: the engine cannot add noise of roundings" in ran.out
    assert "Decode" not in ran.out.splitlines()[-1]
    assert store_of(own_cache).name == ran.results["reference"]["key"]  # no other model's store is left


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [(InputError("/cache: cannot be written"), 0,
      "ref: its decode is not compared with its own prefill: /cache: cannot"),
     (KeyboardInterrupt(), 130, "interrupted; run again to go on")],
)  # fmt: skip
def test_what_ends_the_comparison_loses_no_row(
    measured: Compare, monkeypatch: pytest.MonkeyPatch, error: BaseException, status: int, said: str
) -> None:
    run, calls = runner.run, iter([None, error, error])

    def ending(*given: Any) -> Any:
        if (stop := next(calls)) is not None:
            raise stop
        return run(*given)

    monkeypatch.setattr(runner, "run", ending)
    ran = measured([fake("ref", boost=3.0, reference=True), fake("uniform")], "--phases")
    assert ran.status == status
    assert said in ran.err
    assert {label: row["own_prefill"] for label, row in ran.models.items()} == dict.fromkeys(
        ["ref", "ref decode", "uniform", "uniform decode"]
    )
    assert "uniform decode" in ran.out


def spec(label: str, **keys: Any) -> Any:
    return parse_model_spec({"load_fn": "fake", "label": label, "model_dir": "none", **keys}, Path("m.json"))


def test_each_model_gets_its_decode_once() -> None:
    """Not a noise floor, and not a model that the specs have in decode already, in whatever steps."""
    given = [
        spec("a", reference=True, group="g"), spec("b", engine={"boost": 1.0}),
        spec("b in steps", engine={"boost": 1.0}, phase="decode", step=4, batch=8), spec("floor", noise_floor=True),
    ]  # fmt: skip
    found, said = with_decode(given)
    assert [each.name for each in found] == ["a", "a decode", "b", "b in steps", "floor"]
    assert json.loads(found[1].model_dump_json(exclude_unset=True)) == {
        "load_fn": "fake", "label": "a decode", "group": "g", "model_dir": "none", "phase": "decode",
    }  # fmt: skip
    assert said == []


def test_a_server_stays_in_prefill() -> None:
    server = parse_model_spec(
        {"load_fn": "vllm_server", "label": "s", "model_dir": "http://localhost:1"}, Path("m.json")
    )
    found, said = with_decode([spec("a"), server])
    assert [each.name for each in found] == ["a", "a decode", "s"]
    assert said == ["s: 'vllm_server' cannot be scored in decode steps; it stays in prefill"]
    with pytest.raises(InputError, match=NO_MODEL):
        with_decode([server])
