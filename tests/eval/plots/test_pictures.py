"""Pictures of a run: the files, the missing pictures with their reasons, and the content of each picture."""

from pathlib import Path

import pytest
from matplotlib.legend import Legend

from compare_q.eval.common.files import Outputs
from compare_q.eval.plots import measures, pictures, style
from compare_q.eval.plots.measures import KLD
from compare_q.eval.results import TextResult
from tests.support.figures import FLOOR, MARKED, artists_of_kind, real_text
from tests.support.made import BASE, FAILED, replace, run_of, run_result
from tests.support.several_texts import three, with_failed_text

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unplaced")]

SCATTER = ("ppl_bpw", "ppl_vram", "ppl_size", "kld_bpw", "kld_vram", "kld_size", "kld_p99.9_size")
OTHERS = ("kld_percentiles", "loss_by_position", "kld_by_position")


def small() -> TextResult:
    """Four rows of the real table: reference, noise floor, a marked row, EXL3."""
    models = {model.label: model for model in real_text().models}
    kept = ("bf16 vLLM", FLOOR, MARKED, "EXL3 4.0 bpw")
    return replace(real_text(), models=tuple(models[label] for label in kept))


def test_every_picture_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(style, "DPI", 40)  # 160 takes three times as long
    some = {name: pictures.SCATTER[name] for name in ("ppl_bpw", "kld_p99.9_size")}
    monkeypatch.setattr(pictures, "SCATTER", some)
    pictures.write_all(run_result((small(),)), tmp_path, Outputs())
    expected = {f"{name}.{suffix}" for name in (*some, *OTHERS) for suffix in ("png", "svg")}
    assert {file.name for file in tmp_path.iterdir() if file.stat().st_size} == expected
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == sorted(f"plot: {tmp_path / name}" for name in expected)


def test_legends_name_only_what_differs() -> None:
    drawn = pictures.pictures_of(small())

    def legend_of(name: str) -> list[str]:
        return [text.get_text() for legend in drawn[name]().findobj(Legend) for text in legend.get_texts()]

    families = ["bf16", "EXL3", "FP4"]
    assert legend_of("loss_by_position") == families
    assert legend_of("kld_bpw") == [*families, "exllamav3", "vllm_score"]
    one = pictures.pictures_of(small().updated(models=small().models[:1]))["ppl_bpw"]()
    assert not one.findobj(Legend)


def test_several_texts_have_a_picture_of_their_means_and_a_folder_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder's name is a safe file name, and differs from the names of the files."""
    monkeypatch.setattr(style, "DPI", 40)
    monkeypatch.setattr(pictures, "SCATTER", {"kld_bpw": pictures.SCATTER["kld_bpw"]})
    odd = ("a/b", "texts.png", "a b")
    named = run_result(tuple(replace(text, name=name) for text, name in zip(three().texts, odd, strict=True)))
    pictures.write_all(with_failed_text(named, "a b", "no such file"), tmp_path, Outputs())
    assert {file.name for file in tmp_path.iterdir()} == {"a_b", "texts.png-2"}  # a text that failed leaves no mean
    assert {"kld_bpw.png", "kld_percentiles.svg"} <= {file.name for file in (tmp_path / "a_b").iterdir()}
    said = capsys.readouterr().out.splitlines()
    assert said[0].startswith("no texts: no model has both KLD and bits per weight")
    assert said[-1] == "no pictures of a b: no such file"
    pictures.write_all(named, tmp_path, Outputs())
    assert (tmp_path / "texts.svg").stat().st_size


def test_without_a_reference_only_perplexity_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(style, "save_figure", lambda *_: None)
    pictures.write_all(run_result((run_of(BASE, FAILED, reference=None),)), tmp_path, Outputs())
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines if line.startswith("plot: ")] == [
        f"{name}.{suffix}" for name in ("ppl_bpw", "ppl_vram", "loss_by_position") for suffix in ("png", "svg")
    ]
    others = [line for line in lines if not line.startswith("plot: ")]
    assert others[0] == "broken: not in the plot: PPL unknown"
    missing = ("ppl_size", "kld_bpw", "kld_vram", "kld_size", "kld_p99.9_size", "kld_percentiles", "kld_by_position")
    assert [line.partition(":")[0] for line in others[1:]] == [f"no {name}" for name in missing]


def test_pictures_show_what_the_run_holds() -> None:
    found = {name: draw() for name, draw in pictures.pictures_of(small()).items()}
    words = {"bpw": "Bits per weight", "vram": "Stored weights", "size": "Weight files"}
    for name in SCATTER:
        assert found[name].axes[0].get_xlabel().startswith(words[name.rpartition("_")[2]])
    rows = [text.get_text() for text in artists_of_kind(found["kld_percentiles"], "label")]
    assert rows == [FLOOR, "EXL3 4.0 bpw", f"{MARKED} †"]
    assert "†: " in found["kld_percentiles"].axes[0].texts[0].get_text()
    loss, kld = found["loss_by_position"], found["kld_by_position"]
    assert (len(artists_of_kind(loss, "line")), len(artists_of_kind(kld, "line"))) == (4, 3)
    assert (loss.axes[0].get_yscale(), kld.axes[0].get_yscale()) == ("linear", "log")
    assert kld.axes[0].get_ylabel() == measures.kld_axis(small(), KLD)
    curve = small().models[3].curve
    assert curve is not None
    assert artists_of_kind(kld, "line")[2].get_ydata().tolist() == list(curve.kld or ())
    assert artists_of_kind(loss, "line")[3].get_ydata().tolist() == list(curve.nll)
