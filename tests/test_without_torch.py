"""The driver does not need torch, which is in the engines' environments; these may be separate."""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support import ROOT
from tests.support.toy import Specs
from tests.support.vllm_server import Stub, gold

IMPORTED_BY_ENGINES = {
    f"compare_q.backends.{name}"
    for name in (
        "hf.transformers_layers",
        "scoring.triton_kernels",
        "vllm.extension",
        "vllm.logits",
        "vllm.scorer",
    )
}
"""Modules that import torch at the top of the file."""
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None\n"
IMPORT_ALL = """
import importlib, pathlib
for file in sorted([*pathlib.Path('eval').rglob('*.py'), *pathlib.Path('backends').rglob('*.py')]):
    name = '.'.join(('compare_q', *file.with_suffix('').parts)).removesuffix('.__init__')
    if not name.endswith('__main__'):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            print(name)
"""
SET_BY_OTHER_TESTS = ("COMPARE_Q_IN_PROCESS",)
MAIN = "from compare_q.eval.cli.main import main; sys.exit(main(sys.argv[1:]))"


def run(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run some Python code in a process without torch."""
    environment = {key: value for key, value in os.environ.items() if key not in SET_BY_OTHER_TESTS}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code, *map(str, words)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


def test_only_what_engines_import_needs_torch() -> None:
    done = run(IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) == IMPORTED_BY_ENGINES


@pytest.mark.slow
def test_a_server_is_measured_without_torch(write_specs: Specs, tmp_path: Path) -> None:
    with Stub() as stub:
        threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True).start()
        data, models = write_specs(
            [{"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}]
        )
        out = tmp_path / "out.csv"
        done = run(MAIN, "-d", data, "-m", models, "--csv", out)
        stub.shutdown()
        sent = [[gold(ids[at], ids[at - 1]) for at in range(1, 100)] for ids in stub.windows]
    assert done.returncode == 0, done.stderr
    (row,) = csv.DictReader(out.open())
    assert float(row["ppl"]) == pytest.approx(math.exp(-np.mean(sent)), rel=1e-6)
