"""Imports flow one way: no circle between files, no arrow from a lower folder to a higher one."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support import ROOT

ORDER = {
    "eval": (
        "common", "specs", "text", "stats", "results", "ranking", "run", "cluster", "table", "plots", "report", "api",
        "cli", "compare_q",
    ),
    "backends": (
        "common", "hub", "base", "scoring", "reference", "logits_engine", "layers", "checkpoint", "hf",
        "exllama", "llamacpp", "vllm", "vllm_server", "worker",
    ),
}  # fmt: skip
"""Files and folders of a package from the lowest to the highest; each may import those before it."""

PRODUCT = "compare_q"
"""The package that holds both."""
NO_PRODUCT = ("benchmarks", "demo")
"""Packages beside the product, which may import it and are never imported by it."""
DYNAMIC = ("import_module", "__import__")
"""Functions that import a module by its name."""

Graph = dict[str, set[str]]


def modules() -> dict[str, Path]:
    """Dotted name -> file, of all packages."""
    found = {}
    for package in (*ORDER, *NO_PRODUCT):
        for file in (ROOT / package).rglob("*.py"):
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
            found[f"{PRODUCT}.{name}" if package in ORDER else name] = file
    return found


def inside(name: str) -> list[str]:
    """The parts of a dotted name, without compare_q itself."""
    return name.removeprefix(f"{PRODUCT}.").split(".")


def imports_of(code: str, known: set[str]) -> set[str]:
    """The modules of ours that some code imports, wherever in it: at the top, in functions, for types only, by name."""
    found = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & known
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= members & known or {node.module} & known
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            found |= {node.args[0].value} & known if function in DYNAMIC else set()
    return found


@cache
def graph() -> Graph:
    """Module -> the modules that it imports; a package stands for its ``__init__.py``."""
    files = modules()
    return {name: imports_of(file.read_text(encoding="utf-8"), set(files)) for name, file in files.items()}


def upward(found: Graph) -> list[str]:
    """The imports of one package that go from a lower part of it to a higher one."""
    arrows = []
    for name, others in found.items():
        for other in others:
            (package, *rest), (of, *beyond) = inside(name), inside(other)
            if package == of and package in ORDER and rest and beyond:
                rank = ORDER[package].index
                if rank(rest[0]) < rank(beyond[0]):
                    arrows.append(f"{name} -> {other}")
    return arrows


def test_no_file_imports_itself_by_way_of_others() -> None:
    found = graph()
    assert len(found) > 100
    list(TopologicalSorter(found).static_order())


def test_no_folder_imports_a_higher_one() -> None:
    assert upward(graph()) == []


def test_the_engines_know_nothing_of_the_driver() -> None:
    engines = {name: others for name, others in graph().items() if inside(name)[0] == "backends"}
    assert [name for name, others in engines.items() if any_of(others, "eval")] == []


def test_the_product_knows_nothing_of_what_lies_beside_it() -> None:
    product = {name: others for name, others in graph().items() if inside(name)[0] in ORDER}
    assert [name for name, others in product.items() if any(any_of(others, package) for package in NO_PRODUCT)] == []


def any_of(names: set[str], package: str) -> bool:
    """Whether one of the names is of a package."""
    return any(inside(name)[0] == package for name in names)


def test_what_these_tests_look_for_is_found() -> None:
    cache_file, runner, engines = f"{PRODUCT}.eval.common.cache", f"{PRODUCT}.eval.run.runner", f"{PRODUCT}.backends"
    known = {cache_file, runner, engines}
    code = "def later():\n    from compare_q.eval.run import runner\nfrom compare_q import backends"
    assert imports_of(code, known) == {runner, engines}
    named = f'importlib.import_module("{runner}"), __import__("{engines}"), print("{cache_file}")'
    assert imports_of(named, known) == {runner, engines}
    found = {cache_file: {runner}, runner: {cache_file}}
    assert upward(found) == [f"{cache_file} -> {runner}"]
    with pytest.raises(CycleError):
        list(TopologicalSorter(found).static_order())
