"""What the documentation says is there: paths, names, links, keys and flags; the README's length.

``tests/support/doc_names.py`` finds what pages, docstrings and comments name, and looks for it on disk and in the
syntax trees.  No engine starts and nothing but the specs and the command line's flags is imported.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compare_q.eval.cli.flags import COMMANDS, parser
from compare_q.eval.specs.types import DataSpec, SweptSpec
from compare_q.eval.table.registry import BY_NAME
from tests.support import ROOT, doc_names
from tests.test_imports import ORDER

DOCS = ROOT / "docs"


def test_every_file_and_name_in_pages_docstrings_and_comments_exists() -> None:
    files = [*doc_names.markdown_files(), *doc_names.python_files(), *doc_names.other_files()]
    absent = {
        f"{file.relative_to(ROOT)}:{line}": names
        for file in files
        for line, text in doc_names.prose(file)
        if (names := doc_names.missing(text, file.parent))
    }
    assert absent == {}


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("see `eval/stats/uncertainties.py`.", ["eval/stats/uncertainties.py"]),
        ("see eval/stats/uncertainty.py, and backends/vllm/*.py", []),
        ("backends/vllm/*.pyx", ["backends/vllm/*.pyx"]),
        ("backends/vllm/{driver,worker}.py", []),
        ("backends/vllm/{driver,walker}.py", ["backends/vllm/{driver,walker}.py"]),
        ("a page of its own, docs/statistic.md", ["docs/statistic.md"]),
        ("definitions are in test_logit_statistics.py", ["test_logit_statistics.py"]),
        ("what it must keep is in test_plot", ["test_plot"]),
        ("python -m compare_q.eval.specs.types", []),
        ("python -m compare_q.eval.spec.types", ["compare_q.eval.spec.types"]),
        ("raises backends.common.errors.InputError", []),
        ("raises compare_q.backends.base.InputError", ["compare_q.backends.base.InputError"]),
        ("compare_q.backends.vllm.driver.VllmDriver.probe", []),
        ("compare_q.backends.vllm.driver.VllmDriver.probes", ["compare_q.backends.vllm.driver.VllmDriver.probes"]),
        ("    from compare_q.eval.api import compare, loads", ["compare_q.eval.api.loads"]),
        ("``report.ORIGIN`` of a merged run", ["report.ORIGIN"]),
        ("``results_json.ORIGIN`` of a merged run", []),
        ("``Window.scored``", ["Window.scored"]),
        ("``logit_statistics.partial``", ["logit_statistics.partial"]),
        ("``datasets.load_dataset`` reads ``results.json``", []),
    ],
)
def test_what_does_not_exist_is_found(text: str, absent: list[str]) -> None:
    assert doc_names.missing(text) == absent


def test_docstrings_and_comments_are_read_where_they_stand(tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        '"""Head."""\n\nX = "eval/gone.py"\n"""Of X."""\n\n\ndef f():\n    """Body."""\n    return 1  # why\n'
    )
    assert sorted(doc_names.prose(file)) == [(1, "Head."), (4, "Of X."), (8, "Body."), (9, "# why")]


def test_every_relative_link_leads_somewhere() -> None:
    broken = {file.name: doc_names.broken_links(file.read_text("utf-8"), file) for file in doc_names.markdown_files()}
    assert {name: links for name, links in broken.items() if links} == {}


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a\npage](statistics.md)", []),
        ("[gone](statistic.md)", ["statistic.md"]),
        ("[errors](statistics.md#errors)", []),
        ("[gone](statistics.md#mistakes)", ["statistics.md#mistakes"]),
        ("# One, two\n\n[here](#one-two) and [not](#one)", ["#one"]),
        ("[far](https://example.org/x.md)\n\n```\n[code](gone.md)\n```", []),
        ("![picture](../results/h200/table/kld.png)", ["../results/h200/table/kld.png"]),
    ],
)
def test_broken_links_are_found(text: str, broken: list[str]) -> None:
    assert doc_names.broken_links(text, DOCS / "page.md") == broken


def test_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 120


def test_make_has_what_the_pages_tell_to_make() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    pages = "\n".join(file.read_text("utf-8") for file in doc_names.markdown_files())
    told = set(re.findall(r"(?:`|^ {4}|^|&& )make ([a-z-]+)(?=`| |$)", pages, re.MULTILINE))
    assert {"demo", "install", "test"} <= told <= targets


@pytest.mark.parametrize(("spec", "heading"), [(DataSpec, "## Data spec"), (SweptSpec, "## Model spec")])
def test_page_of_the_specs_has_every_key_and_no_other(spec: type, heading: str) -> None:
    page = (DOCS / "specs.md").read_text("utf-8")
    section = page[page.index(heading) :].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    assert sorted(key for cell in cells for key in re.findall(r"`(\w+)`", cell)) == sorted(spec.model_fields)


def test_page_of_the_specs_has_every_flag_and_no_other() -> None:
    page = (DOCS / "specs.md").read_text("utf-8")
    cells = re.findall(r"^\| (`-[^|]*) \|", page, re.MULTILINE)
    of_commands = [parser(command) for command in COMMANDS if command != "trace"]  # docs/chat.md has its flags
    there = {flag for each in of_commands for flag in each._option_string_actions}
    assert {flag for cell in cells for flag in re.findall(r"`(-[\w-]+)`", cell)} == there


def test_page_of_the_outputs_has_every_column_and_no_other() -> None:
    section = (DOCS / "outputs.md").read_text("utf-8").split("### Columns")[1].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`([\w.]+)`", cell)} == BY_NAME.keys()


@pytest.mark.parametrize("package", ORDER)
def test_order_of_imports_is_the_one_that_is_tested(package: str) -> None:
    page = (DOCS / "architecture.md").read_text("utf-8")
    printed = re.search(rf"^{package} +(\w[^`]*?)(?=^\w|^```)", page, re.MULTILINE)
    assert printed is not None
    assert tuple(re.findall(r"\w+", printed[1])) == ORDER[package]


def test_page_of_one_line_counts_the_keystrokes_of_its_blocks() -> None:
    """Each key is a character, Enter is one; the blocks stand in the order of the table's rows."""
    section = (DOCS / "one_line.md").read_text("utf-8").split("## What the same question takes elsewhere")[1]
    counts = [int(number) for number in re.findall(r"^\| [^|]+ \| (\d+) \|", section, re.MULTILINE)]
    blocks = re.findall(r"(?:^    .*\n)+", section, re.MULTILINE)
    assert counts == [len(re.sub(r"^    ", "", block, flags=re.MULTILINE)) for block in blocks]
