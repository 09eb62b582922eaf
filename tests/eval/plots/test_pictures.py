"""All pictures of a run: which files there are, what is skipped and why, the same bytes each time."""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from compare_q.eval.common.files import Outputs
from compare_q.eval.plots import measures, pictures, style
from compare_q.eval.results.run_result import TextResult
from tests.support import real_table
from tests.support.drawn import artists_of_kind
from tests.support.made import BASE, FAILED, QUANT, REF, run_of

pytestmark = pytest.mark.slow

NAMES = ("ppl_bpw", "ppl_vram", "ppl_size", "kld_bpw", "kld_vram", "kld_size", "kld_p99.9_size", "kld_spread",
         "kld_histograms", "loss_by_position", "kld_by_position")  # fmt: skip


def small() -> TextResult:
    """Four rows of the real table: reference, noise floor, a marked one, EXL3."""
    models = {model.label: model for model in real_table.real_text().models}
    kept = ("bf16 vLLM", real_table.FLOOR, real_table.MARKED, "EXL3 4.0 bpw")
    return replace(real_table.real_text(), models=tuple(models[label] for label in kept))


@functools.cache
def drawn() -> dict[str, Figure]:
    """The pictures of the small run, each drawn once, for tests that ask for ``unwritten``."""
    return {name: draw() for name, draw in pictures.all_pictures(small()).items()}


def test_every_picture_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], unplaced: None
) -> None:
    monkeypatch.setattr(style, "DPI", 40)  # at 160 the files take three times as long
    some = {name: pictures.SCATTER[name] for name in ("ppl_bpw", "kld_p99.9_size")}
    monkeypatch.setattr(pictures, "SCATTER", some)
    pictures.write_pictures(small(), tmp_path, Outputs())
    expected = {f"{name}.{suffix}" for name in (*some, *NAMES[7:]) for suffix in ("png", "svg")}
    assert {file.name for file in tmp_path.iterdir() if file.stat().st_size} == expected
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == sorted(f"plot: {tmp_path / name}" for name in expected)


@pytest.fixture
def unwritten(monkeypatch: pytest.MonkeyPatch, unplaced: None) -> None:
    """Nothing is written, and labels stay on their points."""
    monkeypatch.setattr(style, "save_figure", lambda *_: None)


def test_without_a_reference_only_perplexity_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unwritten: None
) -> None:
    pictures.write_pictures(run_of(BASE, FAILED, reference=None), tmp_path, Outputs())
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines if line.startswith("plot: ")] == [
        f"{name}.{suffix}" for name in ("ppl_bpw", "ppl_vram", "loss_by_position") for suffix in ("png", "svg")
    ]
    assert [line for line in lines if not line.startswith("plot: ")] == [
        "broken: not in the plot: PPL unknown",
        "no ppl_size: no model has both PPL and file size within the limits",
        "no kld_bpw: no model has both KLD and bits per weight within the limits",
        "no kld_vram: no model has both KLD and VRAM within the limits",
        "no kld_size: no model has both KLD and file size within the limits",
        "no kld_p99.9_size: no model has both 99.9 % KLD and file size within the limits",
        "no kld_spread: no model was compared with a reference",
        "no kld_histograms: no model was compared with a reference",
        "no kld_by_position: no model has scores by position",
    ]


def test_each_model_that_is_missing_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], unwritten: None
) -> None:
    ref, quant, base = (replace(each, storage=replace(each.storage, file_bytes=10**9)) for each in (REF, QUANT, BASE))
    sizeless = replace(quant, label="sizeless", storage=replace(quant.storage, bpw_layer=None))
    pictures.write_pictures(run_of(ref, quant, base, sizeless), tmp_path, Outputs())
    assert [line for line in capsys.readouterr().out.splitlines() if not line.startswith("plot: ")] == [
        "sizeless: not in the plot: bits per weight unknown",
        "base: not in the plot: KLD unknown",
        "base: not in the plot: 99.9 % KLD unknown",
    ]


def test_titles_are_the_pictures_own_or_the_one_given(unwritten: None) -> None:
    own = {name: figure.axes[0].get_title(loc="left") for name, figure in drawn().items()}
    assert own == {
        **dict.fromkeys(("ppl_bpw", "ppl_vram", "ppl_size"), "Perplexity of quantized models"),
        **dict.fromkeys(("kld_bpw", "kld_vram", "kld_size"), "KL divergence of quantized models"),
        "kld_p99.9_size": "99.9 % KLD of quantized models",
        **dict.fromkeys([name for name in own if name in NAMES[7:9]], "KL divergence of single tokens"),
        "loss_by_position": "Loss by position in the window",
        "kld_by_position": "KL divergence by position in the window",
    }
    mine = pictures.all_pictures(small(), title="Mine", dark=True)
    for name in ("ppl_bpw", *NAMES[7:]):
        figure = mine[name]()
        assert figure.axes[0].get_title(loc="left") == "Mine"
        assert figure.get_facecolor()[:3] < (0.2, 0.2, 0.2)


def test_pictures_show_what_the_run_holds(unwritten: None) -> None:
    found = drawn()
    words = {"bpw": "Bits per weight", "vram": "Stored weights", "size": "Weight files"}
    for name in NAMES[:7]:
        assert found[name].axes[0].get_xlabel().startswith(words[name.rpartition("_")[2]])
    for name in ("kld_spread", "kld_histograms"):
        rows = [text.get_text() for text in artists_of_kind(found[name], "label")]
        assert rows == ["bf16 Transformers", "EXL3 4.0 bpw", "NVFP4 W4A4 as run †"]
        assert "†: ran otherwise than its checkpoint asks" in found[name].axes[0].texts[0].get_text()
        assert len(artists_of_kind(found[name], "level")) == 1
    loss, kld = found["loss_by_position"], found["kld_by_position"]
    assert (len(artists_of_kind(loss, "line")), len(artists_of_kind(kld, "line"))) == (4, 3)
    assert (loss.axes[0].get_yscale(), kld.axes[0].get_yscale()) == ("linear", "log")
    assert kld.axes[0].get_ylabel() == measures.kld_axis(small())
    assert artists_of_kind(loss, "line")[0].get_linewidth() == 3.0
    curve = small().models[3].estimates.curve  # type: ignore[union-attr]
    assert artists_of_kind(kld, "line")[2].get_ydata().tolist() == list(curve.kld or ())
    assert artists_of_kind(loss, "line")[3].get_ydata().tolist() == list(curve.nll)


def test_a_group_has_one_colour_in_all_pictures(unwritten: None) -> None:
    found = pictures.all_pictures(real_table.real_text())
    scatter = found["kld_bpw"]()
    points = {
        text.get_text(): mark
        for text, mark in zip(artists_of_kind(scatter, "label"), artists_of_kind(scatter, "point"), strict=True)
    }
    row = next(text for text in artists_of_kind(found["kld_spread"](), "label") if text.get_text() == "W8A16 g128")
    colour = points["W8A16 g128\n0.00360"].get_color()
    assert row.get_color() == style.ink_of(colour, style.LIGHT)
