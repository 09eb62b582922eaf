"""``show``: a finished run is shown, sorted, compared and written again."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from compare_q.eval.results import CachePart, Memory
from compare_q.eval.stats.slices import Slice
from compare_q.eval.table.columns import BY_NAME
from tests.support.made import BASE, FAILED, QUANT, REF, replace, run_of
from tests.support.several_texts import three
from tests.support.toy import FAKE, Run, Specs, assert_refused


def test_a_finished_run_is_shown_again(compare_q: Run, finished: Path, tmp_path: Path) -> None:
    """The status is 0, because the results are complete, although a model of the run failed."""
    files = {
        "-o": tmp_path / "o.json",
        "--csv": tmp_path / "o.csv",
        "--markdown": tmp_path / "o.md",
        "--html": tmp_path / "o.html",
        "--plots": tmp_path / "plots",
    }
    ran = compare_q("show", finished, *itertools.chain(*files.items()))
    assert ran.status == 0, ran.err
    assert "broken: failed: told to fail" in ran.out
    assert files["-o"].read_text() == finished.read_text()
    assert files["--csv"].read_text().startswith("label,")
    assert files["--markdown"].read_text().startswith("**letters**")
    assert list(files["--plots"].glob("*.png"))
    again = compare_q("show", files["--html"])
    assert again.out == compare_q("show", finished).out
    for name in ("results", "CSV", "Markdown", "report", "plot"):
        assert f"\n{name}: {tmp_path}" in ran.out


def test_finished_runs_that_cannot_be_shown(compare_q: Run, finished: Path) -> None:
    run_of(BASE, reference=None).with_origin([]).write(finished)
    assert_refused(compare_q("show", finished, "-kld"), "--kld: no model is the reference")
    assert_refused(
        compare_q("show", finished, "--pair", "x", "base"), "--pair: no model is called 'x'"
    )
    # -p takes no file: whoever names one means -pf.
    assert_refused(compare_q("show", finished, "-p", "plot.png"), "plot.png: ", "-pf")
    # Many programs take - for standard output.
    assert_refused(compare_q("show", finished, "--csv", "-"), "--csv: ", "/dev/stdout")
    assert_refused(compare_q("doctor", finished), f"{finished}: ", "compare-q show")
    assert_refused(compare_q("-d", finished, "-m", finished), f"{finished}: ", "compare-q show")
    before = finished.read_bytes()
    assert_refused(compare_q("show", finished, "--csv", finished), "--csv: ", "is read here")
    # It is not written over itself.
    assert finished.read_bytes() == before


def test_rows_are_sorted_in_the_table_and_not_in_the_results(
    compare_q: Run, finished: Path, tmp_path: Path
) -> None:
    run_of(QUANT, FAILED, REF).with_origin([]).write(finished)
    files = (
        "-o",
        tmp_path / "o.json",
        "--csv",
        tmp_path / "o.csv",
        "--markdown",
        tmp_path / "o.md",
    )
    ran = compare_q("show", finished, "--sort", "kld", *files)
    labels = ["bf16", "W4A16", "broken"]
    rows = [
        line for line in ran.out.splitlines() if line.startswith((" bf16 ", " W4A16 ", " broken "))
    ]
    assert [row.split()[0] for row in rows] == labels
    csv_rows = (tmp_path / "o.csv").read_text().splitlines()[1:]
    assert [row.partition(",")[0] for row in csv_rows] == labels
    markdown_rows = (tmp_path / "o.md").read_text().splitlines()[4:7]
    assert [row.split()[1] for row in markdown_rows] == labels
    assert (tmp_path / "o.json").read_text() == finished.read_text()


def test_columns_are_chosen_and_ordered(compare_q: Run, finished: Path, tmp_path: Path) -> None:
    """The columns of table, Markdown, CSV (with errors) and report are the same; the label need not
    be named.
    """
    files = ["--csv", tmp_path / "o.csv", "--markdown", tmp_path / "o.md"]
    files += ["--html", tmp_path / "o.html"]
    ran = compare_q("show", finished, "--columns", "kld_p99.9, kld,kernel", *files)
    row = next(line for line in ran.out.splitlines() if "W4A16" in line)
    assert row.split() == ["W4A16", "0.9990", "0.01235±0.00045", "Linear"]
    csv_lines = (tmp_path / "o.csv").read_text().splitlines()
    assert csv_lines[0] == "label,kld_p99.9,kld,kld_stderr,kernel"
    markdown_lines = (tmp_path / "o.md").read_text().splitlines()
    assert markdown_lines[2] == "| label | 99.9 % KLD | KLD | kernel |"
    head = (tmp_path / "o.html").read_text().partition("<table")[2].partition("</thead>")[0]
    assert re.findall(r"<th[^>]*>([^<]+)</th>", head) == ["label", "99.9 % KLD", "KLD", "kernel"]
    assert_refused(compare_q("show", finished, "--columns", ","), "--columns: ", *BY_NAME)


def test_memory_for_a_context(compare_q: Run, finished: Path, tmp_path: Path) -> None:
    """``memory:N`` is a column, a sort key, a condition and the x axis of a plot: 5.0 + 131,072 B x
    32,768 + 0.5 GB.
    """
    memory = Memory(
        weights=5 * 10**9,
        kv=(CachePart(token_bytes=131_072.0),),
        kv_source="engine",
        logits=0,
        # 244,140 bytes * 2,048 tokens of a step = 0.5 GB.
        step_token=244_140,
    )
    large = replace(REF, memory=memory.updated(weights=16 * 10**9))
    run_of(large, replace(QUANT, memory=memory), BASE).with_origin([]).write(finished)
    files = ("--csv", tmp_path / "o.csv", "--html", tmp_path / "o.html", "-pf", tmp_path / "p.svg")
    words = (
        "--columns",
        "memory:32k",
        "--sort",
        "memory:32k",
        "-ppl",
        "--x-axis",
        "memory:32k",
        "--fit",
        "12GB@32k",
    )
    ran = compare_q("show", finished, *words, *files, "--fail-if", "memory:32k > 10")
    assert ran.status == 4
    rows = [
        line.split()
        for line in ran.out.splitlines()
        if line.startswith((" W4A16 ", " bf16 ", " base "))
    ]
    assert rows == [["W4A16", "9.79"], ["bf16", "✗", "20.79"], ["base", "n/a"]]
    assert "bf16: does not fit into 12GB@32k" in ran.out
    assert "base: not in the plot: memory for 32,768 tokens unknown" in ran.out
    assert "failed: bf16: memory:32k > 10 (20.79)" in ran.err
    assert (tmp_path / "o.csv").read_text().splitlines()[1].startswith("W4A16,9.79496")
    assert "Memory for 32,768 tokens / GB" in (tmp_path / "p.svg").read_text()
    assert "memory 32k GB" in (tmp_path / "o.html").read_text()


def test_slices_are_columns_sort_keys_and_conditions(compare_q: Run, tmp_path: Path) -> None:
    """KLDs of chat: 0.08 and 0.01; the reference cannot fail by a column that compares with it."""
    file = tmp_path / "texts.json"
    run = three(failed={"noise": "told to fail"})
    run.with_origin([]).write(file)
    table = tmp_path / "o.csv"
    words = ("--columns", "kld:chat, same_top:c4", "--sort", "kld:chat", "--csv", table)
    # The PPL of these rows is 20 (1 + KLD): 21.0 and 20.8 on wiki2.
    ran = compare_q(
        "show", file, *words, "--fail-if", "kld:chat > 0.05", "--fail-if", "ppl:wiki2>20.9"
    )
    assert ran.status == 4
    assert [line.removeprefix("failed: ") for line in ran.err.splitlines()] == [
        "noise: kld:chat > 0.05 (n/a: told to fail)",
        "noise: ppl:wiki2 > 20.9 (n/a: told to fail)",
        "EXL3 4.0: kld:chat > 0.05 (0.08000)",
        "EXL3 4.0: ppl:wiki2 > 20.9 (21.0000)",
    ]
    assert table.read_text().splitlines() == [
        "label,kld:chat,kld:chat_stderr,same_top:c4,same_top:c4_stderr",
        "bf16,,,,",
        "GGUF Q4_K,0.01,0.001,0.9,0.02",
        "EXL3 4.0,0.08,0.008,0.9,0.02",
        "noise,,,,",
    ]
    for flags in (
        ("--columns", "label,kld:prose"),
        ("--sort", "ppl:prose"),
        ("--fail-if", "same_top:prose < 99"),
    ):
        assert_refused(
            compare_q("show", file, *flags),
            f"{flags[0]}: ",
            "'prose'",
            "there are: wiki2, c4, chat",
        )


def test_a_slice_of_any_name_can_be_a_condition(compare_q: Run, finished: Path) -> None:
    """The last sign of a condition is the one that compares; a row without the slice fails, since
    it may be wrong.
    """
    odd = "a > b, <c>"
    row = replace(QUANT, slices={odd: Slice(7, 20.0, None, 0.5)})
    run_of(REF, row, replace(row, label="other", slices={})).with_origin([]).write(finished)
    ran = compare_q("show", finished, "--sort", f"kld:{odd}", "--fail-if", f"kld:{odd} >= 0.5")
    assert ran.status == 4
    assert ran.err.splitlines() == [
        f"failed: W4A16: kld:{odd} >= 0.5 (0.50000)",
        f"failed: other: kld:{odd} >= 0.5 (n/a)",
    ]
    # 0.5 is not above 0.6, but the row without the slice fails.
    assert compare_q("show", finished, "--fail-if", f" kld:{odd}>0.6").status == 4


def test_slices_are_checked_before_anything_runs(compare_q: Run, write_specs: Specs) -> None:
    """A run of one text without conversations has only the slices that every text has."""
    data, models = write_specs([FAKE])
    for flags in (
        ("--columns", "kld:text"),
        ("--fail-if", "ppl:assistant > 3"),
        ("--sort", "ppl:text"),
    ):
        assert_refused(
            compare_q("-d", data, "-m", models, *flags),
            f"{flags[0]}: ",
            "there are: special, begin, rest",
        )
    ran = compare_q(
        "-d",
        data,
        "-m",
        models,
        "-r",
        1,
        "--columns",
        "label,ppl:begin",
        "--fail-if",
        # The fake model is uniform over 1,000 tokens.
        "ppl:begin > 1001",
    )
    assert ran.status == 0, ran.err
    assert "1,000.000" in ran.out
