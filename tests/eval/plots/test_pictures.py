"""Pictures of a run: the files, the missing pictures with their reasons, and the content of each
picture.
"""

from pathlib import Path

import pytest
from matplotlib.legend import Legend

from compare_q.eval.common.output_files import Outputs
from compare_q.eval.plots import measures, picture_style, pictures
from compare_q.eval.plots.measures import KLD
from compare_q.eval.results import RunResult
from compare_q.eval.stats.slices import Slice
from tests.support.figures import FLOOR, MARKED, artists_of_kind, real_run
from tests.support.made import BASE, FAILED, replace, run_of

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unplaced")]

SCATTER = ("ppl_bpw", "ppl_vram", "ppl_size", "kld_bpw", "kld_vram", "kld_size", "kld_p99.9_size")
OTHERS = ("slices", "kld_percentiles", "loss_by_position", "kld_by_position")


def small() -> RunResult:
    """Four rows of the real table: reference, noise floor, a marked row, EXL3; each has one slice
    of all its tokens.
    """
    models = []
    for label in ("bf16 vLLM", FLOOR, MARKED, "EXL3 4.0 bpw"):
        model = next(each for each in real_run().models if each.label == label)
        whole = Slice(model.tokens, model.ppl, model.ppl_stderr, model.kld, model.kld_stderr)
        models.append(replace(model, slices={"rest": whole}))
    return replace(real_run(), models=tuple(models))


def test_every_picture_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(picture_style, "DPI", 40)  # 160 takes three times as long
    some = {name: pictures.SCATTER[name] for name in ("ppl_bpw", "kld_p99.9_size")}
    monkeypatch.setattr(pictures, "SCATTER", some)
    pictures.write_all(small(), tmp_path, Outputs())
    expected = {f"{name}.{suffix}" for name in (*some, *OTHERS) for suffix in ("png", "svg")}
    assert {file.name for file in tmp_path.iterdir() if file.stat().st_size} == expected
    said = capsys.readouterr().out.splitlines()
    assert sorted(said) == sorted(f"plot: {tmp_path / name}" for name in expected)


def test_legends_name_only_what_differs() -> None:
    drawn = pictures.pictures_of(small())

    def legend_of(name: str) -> list[str]:
        return [
            text.get_text()
            for legend in drawn[name]().findobj(Legend)
            for text in legend.get_texts()
        ]

    families = ["bf16", "EXL3", "FP4"]
    assert legend_of("loss_by_position") == families
    assert legend_of("kld_bpw") == [*families, "exllamav3", "vllm_score"]
    one = pictures.pictures_of(small().updated(models=small().models[:1]))["ppl_bpw"]()
    assert not one.findobj(Legend)


def test_without_a_reference_only_perplexity_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(picture_style, "save_figure", lambda *_: None)
    pictures.write_all(run_of(BASE, FAILED, reference=None), tmp_path, Outputs())
    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition("/")[2] for line in lines if line.startswith("plot: ")] == [
        f"{name}.{suffix}"
        for name in ("ppl_bpw", "ppl_vram", "loss_by_position")
        for suffix in ("png", "svg")
    ]
    others = [line for line in lines if not line.startswith("plot: ")]
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


def test_pictures_show_what_the_run_holds() -> None:
    found = {name: draw() for name, draw in pictures.pictures_of(small()).items()}
    words = {"bpw": "Bits per weight", "vram": "Stored weights", "size": "Weight files"}
    for name in SCATTER:
        assert found[name].axes[0].get_xlabel().startswith(words[name.rpartition("_")[2]])
    rows = [text.get_text() for text in artists_of_kind(found["kld_percentiles"], "label")]
    assert rows == [FLOOR, "EXL3 4.0 bpw", f"{MARKED} †"]
    assert "†: " in found["kld_percentiles"].axes[0].texts[0].get_text()
    bars = [bar.get_width() for bar in artists_of_kind(found["slices"], "bar")]
    assert bars == [small().models[3].kld, small().models[2].kld]
    loss, kld = found["loss_by_position"], found["kld_by_position"]
    assert (len(artists_of_kind(loss, "line")), len(artists_of_kind(kld, "line"))) == (4, 3)
    assert (loss.axes[0].get_yscale(), kld.axes[0].get_yscale()) == ("linear", "log")
    assert kld.axes[0].get_ylabel() == measures.kld_axis(small(), KLD)
    curve = small().models[3].curve
    assert curve is not None
    assert artists_of_kind(kld, "line")[2].get_ydata().tolist() == list(curve.kld or ())
    assert artists_of_kind(loss, "line")[3].get_ydata().tolist() == list(curve.nll)
