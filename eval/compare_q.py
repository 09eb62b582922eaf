"""Compare quantized models: ``python eval/compare_q.py -d data.json -m a.json -p``.

An installation has the same command as ``compare-q``.

Only starts ``eval/cli/main.py``: engines that spawn worker processes import this file again in each
process.  The user's Python may be old, so this file must use only syntax that an old Python can
read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a file, not imported from an installation
    sys.path[0] = str(ROOT)  # the repository instead of eval/


def command_line() -> Callable[[], int]:
    """Return ``eval.cli.main.main``.

    If this Python cannot run it, return a function that prints why in one line.
    """
    reason = (
        f"{sys.executable} is Python {sys.version.split()[0]}, and compare_q needs 3.11 or newer"
    )
    if sys.version_info >= (3, 11):  # noqa: UP036
        try:
            from compare_q.eval.cli import main as cli

            return cli.main
        except ModuleNotFoundError as error:
            missing = (error.name or str(error)).partition(".")[0]
            if missing == "compare_q":  # ours: a damaged installation, and no package to install
                raise
            reason = f"{missing} is not installed for {sys.executable}"

    def refuse() -> int:
        print(f"error: {reason}: {remedy()}", file=sys.stderr)
        return 2

    return refuse


def remedy() -> str:
    """Return how to get a Python that can run this: in an environment of ``make``, or a new one."""
    for name in (".venv-cuda", ".venv-cpu"):
        python = ROOT / name / "bin" / "python"
        if python.exists() and Path(sys.prefix) != ROOT / name:
            folder = os.path.relpath(ROOT / name)
            return f"run it with {folder}/bin/python, or first 'source {folder}/bin/activate'"
    if (ROOT / "Makefile").exists():
        folder = os.path.relpath(ROOT)
        return (
            f"'make -C {folder} demo' makes an environment with all of it, "
            f"'pip install -e {folder}' adds to yours"
        )
    return (
        "install compare_q with its dependencies: 'pip install .' (without --no-deps) in a "
        "checkout of it"
    )


def main() -> int:
    """Run the command line; return the exit status."""
    return command_line()()


if __name__ == "__main__":
    sys.exit(command_line()())
