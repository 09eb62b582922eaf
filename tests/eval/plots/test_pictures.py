"""Pictures of a run: files, missing pictures with their reasons, content of each picture."""

from pathlib import Path

import pytest

from compare_q.eval.common.output_files import Outputs
from compare_q.eval.plots import measures, picture_style, pictures
from compare_q.eval.plots.measures import KLD
from compare_q.eval.results import RunResult
from compare_q.eval.stats.slices import Slice
from tests.support.figures import FLOOR, MARKED, artists_of_kind, legend_of, real_run, texts_of
from tests.support.made import BASE, FAILED, replace, run_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unplaced")]

SCATTER = ("ppl_bpw", "ppl_vram", "ppl_size", "kld_bpw", "kld_vram", "kld_size", "kld_p99.9_size")
OTHERS = ("slices", "kld_percentiles", "loss_by_position", "kld_by_position")


def small() -> RunResult:
    """Return four rows of the real table: reference, noise floor, a marked row, EXL3.

    Each has one slice of all its tokens.
    """
    real_models = {model.label: model for model in real_run().models}
    models = []
    for label in ("bf16 vLLM", FLOOR, MARKED, "EXL3 4.0 bpw"):
        model = real_models[label]
        all_tokens = Slice(model.tokens, model.ppl, model.ppl_stderr, model.kld, model.kld_stderr)
        models.append(replace(model, slices={"rest": all_tokens}))
    return replace(real_run(), models=tuple(models))


def test_every_picture_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # 160 takes three times as long.
    monkeypatch.setattr(picture_style, "DPI", 40)
    some = {name: pictures.SCATTER[name] for name in ("ppl_bpw", "kld_p99.9_size")}
    monkeypatch.setattr(pictures, "SCATTER", some)
    pictures.write_all(small(), tmp_path, Outputs())
    gold = []
    for name in (*some, *OTHERS):
        gold += [tmp_path / f"{name}.png", tmp_path / f"{name}.svg"]
    assert sorted(tmp_path.iterdir()) == sorted(gold)
    assert all(file.stat().st_size for file in gold)
    assert capsys.readouterr().out.splitlines() == [f"plot: {file}" for file in gold]


def test_legends_name_only_what_differs() -> None:
    drawn = pictures.pictures_of(small())
    families = ["bf16", "EXL3", "FP4"]
    assert legend_of(drawn["loss_by_position"]()) == families
    assert legend_of(drawn["kld_bpw"]()) == [*families, "exllamav3", "vllm_score"]
    one_model = small().updated(models=small().models[:1])
    assert legend_of(pictures.pictures_of(one_model)["ppl_bpw"]()) == []


def test_without_a_reference_only_perplexity_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_style, "save_figure", lambda *_: None)
    pictures.write_all(run_of(BASE, FAILED, reference=None), tmp_path, Outputs())
    lines = capsys.readouterr().out.splitlines()
    drawn = [line for line in lines if line.startswith("plot: ")]
    gold = []
    for name in ("ppl_bpw", "ppl_vram", "loss_by_position"):
        gold += [f"plot: {tmp_path / name}.png", f"plot: {tmp_path / name}.svg"]
    assert drawn == gold
    others = [line for line in lines if line not in drawn]
    assert others[0] == "broken: not in the plot: PPL unknown"
    missing = (
        "ppl_size",
        "kld_bpw",
        "kld_vram",
        "kld_size",
        "kld_p99.9_size",
        "slices",
        "kld_percentiles",
        "kld_by_position",
    )
    assert [line.partition(":")[0] for line in others[1:]] == [f"no {name}" for name in missing]


AXIS_WORDS = {"bpw": "Bits per weight", "vram": "Stored weights", "size": "Weight files"}
"""Last word of a scatter plot's name -> beginning of its x axis."""


@pytest.mark.parametrize("name", SCATTER)
def test_scatter_plots_have_the_axes_of_their_names(name: str) -> None:
    figure = pictures.pictures_of(small())[name]()
    assert figure.axes[0].get_xlabel().startswith(AXIS_WORDS[name.rpartition("_")[2]])


def test_percentiles_have_a_row_for_each_compared_model() -> None:
    figure = pictures.pictures_of(small())["kld_percentiles"]()
    rows = texts_of(figure, "label")
    assert rows == [FLOOR, "EXL3 4.0 bpw", f"{MARKED} †"]
    assert "†: " in figure.axes[0].texts[0].get_text()


def test_slices_have_a_bar_for_each_quantized_model() -> None:
    figure = pictures.pictures_of(small())["slices"]()
    bars = [bar.get_width() for bar in artists_of_kind(figure, "bar")]
    assert bars == [small().models[3].kld, small().models[2].kld]


def test_positions_have_a_line_for_each_model() -> None:
    drawn = pictures.pictures_of(small())
    loss = drawn["loss_by_position"]()
    kld = drawn["kld_by_position"]()
    loss_lines = artists_of_kind(loss, "line")
    kld_lines = artists_of_kind(kld, "line")
    assert (len(loss_lines), len(kld_lines)) == (4, 3)
    assert (loss.axes[0].get_yscale(), kld.axes[0].get_yscale()) == ("linear", "log")
    assert kld.axes[0].get_ylabel() == measures.kld_axis(small(), KLD)
    curve = small().models[3].curve
    assert curve is not None
    assert kld_lines[2].get_ydata().tolist() == list(curve.kld or ())
    assert loss_lines[3].get_ydata().tolist() == list(curve.nll)
