"""Engines that ``$COMPARE_Q_ENGINES`` adds."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from compare_q import backends
from compare_q.backends.common.errors import InputError
from tests.support import fake_engine
from tests.support.toy import Ran, Specs

OTHER = """
from tests.support.fake_engine import FakeEngine
from dataclasses import replace

class Other(FakeEngine):
    capabilities = replace(FakeEngine.capabilities, load_fns=({names}))
"""


@pytest.mark.engine
def test_an_engine_of_the_users_runs_in_a_worker(
    tmp_path: Path,
    write_specs: Specs,
    compare_q: Callable[..., Ran],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = OTHER.format(names="'other', 'second_name'")
    (tmp_path / "other_engine.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COMPARE_Q_ENGINES", f"{fake_engine.LOCATION}, other_engine:Other")
    monkeypatch.setenv("COMPARE_Q_IN_PROCESS", "0")
    spec = {"model_dir": "none", "engine": {"vocab_size": 300}}
    first = {**spec, "load_fn": "fake", "label": "fake"}
    second = {**spec, "load_fn": "second_name", "label": "second_name"}
    data, specs = write_specs([first, second])
    # The second time with another source file of the second engine.
    for cached in ([False, False], [True, False]):
        assert compare_q("-d", data, "-m", specs, "-o", tmp_path / "r.json").status == 0
        rows = json.loads((tmp_path / "r.json").read_text())["models"]
        assert [row["ppl"] for row in rows] == pytest.approx([300.0, 300.0])
        assert [row["from_cache"] for row in rows] == cached
        (tmp_path / "other_engine.py").write_text(f"{source}# changed")


@pytest.mark.parametrize(
    "location",
    [
        "nothing",
        "no_such_module:Engine",
        "json:Engine",
        "json:JSONDecoder",
        "broken_engine:E",
        "taken_engine:Other",
        ":",
    ],
)
def test_what_is_no_engine_is_refused_by_its_name(
    tmp_path: Path,
    location: str,
    compare_q: Callable[..., Ran],
    write_specs: Specs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "broken_engine.py").write_text("1 / 0")
    (tmp_path / "taken_engine.py").write_text(OTHER.format(names="'taken', 'vllm_score'"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("COMPARE_Q_ENGINES", location)
    with pytest.raises(InputError) as error:
        backends.engines()
    assert str(error.value).startswith(f"COMPARE_Q_ENGINES: {location}: ")
    ran = compare_q("engines")
    assert (ran.status, ran.out, ran.err) == (2, "", f"error: {error.value}\n")
    # A run of several models says it once.
    model = {"load_fn": "transformers", "model_dir": "none"}
    data, models = write_specs([{**model, "label": label} for label in "ab"])
    ran = compare_q("-d", data, "-m", models)
    assert (ran.status, ran.out) == (2, "")
    assert ran.err.splitlines()[-1] == f"error: {error.value}"
    assert ran.err.count(str(error.value)) == 1
