"""Change one place of the code at a time, and check whether a test fails.

    python -m benchmarks.mutations OUT.json --count 60 --seed 24

First, the tests that do not start an engine run once with coverage.py, which records the lines that
each test function executes.  Then the seed draws places from all functions of ``FOLDERS``.  One
change after the other is written into a copy of the checkout.  The test functions that execute the
changed line run until one fails.  If all of them pass, ``--engines`` also runs all tests of the
folder (``FOLDER_TESTS``), with engines and processes: coverage.py does not know every test that
executes a line.  A change counts as missed if all tests pass.  The changes:

- another comparison, ``and`` for ``or``, or a negated condition;
- a number that is one larger, ``True`` for ``False``, or ``+`` for ``-``;
- a call left out whose result is not used;
- None instead of the value that a function returns.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import coverage

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("eval/run", "eval/cli", "backends/worker", "backends/vllm_server", "backends/checkpoint")
FAST = ["-m", "not engine and not paths"]
FOLDER_TESTS = {
    "eval/run": ("tests/eval/run", "tests/end_to_end/test_workers.py"),
    "eval/cli": ("tests/eval/cli", "tests/end_to_end/test_workers.py"),
    "backends/worker": ("tests/backends/worker", "tests/end_to_end/test_workers.py"),
    "backends/vllm_server": ("tests/backends/vllm_server",),
    "backends/checkpoint": ("tests/backends/checkpoint", "tests/backends/hf"),
}
TEST_S = 300
"""Seconds after which the tests of one change count as failed.

A change can make tests wait forever.
"""
ENGINES_S = 1800
"""The same for tests that start engines."""
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
OPERATORS: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
}


@dataclass(frozen=True)
class Change:
    """One change: the text ``before`` at (line, column) of a file becomes ``after``.

    Lines count from 1, columns from 0.
    """

    file: str
    line: int
    column: int
    last_line: int
    last_column: int
    before: str
    after: str


@dataclass(frozen=True)
class Outcome:
    """A change, how many test functions execute its line, and the first one that failed.

    ``failed`` is empty if the change was missed.
    """

    change: Change
    tests: int
    failed: str


def changed(node: ast.AST) -> ast.AST | None:
    """Return a changed copy of a node; None if no change is known for it."""
    match node:
        case ast.Compare(left, [operator], right) if type(operator) in COMPARISONS:
            return ast.Compare(left, [COMPARISONS[type(operator)]()], right)
        case ast.BoolOp(ast.And(), values):
            return ast.BoolOp(ast.Or(), values)
        case ast.BoolOp(ast.Or(), values):
            return ast.BoolOp(ast.And(), values)
        case ast.UnaryOp(ast.Not(), operand):
            return operand
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            return ast.BinOp(left, OPERATORS[type(operator)](), right)
        # bool before int: True is an int too, and would become 2.
        case ast.Constant(bool(value)):
            return ast.Constant(not value)
        case ast.Constant(int(value) | float(value)):
            return ast.Constant(value + 1)
        case ast.Expr(ast.Call()):
            return ast.Pass()
        # A returned constant is a change of its own, and None would stay None.
        case ast.Return(ast.expr() as value) if not isinstance(value, ast.Constant):
            return ast.Return(ast.Constant(None))
    return None


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of functions without annotations, decorators, f-strings and defaults."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            waiting: list[ast.AST] = list(node.body)
            while waiting:
                inner = waiting.pop()
                # An inner function is a node of the outer loop.
                if isinstance(inner, ast.FunctionDef | ast.JoinedStr | ast.Raise):
                    continue
                yield inner
                if not isinstance(inner, ast.AnnAssign):
                    waiting += ast.iter_child_nodes(inner)
                elif inner.value:
                    waiting.append(inner.value)


def changes(root: Path) -> list[Change]:
    """Return every change of every file of ``FOLDERS``, in the order of files and lines."""
    all_changes: list[Change] = []
    for folder in FOLDERS:
        for file in sorted((root / folder).glob("*.py")):
            all_changes += changes_of(file, str(file.relative_to(root)))
    # The seed draws by position in this list.
    return sorted(
        all_changes, key=lambda change: (change.file, change.line, change.column, change.after)
    )


def changes_of(file: Path, name: str) -> Iterator[Change]:
    """Yield the changes of a file; ``name``: the file's in the changes."""
    source = file.read_text(encoding="utf-8")
    for node in executed(ast.parse(source)):
        other = changed(node)
        if other is None:
            continue
        assert isinstance(node, ast.expr | ast.stmt)
        before = ast.get_source_segment(source, node) or ""
        after = ast.unparse(other)
        if isinstance(other, ast.expr):
            # The new operator may bind less tightly than the old one.
            after = f"({after})"
        last_line = node.end_lineno or node.lineno
        last_column = node.end_col_offset or 0
        yield Change(name, node.lineno, node.col_offset, last_line, last_column, before, after)


def applied(source: str, change: Change) -> str:
    """Return the source with the change; columns count bytes in UTF-8, as in ``ast``."""
    lines = source.encode().splitlines(keepends=True)
    head = lines[change.line - 1][: change.column]
    tail = lines[change.last_line - 1][change.last_column :]
    lines[change.line - 1 : change.last_line] = [head + change.after.encode() + tail]
    return b"".join(lines).decode()


def pytest_in(root: Path, *words: str, seconds: int = TEST_S) -> subprocess.CompletedProcess[str]:
    """Run pytest in a checkout; a run that takes too long is a failure."""
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--durations=0", *words]
    try:
        return subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "FAILED: it does not end", "")


def lines_of_tests(root: Path, data: Path) -> dict[str, dict[int, list[str]]]:
    """Return file -> line -> the test functions that execute the line.

    They come from a run of the fast tests with coverage.py.
    """
    settings = data.with_suffix(".ini")
    sources = "\n    ".join(str(root / folder) for folder in FOLDERS)
    settings.write_text(
        f"[run]\ndata_file = {data}\ndynamic_context = test_function\nsource =\n    {sources}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(root)}
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={settings}"]
    command += ["-m", "pytest", *FAST]
    subprocess.run(command, cwd=root, env=environment, check=True)
    measured = coverage.CoverageData(str(data))
    measured.read()
    tests_of_files = {}
    for file in measured.measured_files():
        tests_of_lines = {}
        for line, contexts in measured.contexts_by_lineno(file).items():
            # Lines that ran outside a test, as in an import, have an empty context.
            tests_of_lines[line] = sorted(context for context in contexts if context)
        tests_of_files[str(Path(file).relative_to(root))] = tests_of_lines
    return tests_of_files


def words_of(root: Path, functions: list[str]) -> list[str]:
    """Return pytest's arguments for test functions.

    ``functions``: as coverage.py names them, ``tests.folder.test_file.test_function``.

    Two kinds of functions are left out: functions that only tests call, and hypothesis' inner
    functions, which pytest cannot find.
    """
    words = []
    for function in functions:
        parts = function.split(".")
        file = root.joinpath(*parts[:-1]).with_suffix(".py")
        name = parts[-1]
        if first_test_part(parts) != len(parts) - 2 or not file.exists():
            continue
        if f"\ndef {name}(" in file.read_text(encoding="utf-8"):
            words.append(f"{file.relative_to(root)}::{name}")
    return words


def first_test_part(parts: list[str]) -> int | None:
    """Return the index of the first part that names a test file or test function."""
    for number, part in enumerate(parts):
        if part.startswith("test_"):
            return number
    return None


def failure(ran: subprocess.CompletedProcess[str]) -> str:
    """Return the first failed test of a run of pytest; "" if none failed.

    RuntimeError if pytest ended otherwise, as without any test.
    """
    if ran.returncode == 0:
        return ""
    if ran.returncode < 0:
        return f"FAILED: signal {-ran.returncode} ended the tests"
    if ran.returncode != 1:
        raise RuntimeError(f"pytest ended with exit status {ran.returncode}: {ran.stdout[-1000:]}")
    return next(line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))


def outcome_of(root: Path, change: Change, functions: list[str], *, engines: bool) -> Outcome:
    """Write a change into the checkout, run the tests, and restore the file."""
    file = root / change.file
    source = file.read_text(encoding="utf-8")
    words = words_of(root, functions)
    tests = len(words)
    folder = str(Path(change.file).parent)
    failed = ""
    file.write_text(applied(source, change), encoding="utf-8")
    try:
        if words:
            failed = failure(pytest_in(root, "-x", *FAST, *words))
        if engines and not failed:
            words = ["-x", "-m", "not paths", *FOLDER_TESTS[folder]]
            failed = failure(pytest_in(root, *words, seconds=ENGINES_S))
    finally:
        file.write_text(source, encoding="utf-8")
    return Outcome(change, tests, failed)


def main() -> int:
    """Make the changes that the seed draws, and write which ones were found."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument("--count", type=int, default=60)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--engines", action="store_true", help="run tests that start engines, too")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "checkout"
        left_out = shutil.ignore_patterns(".git", ".venv-*", "models", "*_cache")
        shutil.copytree(ROOT, root, ignore=left_out)
        lines = lines_of_tests(root, Path(scratch) / "coverage")
        drawn = random.Random(args.seed).sample(changes(root), args.count)
        outcomes: list[dict[str, Any]] = []
        for change in drawn:
            functions = lines.get(change.file, {}).get(change.line, [])
            outcome = outcome_of(root, change, functions, engines=args.engines)
            outcomes.append(asdict(outcome))
            print(f"{change.file}:{change.line}: {change.before!r} -> {change.after!r}: ", end="")
            print(outcome.failed or f"MISSED by {outcome.tests} tests", flush=True)
            args.out.write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")
    missed = sum(not outcome["failed"] for outcome in outcomes)
    print(f"{len(outcomes) - missed} of {len(outcomes)} changes were found")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
