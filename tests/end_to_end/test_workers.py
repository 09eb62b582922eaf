"""Workers as processes: a worker that dies, hangs or is ended loses only its own row, and leaves no
process or file.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from compare_q.backends.worker.engine_process import ENDING
from tests.support import ROOT, comparisons
from tests.support.paths import without_times
from tests.support.processes import processes_of, users_environment, wait_until, workers_of
from tests.support.texts import tokenize
from tests.support.toy import Specs

pytestmark = pytest.mark.engine

VOCAB = 300
fake = partial(comparisons.fake, vocab_size=VOCAB)


@pytest.fixture
def start(tmp_path: Path, own_cache: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start the command line as a separate process; its output goes to files in ``tmp_path``."""
    started = []

    def run(*words: object, **environment: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(ROOT / "eval" / "compare_q.py"), *map(str, words)]
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
            how: dict[str, Any] = {
                "env": users_environment(**environment),
                "start_new_session": True,
                "text": True,
            }
            process = subprocess.Popen(command, stdout=out, stderr=err, **how)
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def finished(process: subprocess.Popen[str], tmp_path: Path) -> tuple[int, str, str]:
    """Wait for the end of a process; return (exit status, standard output, standard error)."""
    status = process.wait(timeout=600)
    return status, (tmp_path / "out").read_text(), (tmp_path / "err").read_text()


def results(file: Path) -> dict[str, Any]:
    """Return results.json without the keys that differ between runs: times, and whether a row was
    cached.
    """
    found: dict[str, Any] = without_times(json.loads(file.read_text()))
    return found


def test_three_bad_models_lose_no_row_but_their_own(
    start: Any, tmp_path: Path, write_specs: Specs, own_cache: Path
) -> None:
    bad = {"abort": "SIGABRT", "memory": "out of memory", "silence": "finished no window for 8 s"}
    models = [fake(name, fail=2, failure=name) for name in bad] + [
        fake("good", boost=1.0),
        fake("uniform"),
    ]
    data, specs = write_specs(models)
    tokenize(data, own_cache)
    status, _, err = finished(
        start("-d", data, "-m", specs, "--deadline", 8, "-o", tmp_path / "r.json"), tmp_path
    )
    rows = {model["label"]: model for model in results(tmp_path / "r.json")["models"]}
    assert status == 1, err
    assert all(reason in rows[name]["error"] for name, reason in bad.items()), rows
    assert rows["uniform"]["ppl"] == pytest.approx(VOCAB, rel=1e-6)
    assert rows["good"]["error"] is None
    assert "Fatal Python error: Aborted" in rows["abort"]["error"]
    assert not processes_of(own_cache)
    # These models run again in the order of the specs, and begin with their missing windows.
    again, err = start("-d", data, "-m", specs, "--deadline", 8), tmp_path / "err"
    wait_until(lambda: "loading silence" in err.read_text() or again.poll() is not None)
    order = [
        line.split()[1].removesuffix(":")
        for line in err.read_text().splitlines()
        if line.startswith("loading ")
    ]
    assert order == list(bad)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_run_that_is_told_to_end_shows_what_it_has(
    start: Any, tmp_path: Path, write_specs: Specs, own_cache: Path, number: signal.Signals
) -> None:
    """Further signals after the first one, until the run ends, change nothing; systemd sends two
    signals.
    """
    data, specs = write_specs([fake("first"), fake("slow", seconds=1.0), fake("never", boost=1.0)])
    tokenize(data, own_cache)
    process = start("-d", data, "-m", specs, "-o", tmp_path / "r.json")
    scores = own_cache / "scores"
    # A folder for each model: the second one is being scored.
    wait_until(lambda: len({file.parent for file in scores.glob("*/*.safetensors")}) == 2)
    process.send_signal(number)
    # Python handles the lower of two pending signals first: the run must have handled this one.
    wait_until(lambda: not workers_of(own_cache) or process.poll() is not None)
    while process.poll() is None:
        for other in ENDING:
            process.send_signal(other)
            time.sleep(0.01)
    status, out, said = finished(process, tmp_path)
    assert "Traceback" not in said
    rows = [model["error"] for model in results(tmp_path / "r.json")["models"]]
    assert status == 128 + number
    assert rows[0] is None
    assert rows[1:] == ["interrupted before all its windows were scored; run again to go on"] * 2
    assert "never: failed" in out
    assert not processes_of(own_cache)


def test_a_killed_driver_leaves_no_process_and_loses_no_window(
    start: Any, tmp_path: Path, write_specs: Specs, own_cache: Path
) -> None:
    """The two replicas of the running model end, and so does the process that has forked them."""
    data, specs = write_specs(
        [{**fake("slow", seconds=0.8), "replicas": 2}, fake("other", boost=1.0)]
    )
    for cache in (own_cache, tmp_path / "new"):
        tokenize(data, cache)
    process = start("-d", data, "-m", specs)
    wait_until(lambda: list((own_cache / "scores").glob("*/*.safetensors")))
    assert len(workers_of(own_cache)) == 2 < len(processes_of(own_cache))
    process.kill()
    process.wait()
    wait_until(lambda: not processes_of(own_cache))
    status, _, err = finished(
        start("-d", data, "-m", specs, "-o", tmp_path / "after.json"), tmp_path
    )
    assert status == 0, err
    scored = next(line for line in err.splitlines() if line.startswith("scoring slow"))
    assert int(scored.split(": ")[1].split()[0]) < 10  # of 10 windows
    finished(
        start(
            "-d", data, "-m", specs, "-o", tmp_path / "whole.json", "--cache-dir", tmp_path / "new"
        ),
        tmp_path,
    )
    assert results(tmp_path / "after.json") == results(tmp_path / "whole.json")


def test_two_models_run_at_the_same_time_on_two_gpus(
    start: Any, tmp_path: Path, write_specs: Specs, own_cache: Path
) -> None:
    """nvidia-smi is a stand-in, but each worker really sees its GPU, and both models score at the
    same time.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    smi = folder / "nvidia-smi"
    line = "echo '{0}, GPU-{0}, Some GPU, 1.0, 80000'"
    smi.write_text("#!/bin/sh\n" + "\n".join(line.format(number) for number in range(3)))
    smi.chmod(0o755)
    both = {"meet": str(tmp_path / "meeting")}
    data, specs = write_specs(
        [fake("a", **both), fake("b", **both, boost=1.0), {**fake("c"), "gpus": 2}]
    )
    tokenize(data, own_cache)
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    words = ("-d", data, "-m", specs, "-o", tmp_path / "r.json", "--gpus", "0,2")
    status, _, err = finished(start(*words, PATH=path), tmp_path)
    assert status == 0, err
    rows = {model["label"]: model["provenance"] for model in results(tmp_path / "r.json")["models"]}
    assert {rows["a"]["visible_devices"], rows["b"]["visible_devices"]} == {"0", "2"}
    assert rows["c"]["visible_devices"] == "0,2"
    assert len(list((tmp_path / "meeting").iterdir())) == 2
    assert sorted(log.name[:2] for log in own_cache.glob("logs/*")) == ["a.", "b.", "c."]
    (tmp_path / "short.txt").write_text("Few words.")
    data.write_text(
        json.dumps({**json.loads(data.read_text()), "path": str(tmp_path / "short.txt")})
    )
    status, _, err = finished(start(*words, PATH=path), tmp_path)
    assert (status, "the text has 10 tokens" in err) == (2, True), err
    assert (
        processes_of(own_cache) == []
    )  # the first model's engine was imported before the text was there
    assert len(list(own_cache.glob("logs/*"))) == 3
    specs.write_text(json.dumps([{**fake("c"), "gpus": 3}]))
    status, _, err = finished(start("-d", data, "-m", specs, "--gpus", "0,2", PATH=path), tmp_path)
    assert (status, "gpus: the model needs 3 GPUs, the run has 2" in err) == (2, True), err


def test_an_engine_runs_in_the_python_that_a_spec_names(
    start: Any, tmp_path: Path, write_specs: Specs, own_cache: Path
) -> None:
    bare, full = tmp_path / "bare", tmp_path / "full"
    for folder in (bare, full):
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    here = Path(pytest.__file__).parents[1]
    site = next((full / "lib").glob("python*/site-packages"))
    (site / "shared.pth").write_text(f"{here}\n")
    data, specs = write_specs([{**fake("a"), "python": str(bare)}])
    tokenize(data, own_cache)
    status, _, err = finished(start("-d", data, "-m", specs), tmp_path)
    assert status == 2
    assert "a: python: " in err
    assert f"{bare / 'bin' / 'python'} lacks pydantic: " in err  # what it would import first
    assert "-m pip install numpy pydantic safetensors" in err
    data, specs = write_specs([fake("a")])
    words = ("-d", data, "-m", specs, "--python", f"fake={full}", "-o", tmp_path / "r.json")
    status, _, err = finished(start(*words), tmp_path)
    assert status == 0, err
    (row,) = results(tmp_path / "r.json")["models"]
    assert row["provenance"]["python_path"] == str(full / "bin" / "python")
    (tmp_path / "no program").touch()
    assert (
        finished(
            start("-d", data, "-m", specs, "--python", f"fake={tmp_path / 'no program'}"), tmp_path
        )[0]
        == 2
    )
