"""Kill runs at random moments until they finish, and compare their results with undisturbed runs.

    python -m benchmarks.kills OUT.json --kills 200
    python -m benchmarks.kills OUT.json --kills 100 --pairs 50 --engines "two runs"
    python -m benchmarks.kills OUT.json --kills 20 --engines pack gate "vLLM's server"

A run of two toy models (a reference and a model compared with it) is measured once undisturbed. Then it is repeated in
new caches. At random moments, the driver, an engine process, a worker or vLLM's engine core is killed, and the run is
started again. Final results must be equal except for times. vLLM's batches differ between runs, so the largest
difference is reported. All processes must end, and no extra file may be left.

Special campaigns:

- "pack" records a reference pack;
- "gate" compares a model with itself;
- "vLLM's server" uses a real server, which is not killed;
- "two runs": two runs use one cache at the same time, with closed-form models on two texts in different orders. Each
  run's reference is a model of the other run.

``--pairs``: number of pairs of signals. The two signals of a pair are sent within a second, and the driver must then
show its finished rows. ``--seconds``: time after which nothing is disturbed.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from benchmarks import shapes
from compare_q.backends.worker.temporary import PREFIX
from compare_q.eval.gate.report import GateResult
from tests.support.paths import TIMES, without_times
from tests.support.real_server import running

ROOT = Path(__file__).resolve().parents[1]
MODEL = shapes.Shape(hidden=256, layers=4, heads=4, kv_heads=4, intermediate=512, vocabulary=300, context=256)
WINDOWS, LENGTH = 400, 200
PATIENCE_S = 5.0
"""Seconds after a kill in which every process must be gone."""
HANG_S = 300.0
"""Seconds after which an undisturbed run counts as hanging."""
TEMPORARY = "tmp"
"""Folder for the temporary files of runs."""
ROWS = {"two runs": 60, "Transformers": 100, "vLLM": 100, "vLLM's server": 100, "pack": 100, "gate": 16}
"""Windows of a campaign: on two cores with AVX2 alone, 400 of the toy's took Transformers two minutes in bf16."""
SERVED = "vLLM's server"
URL = "KILLS_SERVER"
"""Environment variable with the address of the real server."""
BATCHES_DIFFER = ("vLLM", SERVED)
"""Campaigns whose scores depend on the batch: the largest difference is reported."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLOSED_FORM: dict[str, Any] = {"load_fn": "fake", "engine": {"vocab_size": 300, "seconds": 0.02}}
BOOSTED: dict[str, Any] = {"load_fn": "fake", "engine": {"vocab_size": 300, "seconds": 0.02, "boost": 3.0}}
HF = {"load_fn": "transformers_auto_bf16"}
IN_VLLM = {"load_fn": "vllm_score", "engine": {"enforce_eager": True}}
IN_FLOAT16 = {"load_fn": "vllm_score", "engine": {"enforce_eager": True, "dtype": "float16"}}


@dataclass(frozen=True)
class Work:
    """A command line: the alphabet of each text, and the models.

    ``command``: "run", "pack" or "gate"; ``model_dir`` of a model is the toy's folder unless it has one.
    """

    texts: str
    models: list[dict[str, Any]]
    command: str = "run"

    def words(self, folder: Path, spec: Path, rows: int, results: Path) -> list[str]:
        """The words of the command line; ``results``: a file, or the folder of a pack."""
        data = [str(folder / f"{text}.json") for text in self.texts]
        words = [self.command, "-d", *data, "-m", str(spec), "-r", str(rows), "-o", str(results)]
        if self.command == "pack":
            words.append("--no-floor")
        return words


RUNS = {
    "Transformers": [
        Work("x", [{**HF, "label": "a", "reference": True}, {"load_fn": "transformers", "label": "b"}]),
    ],
    "vLLM": [Work("x", [{**IN_VLLM, "label": "a", "reference": True}, {**IN_FLOAT16, "label": "b"}])],
    "two runs": [
        Work("xy", [{**BOOSTED, "label": "a", "reference": True}, {**CLOSED_FORM, "label": "b"}]),
        Work("yx", [{**CLOSED_FORM, "label": "c", "reference": True}, {**BOOSTED, "label": "d"}]),
    ],
    SERVED: [Work("x", [{**CLOSED_FORM, "label": "a", "reference": True}, {"load_fn": "vllm_server", "label": "b"}])],
    "pack": [Work("x", [{**HF, "label": "a"}], "pack")],
    "gate": [Work("x", [{**HF, "label": "a"}, {**HF, "label": "b", "engine": {"dtype": "bfloat16"}}], "gate")],
}
"""The command lines of a campaign, which use one cache at the same time."""
NOT_COMPARED = TIMES | {"sha256", "run", "repeat", "spec_sha256", "scores_key"}
"""Keys whose values depend on the time: also names of a gate's run, and checksums of files that state a date."""
SHOWN = re.compile(r"^ label ", re.MULTILINE)
NOTHING_YET = re.compile(r"^interrupted; what was finished is in the cache$|^error: .*interrupted ", re.MULTILINE)
"""Message of a run that had not begun to score, had no row yet, or was already showing its table."""


@dataclass
class Seen:
    """Counts and observations of a campaign."""

    kills: Counter[str] = field(default_factory=Counter)
    pairs: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    tables_lost: list[str] = field(default_factory=list)
    failed_alone: list[str] = field(default_factory=list)
    hangs: int = 0
    runs: int = 0
    differing: int = 0
    fields: list[str] = field(default_factory=list)
    largest: float = 0.0
    processes_left: int = 0
    files_left: list[str] = field(default_factory=list)


@dataclass
class Run:
    """One of a campaign's runs, which is started again until it has finished.

    ``begin``: position in the log of its last start; ``disturbed``: True if a process of that start was killed;
    ``baselines``: number of gate.json files of earlier starts, whose scores the cache keeps for ``--baseline``.
    """

    folder: Path
    engine: str
    number: int
    cache: Path
    log: Path
    process: subprocess.Popen[bytes] = field(init=False)
    begin: int = 0
    disturbed: bool = False
    baselines: int = 0

    def start(self) -> None:
        """Start the run; its results are written next to the log."""
        if self.out.is_dir():
            shutil.rmtree(self.out)
        work = RUNS[self.engine][self.number]
        if work.command == "gate" and self.out.exists():
            # A gate that lost the worker of a later variant has written its file.
            result = GateResult.model_validate_json(self.out.read_bytes())
            if result.is_baseline:
                self.baselines += 1
        self.out.unlink(missing_ok=True)
        self.disturbed = False
        spec = self.log.with_suffix(".models.json")
        models = []
        for model in work.models:
            is_served = model["load_fn"] == "vllm_server"
            where = os.environ[URL] if is_served else str(self.folder / "model")
            models.append({"model_dir": where, **model})
        spec.write_text(json.dumps(models))
        words = work.words(self.folder, spec, ROWS[self.engine], self.out)
        environment = {**os.environ, "COMPARE_Q_CACHE": str(self.cache), "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
                       "COMPARE_Q_ENGINES": "tests.support.fake_engine:FakeEngine",
                       "KILLED_RUN": str(self.log), "TMPDIR": str(self.folder / TEMPORARY)}  # fmt: skip
        with self.log.open("ab") as output:
            self.begin = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "eval" / "compare_q.py"), *words],
                stdout=output, stderr=output, env=environment, start_new_session=True,
            )  # fmt: skip

    @property
    def out(self) -> Path:
        """The path that the command line writes: a file, or the folder of a pack."""
        return self.log.with_suffix(".out")

    @property
    def results(self) -> Path:
        """The file of results."""
        is_pack = RUNS[self.engine][self.number].command == "pack"
        return self.out / "pack.json" if is_pack else self.out

    @property
    def said(self) -> str:
        """Output that the run has printed since its last start."""
        return self.log.read_bytes()[self.begin :].decode(errors="replace")

    def processes(self) -> dict[int, str]:
        """Process id -> kind of process."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if f"KILLED_RUN={self.log}".encode() not in (folder / "environ").read_bytes().split(b"\0"):
                    continue
                name = (folder / "comm").read_text().strip()
                words = (folder / "cmdline").read_bytes().decode(errors="replace")
                kind = "driver" if "compare_q.py" in words else "engine" if name.startswith("VLLM") else "other"
                if "compare_q.backends.worker.engine_process" in words:
                    above = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                    mine = Path(f"/proc/{above}/cmdline").read_bytes().decode(errors="replace")
                    kind = "worker" if "compare_q.backends.worker.engine_process" in mine else "engine process"
                found[int(folder.name)] = kind
        return found

    def ended(self, seen: Seen) -> None:
        """Wait for the run to end, and count the processes and files that it leaves."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(HANG_S)
        seen.hangs += self.process.poll() is None
        until = time.monotonic() + PATIENCE_S
        while (left := self.processes()) and time.monotonic() < until:
            time.sleep(0.1)
        seen.processes_left += len(left)
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def kill_one(self, seen: Seen) -> None:
        """Kill a process of a random kind, or end the driver by SIGTERM."""
        there = self.processes()
        kinds = sorted(set(there.values()) - {"other"}) or ["driver"]
        kind = random.choice([*kinds, "driver, by SIGTERM"])
        number = signal.SIGTERM if kind.endswith("SIGTERM") else signal.SIGKILL
        driver = kind.startswith("driver")
        target = self.process.pid if driver else random.choice([p for p, k in there.items() if k == kind])
        with suppress(ProcessLookupError):
            os.kill(target, number)
            seen.kills[kind] += 1
        self.disturbed = True  # after losing a worker the run continues with its next model
        if driver:
            self.ended(seen)

    def signal_twice(self, seen: Seen) -> None:
        """Send the driver two different signals within a second; it must show the rows that it had finished."""
        pair = random.sample(ENDING, 2)
        before = self.said
        self.process.send_signal(pair[0])
        time.sleep(random.choice([0.0, random.uniform(0.0, 0.1), random.uniform(0.0, 1.0)]))
        self.process.send_signal(pair[1])
        seen.pairs[" and ".join(number.name for number in pair)] += 1
        self.ended(seen)
        status, said = self.process.returncode, self.said
        begun = "\nscoring " in before
        seen.endings[f"{'a row' if begun else 'no row' if before else 'starting'}, exit status {status}"] += 1
        good = {0, int(self.disturbed), *(128 + number for number in pair)}
        if "\nresults: " in said:  # while Python ends, after everything is shown, a signal ends it like any program
            good |= {-number for number in pair}
        ends_well = status in good and "Traceback" not in said
        nothing_yet = NOTHING_YET.search(said)
        is_shown = SHOWN.search(said) or (nothing_yet and not begun)
        if before and not (ends_well and is_shown and (nothing_yet or self.results.exists())):
            seen.tables_lost.append(f"{pair[0].name}, {pair[1].name}: status {status}: {said[-2000:]}")


def comparable(run: Run) -> Any:
    """Return a run's results without times; for a pack, also return a checksum of each tensor."""
    tensors = {}
    for file in sorted(run.results.parent.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            content = tensor.flatten().view(torch.uint8).numpy().tobytes()
            tensors[f"{file.name}: {name}"] = hashlib.sha256(content).hexdigest()
    return {**without_times(json.loads(run.results.read_text(encoding="utf-8")), NOT_COMPARED), "tensors": tensors}


def differing_fields(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Yield the places where two results differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from differing_fields(a.get(key), b.get(key), f"{where}/{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for place, pair in enumerate(zip(a, b, strict=True)):
            yield from differing_fields(*pair, f"{where}/{place}")
    elif a != b:
        yield f"{where}: {a} and {b}"


def models_of(found: Any) -> list[dict[str, Any]]:
    """Every model's row."""
    rows: list[dict[str, Any]] = found["models"]
    return rows


def difference(a: Any, b: Any) -> float:
    """Largest relative difference of perplexity and divergence between two results."""
    largest = 0.0
    for mine, other in zip(models_of(a), models_of(b), strict=True):
        for name in ("ppl", "kld"):
            if mine[name] is not None:
                largest = max(largest, abs(mine[name] - other[name]) / max(abs(other[name]), 1e-12))
    return largest


def files_of(cache: Path) -> set[str]:
    """Files of a cache; checksums and sessions are left out of their names."""
    names = set()
    for file in cache.rglob("*"):
        if file.is_file() and "logs" not in file.parts:
            parts = file.relative_to(cache).parts
            segment = parts[0] == "scores" and file.suffix in (".safetensors", ".json")
            names.add("/".join((*parts[:-1], f"*{file.suffix}")) if segment else "/".join(parts))
    return names


def left_over(run: Run, whole: Run) -> list[str]:
    """Return what a run has left in its cache, and the undisturbed run has not.

    The entries of a gate have other keys in each gate, and are counted.  Each gate that has written its file keeps the
    scores and the store of its first variant.
    """
    if RUNS[run.engine][run.number].command != "gate":
        return sorted(files_of(run.cache) - files_of(whole.cache))
    left = []
    for section in ("scores", "references", "runs"):
        expected = (1 + run.baselines) * len(list((whole.cache / section).glob("*")))
        more = len(list((run.cache / section).glob("*"))) - expected
        if more > 0:
            left.append(f"{section}: {more} more entries")
    return left


def in_memory_and_temporary(folder: Path) -> set[str]:
    """Files of ``/dev/shm``, new ones from the campaign only if nothing else runs on the machine; workers' folders."""
    files = [*Path("/dev/shm").glob("*"), *folder.joinpath(TEMPORARY).glob(f"{PREFIX}*")]
    return {str(file) for file in files}


def runs_on(folder: Path, engine: str, name: str) -> list[Run]:
    """The runs of an engine's campaign, not started yet, on a cache of that name."""
    cache = folder / f"{engine}-{name}"
    return [Run(folder, engine, at, cache, folder / f"{engine}.{name}.{at}.log") for at in range(len(RUNS[engine]))]


def until_finished(
    runs: list[Run], seen: Seen, duration: float, todo: list[Callable[[Run, Seen], None]], over: float
) -> None:
    """Run all runs to their end; at random moments until ``over``, do an action of ``todo`` to one of them."""
    for run in runs:
        run.start()
    while not all(run.process.poll() == 0 for run in runs):
        if time.monotonic() > over:
            todo.clear()
        until = time.monotonic() + (random.uniform(0.3, duration / len(runs)) if todo else HANG_S)
        while time.monotonic() < until and any(run.process.poll() is None for run in runs):
            time.sleep(0.02)
        for run in runs:
            if run.process.poll() not in (0, None):
                run.ended(seen)
                seen.failed_alone += [] if run.disturbed else [run.said[-2000:]]
                run.start()
        going = [run for run in runs if run.process.poll() is None]
        if time.monotonic() < until or not going:
            continue
        run = random.choice(going)
        if todo:
            todo.pop()(run, seen)
        else:
            run.process.kill()
            seen.hangs += 1
            run.ended(seen)
        if run.process.poll() not in (0, None):
            run.start()


def campaign(folder: Path, engine: str, kills: int, pairs: int, over: float) -> dict[str, Any]:
    """Kill runs of one engine ``kills`` times and send them ``pairs`` pairs of signals, until the time is over."""
    folder.joinpath(TEMPORARY).mkdir(exist_ok=True)
    seen, began, before = Seen(), time.monotonic(), in_memory_and_temporary(folder)
    whole = runs_on(folder, engine, "whole")
    until_finished(whole, seen, 0.0, [], over)
    gold, duration = [comparable(run) for run in whole], 0.0
    todo: list[Callable[[Run, Seen], None]] = [Run.kill_one for _ in range(kills)]
    todo += [Run.signal_twice for _ in range(pairs)]
    random.shuffle(todo)
    while todo:
        seen.runs += 1
        runs = runs_on(folder, engine, str(seen.runs))
        shutil.copytree(whole[0].cache / "tokens", runs[0].cache / "tokens")  # no tokenizing, only models
        began = time.monotonic()
        until_finished(runs, seen, duration, todo if duration else [], over)
        duration = duration or time.monotonic() - began  # of the first runs, which are not disturbed
        for run, other in zip(runs, gold, strict=True):
            found = comparable(run)
            seen.differing += engine not in BATCHES_DIFFER and found != other
            seen.fields += [] if engine in BATCHES_DIFFER else itertools.islice(differing_fields(found, other), 40)
            if "models" in other:
                seen.largest = max(seen.largest, difference(found, other))
        seen.files_left += left_over(runs[0], whole[0]) + sorted(in_memory_and_temporary(folder) - before)
        shutil.rmtree(runs[0].cache)
        left = f"{seen.processes_left} processes, {seen.files_left} files"
        differing = f"{seen.differing} differ, by at most {seen.largest:.2g} {seen.fields[:12] or ''}"
        lost = f"{seen.hangs} hang, {len(seen.tables_lost)} tables lost, {len(seen.failed_alone)} fail undisturbed"
        done = f"{seen.kills.total()} kills, {seen.pairs.total()} pairs of signals, {seen.runs} finished"
        print(f"{engine}: {done}, {differing}, {lost}, left: {left}", flush=True)
    return {
        "kills": dict(seen.kills), "pairs_of_signals": dict(seen.pairs), "endings_after_pairs": dict(seen.endings),
        "runs": seen.runs, "seconds_undisturbed": duration,
        "results_that_differ": seen.differing, "where": seen.fields, "largest_relative_difference": seen.largest,
        "hangs": seen.hangs,
        "tables_lost": seen.tables_lost, "failed_undisturbed": seen.failed_alone,
        "processes_left": seen.processes_left, "files_left": seen.files_left,
    }  # fmt: skip


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    p.add_argument("out", type=Path)
    p.add_argument("--kills", type=int, default=200, help="in all; a third of them in vLLM if others are killed, too")
    p.add_argument("--pairs", type=int, default=0, help="of signals, in each campaign")
    p.add_argument("--engines", nargs="+", default=["Transformers", "vLLM"], choices=list(RUNS))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--seconds", type=float, default=math.inf, help="after which nothing more is killed")
    args = p.parse_args()
    random.seed(args.seed)
    over = time.monotonic() + args.seconds
    for number in ENDING:  # runs inherit ignored signals, and would rightly ignore them
        signal.signal(number, signal.SIG_DFL)
    shares = dict.fromkeys(args.engines, args.kills)
    if {"Transformers", "vLLM"} <= set(shares):
        shares |= {"Transformers": args.kills - args.kills // 3, "vLLM": args.kills // 3}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        folder = Path(scratch)
        shapes.make(folder / "made", MODEL)["bf16"].rename(folder / "model")
        if SERVED in args.engines:
            os.environ[URL] = stack.enter_context(running(folder / "model", folder / "server.log"))
        for seed, name in enumerate("xy"):
            letters = np.random.default_rng(seed).choice(list("abcdefgh \n"), WINDOWS * LENGTH)
            (folder / f"{name}.txt").write_text("".join(letters), encoding="utf-8")
            data = {"tokenizer_dir": str(folder / "model"), "dataset": "text", "path": str(folder / f"{name}.txt")}
            text = json.dumps({**data, "eval_len": LENGTH, "eval_stride": LENGTH})
            (folder / f"{name}.json").write_text(text, encoding="utf-8")
        found = {engine: campaign(folder, engine, shares[engine], args.pairs, over) for engine in args.engines}
    from compare_q.backends.common import machine

    origin = {"commit": machine.commit(), "versions": machine.versions(), "cpu": machine.cpu()}
    args.out.write_text(json.dumps({**origin, **found}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
