"""``--phases``: decode beside the prefill of the same model, and a bug that decode alone has."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare_q.backends.base import Window
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.fake import FakeEngine
from compare_q.backends.hf.engine import TransformersEngine
from compare_q.backends.reference.store import MANIFEST
from compare_q.eval.common.cache import Cache
from compare_q.eval.common.progress import Progress
from compare_q.eval.phases import NO_MODEL, of_text, with_decode
from compare_q.eval.run import runner
from compare_q.eval.run.hosts import Session
from compare_q.eval.specs.reading import parse_model_spec
from compare_q.eval.stats.phases import OwnPrefill
from compare_q.eval.stats.uncertainty import Mean
from compare_q.eval.table import phases
from compare_q.eval.table.verdict import verdict
from tests.support.command_line import in_transformers
from tests.support.comparisons import Compare, fake, store_of
from tests.support.made import QUANT, REF, results_of, run_of, with_against
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
    assert (
        ran.err.count("is deleted again")
        == ran.err.count("uniform: the store of its own prefill is deleted again")
        == 1
    )


def test_a_store_that_was_there_or_that_another_run_uses_stays(measured: Compare, own_cache: Path) -> None:
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    earlier = measured([fake("uniform", reference=True), fake("ref", boost=3.0)]).results["reference"]["key"]
    there = {store_of(own_cache).name}
    assert there == {earlier}
    ran = measured(models, "--phases")
    assert {each.parent.name for each in own_cache.glob(f"references/*/{MANIFEST}")} == {
        earlier, ran.results["reference"]["key"]
    }  # fmt: skip

    for folder in own_cache.glob("references/*"):
        Cache.remove("references", folder)
    other = Cache(own_cache)
    other.use("references", earlier)
    ran = measured([fake("ref", boost=2.5, reference=True), models[1]], "--phases", "-cc")
    assert {each.parent.name for each in own_cache.glob(f"references/*/{MANIFEST}")} == {
        earlier, ran.results["reference"]["key"]
    }  # fmt: skip


def test_a_merged_run_shows_decode_beside_the_prefill_that_another_run_has_too(
    measured: Compare, compare_q: Callable[..., Ran], tmp_path: Path
) -> None:
    models = [fake("ref", boost=3.0, reference=True), fake("uniform")]
    for file, flags in (("a.json", ()), ("b.json", ("--phases",))):
        assert measured(models, *flags).status == 0
        (tmp_path / "results.json").rename(tmp_path / file)
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for order in (files, files[::-1]):
        shown = compare_q("show", *order)
        assert "Decode beside prefill" in shown.out
        assert "uniform keeps" in shown.out.splitlines()[-1]  # and does not stand beside itself in decode


def test_a_model_whose_prefill_failed_is_ranked_by_its_decode(
    measured: Compare, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = FakeEngine.pieces

    def in_decode_alone(engine: FakeEngine, window: Window) -> Iterator[torch.Tensor]:
        if engine.request.decode is None and engine.request.label == "b":
            raise ModelError("no prefill today")
        return pieces(engine, window)

    monkeypatch.setattr(FakeEngine, "pieces", in_decode_alone)
    ran = measured([fake("a", boost=2.0), fake("b", boost=3.0)], "--phases")
    assert ran.models["b"]["error"] == "no prefill today"
    said = ran.out.splitlines()[-1]
    assert said.startswith("b decode has the lowest PPL")
    assert "a decode" not in said


def compared_with(kld: Mean, noise: Mean) -> OwnPrefill:
    """What a model in decode and its prefill with noise, of these KLDs from the prefill, say of each other."""
    spec = {"load_fn": "fake", "label": "decode", "phase": "decode"}
    floor = replace(with_against(QUANT, kld=noise), label="noise", spec={"noise_floor": True})
    decode = replace(with_against(QUANT, kld=kld), label="decode", spec=spec)
    return of_text(Session(Cache(Path("nowhere")), Progress()), run_of(REF, decode, floor), None, "")["decode"]


def test_noise_without_a_finite_kld_is_no_noise_floor() -> None:
    """A limit that is not known is exceeded by nothing."""
    own = compared_with(Mean(0.1, 4.0, 40, 0), Mean(None, 0.0, 0, 40))
    assert (own.noise, own.no_noise, own.differs) == (None, "it has no KLD", False)


def test_a_decode_that_is_not_finite_where_the_noise_is_differs() -> None:
    """Means leave out what is not finite, so that the mean alone would show the best of decodes."""
    alike, broken = (compared_with(Mean(0.001, 0.037, 37, 3), Mean(0.001, 0.04, 40 - off, off)) for off in (3, 0))
    assert (alike.differs, broken.differs, broken.is_above) == (False, True, False)
    prefill = replace(QUANT, spec={"load_fn": "fake"})
    text = run_of(
        REF, prefill, replace(QUANT, label="decode", spec={"load_fn": "fake", "phase": "decode"}, own_prefill=broken)
    )
    assert phases.notes_of(text) == [
        "\N{DOUBLE EXCLAMATION MARK} decode: 3 more tokens than with rounding noise have no finite KLD from W4A16, and "
        "no part in the mean; generation is not what prefill measures"
    ]
    assert "Decode differs from the same model's prefill by more than rounding noise: decode." in verdict(
        results_of(text)
    )


def test_one_window_does_not_tell_where_decode_differs() -> None:
    own, spec = OwnPrefill(Mean(0.1, 4.0, 40, 0), Mean(0.9, 36, 40, 0), Mean(0.2, 8.0, 40, 0)), {"load_fn": "fake"}
    shown = []
    for windows in (1, 2):
        rows = (
            replace(QUANT, spec={**spec, **keys}, label=label, own_prefill=own if keys else None, windows=windows)
            for label, keys in (("a", {}), ("a decode", {"phase": "decode"}))
        )
        shown.append(phases.columns_of(run_of(*rows))[-1].cells[0].value)
    assert shown == ["n/a", "nowhere"]


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
