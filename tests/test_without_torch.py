"""The driver does not need torch, which is in the engines' environments; these may be separate."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from tests.support import ROOT
from tests.support.processes import users_environment
from tests.support.toy import Specs
from tests.support.vllm_server import Stub, gold

IMPORTED_BY_ENGINES = {
    "compare_q.backends.hf.exchange",
    "compare_q.backends.hf.exchangeable",
    "compare_q.backends.hf.folded_scales",
    "compare_q.backends.hf.model_pair",
    "compare_q.backends.hf.prefix_sharing",
    "compare_q.backends.hf.transformers_layers",
    "compare_q.backends.scoring.triton_kernels",
    "compare_q.backends.vllm.chunks",
    "compare_q.backends.vllm.extension",
    "compare_q.backends.vllm.logits",
    "compare_q.backends.vllm.probe_scorer",
    "compare_q.backends.vllm.scorer",
    "compare_q.backends.vllm.shown_outputs",
    "compare_q.backends.vllm.step_scorer",
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
MAIN = "from compare_q.eval.cli.main import main; sys.exit(main(sys.argv[1:]))"


def run(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run some Python code in a process without torch."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH + code, *map(str, words)],
        cwd=ROOT,
        env=users_environment(),
        capture_output=True,
        text=True,
    )


def test_only_what_engines_import_needs_torch() -> None:
    process = run(IMPORT_ALL)
    assert process.returncode == 0, process.stderr
    assert set(process.stdout.split()) == IMPORTED_BY_ENGINES


@pytest.mark.slow
def test_a_server_is_measured_without_torch(write_specs: Specs, tmp_path: Path) -> None:
    with Stub() as stub:
        threading.Thread(target=stub.serve_forever, args=(0.01,), daemon=True).start()
        model = {"load_fn": "vllm_server", "label": "served", "model_dir": stub.url}
        data, models = write_specs([model])
        out = tmp_path / "out.csv"
        process = run(MAIN, "-d", data, "-m", models, "--csv", out)
        stub.shutdown()
        logprobs = []
        for ids in stub.windows:
            for position in range(1, 100):
                logprobs.append(gold(ids[position], ids[position - 1]))
    assert process.returncode == 0, process.stderr
    (row,) = csv.DictReader(out.open())
    assert float(row["ppl"]) == pytest.approx(math.exp(-np.mean(logprobs)), rel=1e-6)
