"""Paths, links, commands, make targets, keys and flags that the documentation names exist."""

from __future__ import annotations

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

import pytest

from compare_q.eval.cli import command_line, flag_table
from compare_q.eval.specs.spec_types import DataSpec, SweptSpec
from tests.support import ROOT

DOCS = ROOT / "docs"
FOLDERS = (
    "backends",
    "benchmarks",
    "compare_q",
    "demo",
    "docs",
    "eval",
    "requirements",
    "results",
    "tests",
)
MADE = ("demo/models", "demo/results")
"""Written by ``make demo``."""
FOREIGN = {"eval/qbench.py", "eval/__disk_lru_cache__"}
"""Paths of other projects."""

PATH = re.compile(rf"(?<![\w/.$~-])(?:{'|'.join(FOLDERS)})/[\w./*{{}},-]*")
LINK = re.compile(r"\[[^][]*\]\(([^()\s]+)\)")
CODE_BLOCK = re.compile(r"^(?:    |```\w*\n)(.*?)(?=^```|\n\n|\Z)", re.MULTILINE | re.DOTALL)
FENCED = re.compile(r"^```.*?^```|^ {4}.*?$", re.MULTILINE | re.DOTALL)


@cache
def tracked() -> tuple[Path, ...]:
    """Return the files of the repository; in a checkout, without those that git ignores."""
    try:
        words = ["git", "ls-files", "-co", "--exclude-standard"]
        names = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        names = ""
    files = [ROOT / name for name in names.splitlines()]
    # Without git, or outside a checkout.
    if not files:
        files = list(ROOT.rglob("*"))
    return tuple(file for file in files if file.is_file())


def pages() -> list[Path]:
    """Return every Markdown page except the changelog, which names deleted things."""
    return [file for file in tracked() if file.suffix == ".md" and file.name != "CHANGELOG.md"]


def path_exists(path: str, folder: Path) -> bool:
    """True if a path exists below the root or ``folder``; ``*`` and ``{a,b}`` as in a shell."""
    if path.startswith(MADE):
        return True
    group = re.search(r"\{([^{}]*)\}", path)
    if group:
        for part in group[1].split(","):
            if not path_exists(path[: group.start()] + part + path[group.end() :], folder):
                return False
        return True
    for base in (ROOT, folder):
        if "*" in path:
            if any(base.glob(path)):
                return True
        elif (base / path).exists():
            return True
    return False


def broken_links(text: str, file: Path) -> list[str]:
    """Return the relative links of a page to missing files or headings."""
    broken = []
    for target in LINK.findall(FENCED.sub("", text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        page = text
        if path:
            linked_file = (file.parent / path).resolve()
            if not linked_file.exists():
                broken.append(target)
                continue
            if anchor:
                page = linked_file.read_text()
        if anchor and anchor not in anchors(page):
            broken.append(target)
    return broken


def anchors(page: str) -> set[str]:
    """Return GitHub's anchors of a page's headings."""
    unfenced = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    names = set()
    for heading in re.findall(r"^#+ +(.+?) *$", unfenced, re.MULTILINE):
        words = re.sub(r"[^\w\- ]", "", heading.lower())
        names.add(words.replace(" ", "-"))
    return names


def test_paths_in_the_pages_exist() -> None:
    missing = {}
    for page in [*pages(), ROOT / "Makefile"]:
        paths = {path.rstrip(".,-") for path in PATH.findall(page.read_text("utf-8"))}
        missing[page.name] = []
        for path in sorted(paths - FOREIGN):
            if not path_exists(path, page.parent):
                missing[page.name].append(path)
    assert not any(missing.values()), missing


def test_pages_that_the_code_names_exist() -> None:
    """Messages and docstrings send readers to these pages."""
    missing = []
    for file in tracked():
        if file.suffix == ".py":
            for name in re.findall(r"docs/[\w/]+\.md", file.read_text("utf-8")):
                if not (ROOT / name).is_file():
                    missing.append(f"{file.name}: {name}")
    assert not missing


def test_relative_links_lead_somewhere() -> None:
    broken = {file.name: broken_links(file.read_text("utf-8"), file) for file in pages()}
    assert not any(broken.values()), broken


def commands() -> list[tuple[str, str]]:
    """Return (page, command line of compare_q) of every code block."""
    lines = []
    for page in pages():
        for block in CODE_BLOCK.findall(page.read_text("utf-8")):
            joined = re.sub(r"\\\n\s*", " ", block)
            for line in re.findall(r"^ *\$? *compare-q +(.+)$", joined, re.MULTILINE):
                lines.append((page.name, line))
    return lines


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_of_the_pages_parse(page: str, line: str) -> None:
    words = shlex.split(re.sub(r" {2,}\S.*$|#.*$", "", line).replace("...", ""))
    if words and not {"COMMAND", "--help", "--version"} & set(words):
        command_line.parse(words)


def test_make_targets_of_the_pages_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    text = "\n".join(page.read_text("utf-8") for page in pages())
    named = set(re.findall(r"(?:`|^ {4}|^|&& )make ([a-z-]+)(?=`| |$)", text, re.MULTILINE))
    assert {"demo", "install", "test"} <= named <= targets


@pytest.mark.parametrize(
    ("spec", "heading"), [(DataSpec, "## Data spec"), (SweptSpec, "## Model spec")]
)
def test_page_of_the_specs_has_every_key(spec: type, heading: str) -> None:
    page = (DOCS / "specs.md").read_text("utf-8")
    section = page[page.index(heading) :].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    keys = []
    for cell in cells:
        keys += re.findall(r"`(\w+)`", cell)
    assert sorted(keys) == sorted(spec.model_fields)


def test_page_of_the_specs_has_every_flag() -> None:
    cells = re.findall(r"^\| (`-[^|]*) \|", (DOCS / "specs.md").read_text("utf-8"), re.MULTILINE)
    documented = set()
    for cell in cells:
        documented.update(re.findall(r"`(-[\w-]+)`", cell))
    declared = set()
    for command in flag_table.COMMANDS:
        declared.update(flag_table.flags_of(command))
    assert documented == declared
