"""``check`` refuses what a run refuses before anything loads, by the same words, and what takes no time comes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compare_q.eval.text import windows
from tests.support.command_line import FAKE, Run, Specs
from tests.support.comparisons import fake

TWO: list[dict[str, Any]] = [fake("ref", reference=True), fake("other")]


@pytest.mark.parametrize(
    ("models", "flags", "said"),
    [
        ([{**FAKE, "load_fn": "fkae"}], [], "fake: load_fn: unknown engine 'fkae' (did you mean 'fake'?)"),
        ([FAKE], ["--divergences"], "--divergences: there is no reference"),
        (TWO, ["-o", "no/r.json"], "--output: no/r.json: cannot be written; there is no folder no"),
        (TWO, ["--plots", "data.json"], "--plots: data.json: is read here, or lies in a folder that is; name another"),
        (TWO, ["--tokens-out", "file"], "--tokens-out: file: cannot be written; is the folder yours?"),
        (TWO, ["--csv", "x", "--html", "x"], "--html: x: is the file of --csv as well; name another file"),
        (TWO, ["-pf", "p.bmp"], "--plot_file: p.bmp: must end in .png, .svg, .pdf"),
        (TWO, ["--sort", "kld:there"], "--sort: kld:there: "),
    ],
)  # fmt: skip
def test_what_a_run_refuses_is_refused_before_a_text_is_tokenized(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, models: list[dict[str, Any]],
    flags: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(windows, "build", lambda *_, **__: pytest.fail("tokenized"))
    Path("file").touch()
    write_specs(models)
    words = ["-d", "data.json", "-m", "models.json", *flags]
    for ran in (compare_q("check", *words), compare_q(*words)):
        assert ran.status == 2
        assert f"error: {said}" in ran.err
        assert "downloaded" not in ran.out


def test_a_check_leaves_nothing_where_a_run_would_write(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    data, models = write_specs(TWO)
    before = set(Path().iterdir())
    ran = compare_q("check", "-d", data, "-m", models, "--plots", "a/b", "--tokens-out", "c", "-o", "d.json")
    assert ran.status == 0, ran.err
    assert set(Path().iterdir()) == before
