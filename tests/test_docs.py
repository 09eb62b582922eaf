"""The documentation matches the repository: paths, links, commands, keys, flags and columns exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest

from compare_q.eval.cli import flags
from compare_q.eval.specs.types import DataSpec, SweptSpec
from tests.support import ROOT

DOCS = ROOT / "docs"
PACKAGES = ("backends", "benchmarks", "compare_q", "demo", "eval", "tests")
FOLDERS = (*PACKAGES, "docs", "requirements", "results")
MADE = ("demo/models", "demo/results")
"""Written by ``make demo``."""
FOREIGN = {"compare_q_logits.py", "eval/qbench.py", "qbench_prompts.py", "eval/__disk_lru_cache__", "llama.py",
           "convert_hf_to_gguf.py", "ptb_text_only.py", "both.md", "turboquant_attn.py"}  # fmt: skip
"""Files of other projects, or written by a command of a page."""

PATH = re.compile(rf"(?<![\w/.$~-])(?:{'|'.join(FOLDERS)})/[\w./*{{}},-]*")
BARE = re.compile(r"(?<![\w/.*<>-])[\w.-]+\.(?:py|js|md)\b(?!\w*://)")
DOTTED = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+(?!\w*\()")
LINK = re.compile(r"\[[^][]*\]\(([^()\s]+)\)")
FENCED = re.compile(r"^```.*?^```|^ {4}.*?$", re.MULTILINE | re.DOTALL)


@cache
def tracked() -> tuple[Path, ...]:
    """Return the files of the repository; in a checkout, without those that git ignores."""
    try:
        words = ["git", "ls-files", "-co", "--exclude-standard"]
        listed = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        listed = ""
    files = [ROOT / line for line in listed.splitlines()] or list(ROOT.rglob("*"))
    return tuple(file for file in files if file.is_file())


def pages() -> list[Path]:
    """Return every Markdown page except the changelog, which names deleted things."""
    return [file for file in tracked() if file.suffix == ".md" and file.name != "CHANGELOG.md"]


def missing(text: str, folder: Path = ROOT) -> list[str]:
    """Paths, file names and dotted names in a text that do not exist; ``folder``: where the text is."""
    names = {file.name for file in tracked()}
    found = {path for path in (each.rstrip(".,-") for each in PATH.findall(text)) if not path_exists(path, folder)}
    found |= {name for name in BARE.findall(text) if name not in names}
    suffixes = ("html", "json", "parquet", "png", "py", "raw", "safetensors", "txt")
    dotted = [name for name in DOTTED.findall(text) if not name.endswith(suffixes)]
    return sorted((found | {name for name in dotted if not name_exists(name)}) - FOREIGN)


def path_exists(path: str, folder: Path) -> bool:
    """True if a path exists below the root or ``folder``; ``*`` and ``{a,b}`` as in a shell."""
    if path.startswith(MADE):
        return True
    if group := re.search(r"\{([^{}]*)\}", path):
        each = (path[: group.start()] + part + path[group.end() :] for part in group[1].split(","))
        return all(path_exists(one, folder) for one in each)
    return any(any(base.glob(path)) if "*" in path else (base / path).exists() for base in (ROOT, folder))


def name_exists(dotted: str) -> bool:
    """True if a dotted name is a package, a module, or a name that this module contains."""
    place, names = ROOT, dotted.removeprefix("compare_q.").split(".")
    while names and (place / names[0] / "__init__.py").is_file():
        place, names = place / names[0], names[1:]
    file = place / f"{names[0]}.py" if names else place
    file, names = (file, names[1:]) if file.is_file() else (place / "__init__.py", names)
    if not names:
        return True
    return file.is_file() and all(re.search(rf"\b{name}\b", file.read_text("utf-8")) for name in names)


def broken_links(text: str, file: Path) -> list[str]:
    """Relative links of a page to missing files or headings."""

    def leads(target: str) -> bool:
        path, _, anchor = target.partition("#")
        page = (file.parent / path).resolve()
        return (not path or page.exists()) and (not anchor or anchor in anchors(page.read_text() if path else text))

    return [each for each in LINK.findall(FENCED.sub("", text)) if "://" not in each and not leads(each)]


def anchors(page: str) -> set[str]:
    """GitHub's anchors of a page's headings."""
    unfenced = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ +(.+?) *$", unfenced, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_files_and_names_in_pages_and_code_exist() -> None:
    files = [*pages(), ROOT / "Makefile"]
    files += [file for file in tracked() if file.suffix == ".py" and ROOT / "tests" not in file.parents]
    absent = {str(file.relative_to(ROOT)): missing(prose(file), file.parent) for file in files}
    assert not any(absent.values()), {name: each for name, each in absent.items() if each}


def prose(file: Path) -> str:
    """A page, or the docstrings and comments of a Python file."""
    text = file.read_text("utf-8")
    if file.suffix != ".py":
        return text
    spoken = re.findall(r'^ *r?"""(.*?)"""$|(?:^|  )(# [^\n]*)$', text, re.MULTILINE | re.DOTALL)
    return "\n".join("".join(each) for each in spoken)


@pytest.mark.parametrize(
    ("text", "absent"),
    [
        ("eval/stats/uncertainty.py, backends/vllm/*.py, eval/stats/{estimates,uncertainty}.py", ""),
        ("see `eval/stats/uncertainties.py`.", "eval/stats/uncertainties.py"),
        ("eval/stats/{estimates,walker}.py", "eval/stats/{estimates,walker}.py"),
        ("definitions are in test_logit_statistics.py", "test_logit_statistics.py"),
        ("compare_q.backends.base.Window in compare_q.eval.spec.types", "compare_q.eval.spec.types"),
        ("raises compare_q.backends.base.InputErrors", "compare_q.backends.base.InputErrors"),
    ],
)
def test_missing_names_are_found(text: str, absent: str) -> None:
    assert missing(text) == ([absent] if absent else [])


def test_relative_links_lead_somewhere() -> None:
    broken = {file.name: broken_links(file.read_text("utf-8"), file) for file in pages()}
    assert not any(broken.values()), {name: each for name, each in broken.items() if each}


@pytest.mark.parametrize(
    ("text", "broken"),
    [
        ("[a\npage](statistics.md)", []),
        ("[gone](statistic.md)", ["statistic.md"]),
        ("[errors](statistics.md#errors)", []),
        ("[gone](statistics.md#mistakes)", ["statistics.md#mistakes"]),
        ("# One, two\n\n[here](#one-two) and [not](#one)", ["#one"]),
        ("[far](https://example.org/x.md)\n\n```\n[code](gone.md)\n```", []),
    ],
)
def test_broken_links_are_found(text: str, broken: list[str]) -> None:
    assert broken_links(text, DOCS / "page.md") == broken


def commands() -> list[tuple[str, str]]:
    """(page, command line of compare_q) of every code block."""
    found = []
    for page in pages():
        for block in re.findall(r"^(?:    |```\w*\n)(.*?)(?=^```|\n\n|\Z)", page.read_text("utf-8"), re.M | re.S):
            lines = re.sub(r"\\\n\s*", " ", block)
            found += [(page.name, each) for each in re.findall(r"^ *\$? *compare-q +(.+)$", lines, re.MULTILINE)]
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_of_the_pages_parse(page: str, line: str) -> None:
    words = shlex.split(re.sub(r" {2,}\S.*$|#.*$", "", line).replace("...", ""))
    if words and not {"COMMAND", "--help", "--version"} & set(words):
        flags.parse(words)


def test_make_targets_of_the_pages_exist() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    whole = "\n".join(page.read_text("utf-8") for page in pages())
    named = set(re.findall(r"(?:`|^ {4}|^|&& )make ([a-z-]+)(?=`| |$)", whole, re.MULTILINE))
    assert {"demo", "install", "test"} <= named <= targets


@pytest.mark.parametrize(("spec", "heading"), [(DataSpec, "## Data spec"), (SweptSpec, "## Model spec")])
def test_page_of_the_specs_has_every_key(spec: type, heading: str) -> None:
    page = (DOCS / "specs.md").read_text("utf-8")
    section = page[page.index(heading) :].split("\n## ")[0]
    cells = re.findall(r"^\| (`[^|]*) \|", section, re.MULTILINE)
    assert sorted(key for cell in cells for key in re.findall(r"`(\w+)`", cell)) == sorted(spec.model_fields)


def test_page_of_the_specs_has_every_flag() -> None:
    cells = re.findall(r"^\| (`-[^|]*) \|", (DOCS / "specs.md").read_text("utf-8"), re.MULTILINE)
    documented = [each for each in flags.COMMANDS if each != "trace"]
    known = {flag for command in documented for flag in flags.parser(command)._option_string_actions}
    assert {flag for cell in cells for flag in re.findall(r"`(-[\w-]+)`", cell)} == known


def test_page_of_the_architecture_has_the_order_of_imports() -> None:
    page = (DOCS / "architecture.md").read_text("utf-8")
    linter = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]
    for contract in linter["contracts"]:
        for container in contract.get("containers", ()):
            package = container.rpartition(".")[2]
            printed = re.search(rf"^{package} +(\w[^`]*?)(?=^\w|^```)", page, re.MULTILINE)
            assert printed is not None
            assert re.findall(r"\w+", printed[1]) == contract["layers"][::-1]
