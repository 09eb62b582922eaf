"""What the driver never imports: engines, torch, and the libraries that bring torch with them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from compare_q.eval.common import processes
from compare_q.eval.text import vocabulary
from tests.support import ROOT
from tests.support.command_line import FAKE, Specs, in_transformers
from tests.support.toy import needs_accelerate

pytestmark = pytest.mark.engine
NEVER = {"torch", "transformers", "vllm", "datasets", "llama_cpp", "exllamav3", "exllamav2", "accelerate"}
DRIVER = """
import sys
from compare_q.eval.cli import main
try:
    status = main.main(sys.argv[1:])
except SystemExit as stop:
    status = stop.code
print("imported", status, *sys.modules)
"""


def imported(*words: object) -> tuple[int, set[str], str]:
    """(exit status, every module that a command line has imported, what it printed)."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop(processes.ENVIRONMENT)
    command = [sys.executable, "-c", DRIVER, *map(str, words)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    out, _, last = ran.stdout.rpartition("imported ")
    assert last, ran.stderr
    status, *modules = last.split()
    return int(status), set(modules), out + ran.stderr


@pytest.mark.parametrize("flags", [["--help"], ["engines"], ["cache"], ["-d", "none.json", "-m", "x.json"]])
def test_what_needs_no_model(flags: list[str]) -> None:
    status, modules, said = imported(*flags)
    assert (status, modules & NEVER) == (2 if "-d" in flags else 0, set()), said
    assert not modules & {"matplotlib", "pyarrow", "scipy", "pandas", "huggingface_hub"}


def test_a_finished_run(finished: Path, tmp_path: Path) -> None:
    """Pictures, and the report that holds them, need no engine; what has none needs no matplotlib."""
    status, modules, said = imported("show", finished, "-o", tmp_path / "r.json")
    assert (status, modules & {*NEVER, "matplotlib", "pyarrow"}) == (0, set()), said
    status, modules, said = imported("show", finished, "-pf", tmp_path / "p.png", "--html", tmp_path / "r.html")
    assert (status, modules & NEVER) == (0, set()), said


@needs_accelerate
def test_a_check_and_its_text(write_specs: Specs, toy_model: Path, tmp_path: Path) -> None:
    """The text is tokenized and then in the cache; one model's tokenizer is formatted otherwise than the data's."""
    other = tmp_path / "other"
    shutil.copytree(toy_model, other)
    content = json.loads((other / vocabulary.FILE).read_text())
    (other / vocabulary.FILE).write_text(json.dumps(content, indent=3))
    data, models = write_specs([in_transformers(toy_model), in_transformers(other, label="other"), FAKE])
    said = []
    for _ in range(2):
        status, modules, words = imported("check", "-d", data, "-m", models)
        assert (status, modules & NEVER) == (0, set()), words
        assert "9 windows, 891 scored tokens, of a text of 1,000 tokens" in words
        lines = words.replace("tokenizing text: 1000 tokens in ", "").splitlines()
        said.append([line for line in lines if "products are emulated" not in line])  # which it says on some CPUs
    assert [len(lines) for lines in said] == [len(said[1]) + 1, 7]
