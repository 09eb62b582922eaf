"""Outputs that cannot be written: the table is printed first, other outputs are written, each
failure is one line.
"""

from __future__ import annotations

import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compare_q.eval.common.output_files import CURE
from compare_q.eval.results import RunResult
from tests.support import ROOT
from tests.support.toy import FAKE, Run, Specs

LIMIT = 4000
"""Largest file (bytes) on the "full disk": CSV and Markdown are smaller; results, report and
pictures are larger."""


def in_a_process(*words: object, **keys: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "eval" / "compare_q.py", *words]
    return subprocess.run(
        list(map(str, command)), stderr=subprocess.PIPE, text=True, check=False, **keys
    )


def failures(folder: Path, why: str, *names: str) -> list[str]:
    return [f"error: {folder / name}: could not be written: {why}; {CURE}" for name in names]


@pytest.mark.engine
def test_what_has_no_room_takes_nothing_with_it(finished: Path, tmp_path: Path) -> None:
    """The system refuses files above a size; smaller files are still written, and no file is
    incomplete.
    """
    folder = tmp_path / "out"
    folder.mkdir()
    flags = [
        "-o",
        folder / "r.json",
        "--html",
        folder / "r.html",
        "-pf",
        folder / "p.png",
        "--csv",
        folder / "r.csv",
        "--markdown",
        folder / "r.md",
        "--pairs",
    ]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, LIMIT))

    ran = in_a_process("show", finished, *flags, stdout=subprocess.PIPE, preexec_fn=limit)
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == failures(
        folder, "File too large", "r.json", "r.html", "p.png"
    )
    plain = in_a_process("show", finished, "--pairs", stdout=subprocess.PIPE)
    *table, verdict = plain.stdout.splitlines()
    assert plain.returncode == 0
    assert (ran.stdout.splitlines()[: len(table) - 1], ran.stdout.splitlines()[-1]) == (
        table[:-1],
        verdict,
    )
    assert sorted(file.name for file in folder.iterdir()) == ["r.csv", "r.md"]
    assert (folder / "r.md").read_text().count("|") > 20


@pytest.mark.engine
def test_a_finished_table_on_a_full_disk(
    compare_q: Run, write_specs: Specs, tmp_path: Path
) -> None:
    """No file can be written, but the table comes from the cache, and the reference store is in
    another folder.
    """
    models = [
        {**FAKE, "label": "ref", "reference": True},
        {**FAKE, "label": "other", "engine": {"boost": 1.0}},
    ]
    data, spec = write_specs(models)
    words = ("-d", data, "-m", spec, "-lf", tmp_path / "kept")
    first, gold = (compare_q(*words) for _ in range(2))
    assert first.status == 0, first.err
    assert "2 of 2 rows come from the cache" in gold.out

    def no_room() -> None:
        # No file may have a single byte; a pipe is not a file.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    ran = in_a_process(*words, stdout=subprocess.PIPE, preexec_fn=no_room)
    assert (ran.returncode, ran.stdout) == (0, gold.out), ran.stderr


@pytest.mark.engine
def test_a_standard_output_that_is_full(finished: Path, tmp_path: Path) -> None:
    """``engines`` prints more than one buffer; --version prints less, and there argparse ends the
    program.
    """
    for flags in (["show", finished, "-o", tmp_path / "r.json"], ["engines"], ["--version"]):
        with open("/dev/full", "w") as full:
            ran = in_a_process(*flags, stdout=full)
        problem = f"error: standard output: could not be written: No space left on device; {CURE}"
        assert (ran.returncode, ran.stderr.splitlines()) == (2, [problem])
    assert RunResult.read(tmp_path / "r.json").labels


@pytest.mark.engine
@pytest.mark.parametrize(
    ("shell", "unbuffered"),
    [
        (">&-", ""),
        (">&- 2>&- <&-", "1"),
        # head ends after one line: what is printed later meets a pipe without a reader.
        ("| head -1", ""),
        ("| head -1", "1"),
        ("2>&1 | true", ""),
        ("2>/dev/full | true", "1"),
    ],
)
def test_nobody_reads_what_is_printed(
    finished: Path, tmp_path: Path, shell: str, unbuffered: str
) -> None:
    """If standard output is closed, all files are written and stay clean, and the exit status is
    the run's.
    """
    words = shlex.join([sys.executable, str(ROOT / "eval" / "compare_q.py"), "show", str(finished)])
    # Without pipefail, the status would be that of the last program of the pipe.
    script = f"set -o pipefail; {words} -o {tmp_path / 'r.json'} --csv {tmp_path / 'r.csv'} {shell}"
    # Unbuffered, a print fails at once; buffered, the failure comes when Python ends.
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    ran = subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, check=False, env=environment
    )
    assert (ran.returncode, ran.stderr) == (0, "")
    assert RunResult.read(tmp_path / "r.json").labels
    assert (tmp_path / "r.csv").read_text().startswith("label,")
    assert ran.stdout.count("\n") == ("head" in shell)
