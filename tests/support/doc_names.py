"""What the documentation, docstrings and comments name: paths, dotted names, links; and what of it does not exist.

Everything is resolved on disk and by the syntax tree; nothing of compare_q is imported.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support import ROOT

PACKAGES = ("backends", "benchmarks", "compare_q", "demo", "eval", "tests")
FOLDERS = (*PACKAGES, "docs", "requirements", "results")
MADE = ("demo/models", "demo/results")
"""What ``make demo`` makes: named in the documentation, and not there in a fresh checkout."""
FOREIGN = {
    "compare_q_logits.py": "exllamav3's, beside the old compare_q",
    "eval/qbench.py": "exllamav3's",
    "qbench_prompts.py": "exllamav3's",
    "eval/__disk_lru_cache__": "the cache of exllamav3's compare_q",
    "test_data": "a key of qbench",
    "test_trace": "a key of qbench",
    "llama.py": "GPTQ's",
    "convert_hf_to_gguf.py": "llama.cpp's",
    "ptb_text_only.py": "a data set's script",
    "both.md": "written by a command of the tutorial",
}
"""What the texts name although it is not in this repository, and whose it is."""
FOREIGN_HEADS = frozenset(
    {
        *("blk", "experts", "layer", "model", "tensor"),
        *("engine", "spec"),
        *("datasets", "gguf", "model_runner", "SamplingParams", "sys", "torch", "vllm"),
    }
)
"""First parts of dotted names in docstrings, a line each: tensors, options and keys, other packages."""
SUFFIXES = frozenset(("html", "json", "parquet", "png", "py", "raw", "safetensors", "txt"))
"""Last parts of names that are files and not attributes."""

PATH = re.compile(rf"(?<![\w/.$~-])(?:{'|'.join(FOLDERS)})/[\w./*{{}},-]*")
BARE = re.compile(r"(?<![\w/.*<>-])[\w.-]+\.(?:py|js|md)\b(?!\w*://)")
DOTTED = re.compile(rf"(?<![\w/.-])(?:{'|'.join(PACKAGES)})(?:\.\w+)+")
IMPORTED = re.compile(rf"^\s*from ((?:{'|'.join(PACKAGES)})[\w.]*) import ([\w, ]+)$", re.MULTILINE)
TEST = re.compile(r"(?<![\w/.])test_\w+\b(?!\.py)")
QUOTED = re.compile(r"``([A-Za-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?``")
LINK = re.compile(r"\[[^][]*\]\(([^()\s]+)\)")
FENCED = re.compile(r"^```.*?^```|^ {4}.*?$", re.MULTILINE | re.DOTALL)


def markdown_files() -> list[Path]:
    """Every page but the changelog, which is history."""
    folders = [ROOT / name for name in FOLDERS]
    files = [*ROOT.glob("*.md"), *(file for folder in folders for file in folder.rglob("*.md"))]
    return sorted(file for file in files if file.name != "CHANGELOG.md" and not is_made(file))


def python_files() -> list[Path]:
    """Every Python file."""
    files = [*ROOT.glob("*.py"), *(file for name in PACKAGES for file in (ROOT / name).rglob("*.py"))]
    return sorted(file for file in files if not is_made(file))


def other_files() -> list[Path]:
    """What else has comments: the page's scripts, make, the package, what is locked and how llama.cpp is built."""
    page = ROOT / "eval" / "html" / "page"
    return sorted([ROOT / "Makefile", ROOT / "pyproject.toml", *page.rglob("*.*"), *(ROOT / "requirements").iterdir()])


def is_made(file: Path) -> bool:
    """Whether ``make demo`` made a file: a model's own page or code is not ours."""
    return file.relative_to(ROOT).as_posix().startswith(MADE)


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of what a file says to its reader: docstrings and comments of a Python file, else each line."""
    source = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        yield from enumerate(source.splitlines(), 1)
        return
    for node in nodes(file):
        # A string that stands alone says what a module, class, function or constant is.
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def missing(text: str, folder: Path = ROOT) -> list[str]:
    """The paths, file names, tests and dotted names of a text that do not exist; ``folder``: where the text stands."""
    paths = [found.rstrip(".,-") for found in PATH.findall(text)]
    quoted = [found for found in QUOTED.findall(text) if found.rpartition(".")[2] not in SUFFIXES]
    imports = [f"{module}.{name.strip()}" for module, names in IMPORTED.findall(text) for name in names.split(",")]
    absent = {path for path in paths if not path_exists(path, folder)}
    absent |= {name for name in BARE.findall(text) if name not in file_names()}
    absent |= {name for name in TEST.findall(text) if name not in test_names()}
    dotted = [name for name in DOTTED.findall(text) if name.rpartition(".")[2] not in SUFFIXES]
    absent |= {name for name in [*dotted, *imports] if not name_exists(name)}
    absent |= {name for name in quoted if not short_name_exists(name)}
    return sorted(absent - FOREIGN.keys())


def path_exists(path: str, folder: Path = ROOT) -> bool:
    """Whether a path is there, from the root or from ``folder``; ``*`` and ``{a,b}`` as a shell reads them."""
    if path.startswith(MADE):
        return True
    if group := re.search(r"\{([^{}]*)\}", path):
        each = (path[: group.start()] + part + path[group.end() :] for part in group[1].split(","))
        return all(path_exists(one, folder) for one in each)
    return any(any(base.glob(path)) if "*" in path else (base / path).exists() for base in (ROOT, folder))


@cache
def file_names() -> frozenset[str]:
    """Names of all Python, JavaScript and Markdown files."""
    scripts = (file for name in PACKAGES for file in (ROOT / name).rglob("*.js"))
    return frozenset(file.name for file in [*python_files(), *markdown_files(), *scripts]) | {"CHANGELOG.md"}


@cache
def test_names() -> frozenset[str]:
    """Names of test files, without suffix, and of the functions in them."""
    files = [file for file in python_files() if file.name.startswith("test_")]
    return frozenset(file.stem for file in files) | {
        node.name for file in files for node in nodes(file) if isinstance(node, ast.FunctionDef)
    }


@cache
def syntax(file: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def nodes(file: Path) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a file."""
    return tuple(ast.walk(syntax(file)))


@cache
def name_exists(dotted: str) -> bool:
    """Whether a dotted name is a package, a module, or something that a module binds."""
    names = dotted.removeprefix("compare_q.").split(".")
    place, names = (ROOT, names) if (ROOT / names[0]).is_dir() else (ROOT / "compare_q", names)
    while names and (place / names[0]).is_dir():
        place, names = place / names[0], names[1:]
    file = place / f"{names[0]}.py" if names else place
    if file.is_file():
        names = names[1:]
    else:
        file = place / "__init__.py"
    if not names:
        return True
    return file.is_file() and binds(syntax(file).body, names)


@cache
def short_name_exists(dotted: str) -> bool:
    """Whether a module or class of this name binds the rest of it; names of other projects count as there."""
    head, *names = dotted.split(".")
    if head in PACKAGES or head in FOREIGN_HEADS:
        return head in FOREIGN_HEADS or name_exists(dotted)
    return any(binds(body, names) for body in bodies().get(head, []))


@cache
def bodies() -> dict[str, list[list[ast.stmt]]]:
    """Module (without suffix) or class -> the statements of all that have this name."""
    found: dict[str, list[list[ast.stmt]]] = {}
    for file in python_files():
        found.setdefault(file.stem, []).append(syntax(file).body)
        for node in nodes(file):
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(node.body)
    return found


def binds(body: list[ast.stmt], names: list[str]) -> bool:
    """Whether statements bind ``names[0]``, and the class of that name ``names[1]``, and so on."""
    for node in ast.walk(ast.Module(body, [])):
        match node:
            case ast.ClassDef(name=name) if name == names[0] and len(names) > 1:
                return binds(node.body, names[1:])
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) if name == names[0]:
                return len(names) == 1
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()) if name == names[0]:
                return True
            case ast.alias(name=name, asname=other) if names[0] in (name, other):
                return True
    return False


def broken_links(text: str, file: Path) -> list[str]:
    """Relative links of a page to files that are not there, or to headings that their file does not have."""
    found = []
    for target in LINK.findall(FENCED.sub("", text)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        page = (file.parent / path).resolve() if path else file
        if (page != file and not page.exists()) or (
            anchor and anchor not in anchors(text if page == file else page.read_text("utf-8"))
        ):
            found.append(target)
    return found


def anchors(page: str) -> set[str]:
    """What links to the headings of a page are called, by GitHub's rule."""
    headings = re.findall(
        r"^#+ +(.+?) *$", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
