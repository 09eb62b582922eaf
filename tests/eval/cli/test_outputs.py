"""Files and plots of the command line, and outputs that cannot be written."""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import stat
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow.parquet as parquet
import pytest

from compare_q.backends.base import Storage
from compare_q.eval.plots import measures, pictures
from tests.support.made import FAILED, QUANT, REF, replace, run_of
from tests.support.toy import FAKE, Run, Specs, assert_refused


def test_plot_is_written(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plot is compare_q.png unless a file is named; axis limits may exclude all points."""
    monkeypatch.chdir(tmp_path)
    models = [
        {
            **FAKE,
            "label": f"EXL3 {bits}",
            "override_bpw_layer": bits,
            "override_vram_bits": 8e9 * bits,
            "engine": {"boost": bits},
        }
        for bits in (2.0, 3.0, 4.0)
    ]
    data, spec = write_specs(models)
    for name, flags in (
        ("compare_q.png", ["-p"]),
        ("p.svg", ["-pf", "p.svg", "-v", "-dark", "-t", "My title"]),
    ):
        ran = compare_q("-d", data, "-m", spec, *flags)
        assert ran.status == 0, ran.err
        assert f"plot: {name}" in ran.out
    assert Path("compare_q.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in Path("p.svg").read_text()
    ran = compare_q("-d", data, "-m", spec, "-pf", "none.png", "-mx", "1")
    assert ran.status == 2
    assert "no plot: no model has both PPL and bits per weight within the limits" in ran.out
    # The table is printed.
    assert "EXL3 2.0" in ran.out
    assert not Path("none.png").exists()


def test_nothing_to_draw_is_an_error(compare_q: Run, tmp_path: Path) -> None:
    """The plot of rows without a size, of rows without PPL, and a folder of plots of them; results
    are written.
    """
    file = tmp_path / "r.json"
    for model, flags in (
        (
            replace(REF, bpw_layer=None, storage=Storage(None, None, None)),
            ["-pf", tmp_path / "p.png"],
        ),
        (FAILED, ["--card", tmp_path / "c.svg"]),
        (FAILED, ["--plots", tmp_path / "plots"]),
    ):
        run_of(model).with_origin([]).write(file)
        ran = compare_q("show", file, *flags, "--csv", tmp_path / "r.csv")
        assert ran.status == 2
        assert len(ran.err.splitlines()) == 1
        assert str(flags[1]) in ran.err
        assert (tmp_path / "r.csv").stat().st_size
        (tmp_path / "r.csv").unlink()


def test_characters_that_no_picture_can_show(compare_q: Run, tmp_path: Path) -> None:
    """The font lacks Chinese: one line for all labels and pictures.  No control character of a
    label is written.
    """
    models = []
    for name in ("模型", "型号", "日本", "model"):
        models.append(replace(QUANT, label=f"{name} \x1b[31mred\x07"))
    run_of(REF, *models, title="\x1b]0;title\x07 漢").with_origin([]).write(tmp_path / "r.json")
    files = {
        "--html": tmp_path / "r.html",
        "-pf": tmp_path / "p.svg",
        "--card": tmp_path / "c.svg",
        "--markdown": tmp_path / "r.md",
    }
    ran = compare_q("show", tmp_path / "r.json", *itertools.chain(*files.items()))
    assert ran.status == 0, ran.err
    assert not ran.err
    (line,) = [line for line in ran.out.splitlines() if " 模 " in line]
    for character in "型号日本漢":
        assert f" {character}" in line
    for text in [ran.out, *map(Path.read_text, files.values())]:
        assert not set(text) & {"\x1b", "\x07"}
    for flag in ("-pf", "--card"):
        # A control character would make the XML invalid.
        ElementTree.parse(files[flag])


def test_a_plot_may_lie_beside_a_model(
    compare_q: Run, toy_model: Path, toy_text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``cd mine; compare-q ../BF16 . -p``; no table of tokens and no JSON, which an engine may
    read, goes there.
    """
    mine = tmp_path / "mine"
    shutil.copytree(toy_model, mine)
    monkeypatch.chdir(mine)
    before = set(mine.iterdir())
    line = [f"{toy_model}@fake", "mine=.@fake:boost=2", "-d", toy_text, "--eval-len", 64, "-r", 2]
    ran = compare_q(*line, "-p", "-ppl", "--html", "r.html")
    assert ran.status in (0, 2), ran.err
    assert "--plot_file" not in ran.err
    assert (mine / "r.html").exists()
    for flags in (
        ["-o", "r.json"],
        ["--tokens-out", "."],
        ["--save-specs", "new"],
        ["-pf", "config.json"],
    ):
        assert compare_q(*line, *flags).status == 2
    assert {file.name for file in set(mine.iterdir()) - before} <= {"r.html", "compare_q.png"}


def test_flags_of_the_plot(
    compare_q: Run, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: list[Any] = []
    monkeypatch.setattr(
        pictures,
        "draw",
        lambda run, file, outputs, measure, **keys: arguments.append(
            (file, {"measure": measure, **keys})
        ),
    )
    plot = tmp_path / "p.svg"
    plain = {
        "size": measures.BPW,
        "measure": measures.KLD,
        "max_x": math.inf,
        "max_y": math.inf,
        "dark": False,
        "log_y": None,
        "card": False,
    }
    expected = {"size": measures.VRAM, "max_x": 3.0, "max_y": 4.0, "dark": True, "log_y": False}
    words = (
        "-kld",
        "-v",
        "-mx",
        3,
        "-my",
        4,
        "-t",
        "T",
        "-dark",
        "--no-log_y",
        f"-output={tmp_path / 'r.json'}",
    )
    posted = {"size": measures.FILE_SIZE, "measure": measures.KLD_VALUES["p99.9"]}
    for flag, flags, changed in (
        ("-pf", (), {}),
        ("--plot-file", words, expected),
        ("-plot_file", ("-ppl",), {"measure": measures.PPL}),
        ("--plot_file", ("--x-axis", "size", "--kld-value", "p99.9"), posted),
    ):
        assert compare_q("show", finished, flag, plot, *flags).status == 0
        assert arguments.pop() == (plot, plain | changed)
    assert (tmp_path / "r.json").exists()
    card = tmp_path / "card.png"
    assert compare_q("show", finished, "--card", card, "-v").status == 0
    assert arguments == [(card, plain | {"card": True, "size": measures.VRAM})]


def test_tokens_out(compare_q: Run, write_specs: Specs, tmp_path: Path) -> None:
    """Two labels with the same file name get two files; a failed model does not use its name."""
    models = [
        {**FAKE, "label": "one [x]"},
        {**FAKE, "label": "ONE/[x]", "engine": {"fail": 0}},
        {**FAKE, "label": "one__x_", "engine": {"boost": 1.0}},
    ]
    data, spec = write_specs(models)
    ran = compare_q("-d", data, "-m", spec, "--tokens-out", tmp_path / "deep" / "tokens")
    assert ran.status == 1, ran.err
    files = sorted((tmp_path / "deep" / "tokens").iterdir())
    assert [file.name for file in files] == ["one__x_-3.parquet", "one__x_.parquet"]
    assert f"tokens of one__x_: {files[0]}" in ran.out
    # The file with -3 is the third model's, and - comes before the dot.
    boosted, uniform = map(parquet.read_table, files)
    assert boosted.num_rows == uniform.num_rows == 9 * 99
    assert {"window", "position", "token_id", "logprob"} <= set(uniform.column_names)
    assert min(boosted["logprob"].to_pylist()) > max(uniform["logprob"].to_pylist())


READ = (
    "--output data.json",
    "--csv models.json",
    "--output text.parquet",
    "--tokens-out .",
    "--output over.safetensors",
    "--csv chat.jinja",
    "--markdown python",
    "--plots mod",
    "--tokens-out mod/new",
    "--html ds/r.html",
    "--plots ds",
    "--output files/a.jsonl",
    "--plots tok/new",
)
"""Outputs that would replace an input file, or be written into an input folder."""


@pytest.mark.parametrize("flag", READ)
def test_nothing_that_is_read_is_written(
    compare_q: Run, write_specs: Specs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    """No path in a spec is written; nor is a file written into a folder of a spec, because it might
    be read later.
    """
    monkeypatch.chdir(tmp_path)
    for folder in ("ds", "files", "mod", "tok"):
        (tmp_path / folder).mkdir()
    for name in (
        "text.parquet",
        "over.safetensors",
        "chat.jinja",
        "python",
        "ds/a.jsonl",
        "files/a.jsonl",
    ):
        (tmp_path / name).write_text("{}")
    model = {"label": "text", "python": "python", "engine": {"meet": "chat.jinja"}}
    texts: list[dict[str, object]] = [
        {"path": "text.parquet", "tokenizer_dir": "tok"},
        {"dataset": "ds", "path": ...},
        {"dataset": "json", "path": ..., "dataset_data_files": {"test": ["files/*.jsonl"]}},
    ]
    specs = []
    for text in texts:
        data, models = write_specs(
            [{**FAKE, **model, "model_dir": ["mod", "over.safetensors"]}], **text
        )
        specs.append(json.loads(data.read_text()))
    # Several texts have folders.
    if flag == "--tokens-out .":
        specs = specs[:1]
    data.write_text(json.dumps(specs))
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    ran = compare_q("-d", data, "-m", models, *flag.split())
    assert_refused(
        ran, f"{flag.split()[0]}: ", "is read here, or lies in a folder that is; name another"
    )
    assert all(file.read_bytes() == content for file, content in before.items())
    assert not list(tmp_path.rglob("new"))


def device(file: Path, minor: int) -> Path:
    """Create a copy of /dev/null (3) or /dev/full (7), which a test may damage."""
    try:
        os.mknod(file, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    except PermissionError:
        pytest.skip("only root makes devices")
    return file


def test_devices_are_written_through_by_every_output(
    compare_q: Run, finished: Path, tmp_path: Path
) -> None:
    """Outputs are written to a device; a file must not replace the device, not even if root runs
    compare_q.
    """
    targets = {}
    for flag in ("-o", "--csv", "--markdown", "--html", "-pf", "--card"):
        # A picture needs a suffix.
        targets[flag] = device(tmp_path / f"full{flag}.png", 7)
    ran = compare_q("show", finished, *itertools.chain(*targets.items()))
    failed_files = set()
    for line in ran.err.splitlines():
        file, _, reason = line.partition(": could not be written: ")
        failed_files.add(file)
        assert reason.startswith("No space left on device; ")
    assert failed_files == {f"error: {file}" for file in targets.values()}
    assert len(ran.err.splitlines()) == len(targets)
    assert ran.status == 2
    null = device(tmp_path / "null", 3)
    assert compare_q("show", finished, "-o", null).status == 0
    for file in (*targets.values(), null):
        assert stat.S_ISCHR(file.lstat().st_mode)
