"""Kill runs at random moments until they finish, and compare their results with undisturbed runs.

    python -m benchmarks.kills OUT.json --kills 200
    python -m benchmarks.kills OUT.json --kills 100 --pairs 50 --engines "two runs"
    python -m benchmarks.kills OUT.json --kills 20 --engines pack gate "vLLM's server"

A run of two toy models (a reference and a model compared with it) is measured once undisturbed.
Then it is repeated in new caches. At random moments, the driver, an engine process, a worker or
vLLM's engine core is killed, and the run is started again. Final results must be equal except for
times. vLLM's batches differ between runs, so the largest difference is reported. All processes must
end, and no extra file may be left.

Special campaigns:

- "pack" records a reference pack;
- "gate" compares a model with itself;
- "vLLM's server" uses a real server, which is not killed;
- "two runs": two runs use one cache at the same time, with closed-form models on two texts in
  different orders. Each run's reference is a model of the other run.

``--pairs``: number of pairs of signals. The two signals of a pair are sent within a second, and the
driver must then show its finished rows. ``--seconds``: time after which nothing is disturbed.
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
from compare_q.eval.gate.gate_report import GateResult
from tests.support.paths import TIME_KEYS, without_times
from tests.support.real_server import running

ROOT = Path(__file__).resolve().parents[1]
MODEL = shapes.Shape(
    hidden=256, layers=4, heads=4, kv_heads=4, intermediate=512, vocabulary=300, context=256
)
WINDOWS = 400
LENGTH = 200
PATIENCE_S = 5.0
"""Seconds after a kill in which every process must be gone."""
HANG_S = 300.0
"""Seconds after which an undisturbed run counts as hanging."""
TEMPORARY = "tmp"
"""Folder for the temporary files of runs."""
ROWS = {
    "two runs": 60,
    "Transformers": 100,
    "vLLM": 100,
    "vLLM's server": 100,
    "pack": 100,
    "gate": 16,
}
"""Windows of a campaign: on two cores with AVX2 alone, 400 of the toy's took Transformers two
minutes in bf16."""
SERVED = "vLLM's server"
URL = "KILLS_SERVER"
"""Environment variable with the address of the real server."""
BATCHES_DIFFER = ("vLLM", SERVED)
"""Campaigns whose scores depend on the batch: the largest difference is reported."""
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
CLOSED_FORM: dict[str, Any] = {"load_fn": "fake", "engine": {"vocab_size": 300, "seconds": 0.02}}
BOOSTED: dict[str, Any] = {
    "load_fn": "fake",
    "engine": {"vocab_size": 300, "seconds": 0.02, "boost": 3.0},
}
HF = {"load_fn": "transformers_auto_bf16"}
IN_VLLM = {"load_fn": "vllm_score", "engine": {"enforce_eager": True}}
IN_FLOAT16 = {"load_fn": "vllm_score", "engine": {"enforce_eager": True, "dtype": "float16"}}


@dataclass(frozen=True)
class Work:
    """A command line: the alphabet of each text, and the models.

    ``command``: "run", "pack" or "gate"; ``model_dir`` of a model is the toy's folder unless it has
    one.
    """

    texts: str
    models: list[dict[str, Any]]
    command: str = "run"

    def words(self, folder: Path, spec: Path, rows: int, results: Path) -> list[str]:
        """Return the words of the command line; ``results``: a file, or the folder of a pack."""
        data = [str(folder / f"{text}.json") for text in self.texts]
        words = [self.command, "-d", *data, "-m", str(spec), "-r", str(rows), "-o", str(results)]
        if self.command == "pack":
            words.append("--no-floor")
        return words


RUNS = {
    "Transformers": [
        Work(
            "x",
            [{**HF, "label": "a", "reference": True}, {"load_fn": "transformers", "label": "b"}],
        ),
    ],
    "vLLM": [
        Work("x", [{**IN_VLLM, "label": "a", "reference": True}, {**IN_FLOAT16, "label": "b"}])
    ],
    "two runs": [
        Work("xy", [{**BOOSTED, "label": "a", "reference": True}, {**CLOSED_FORM, "label": "b"}]),
        Work("yx", [{**CLOSED_FORM, "label": "c", "reference": True}, {**BOOSTED, "label": "d"}]),
    ],
    SERVED: [
        Work(
            "x",
            [
                {**CLOSED_FORM, "label": "a", "reference": True},
                {"load_fn": "vllm_server", "label": "b"},
            ],
        )
    ],
    "pack": [Work("x", [{**HF, "label": "a"}], "pack")],
    "gate": [
        Work(
            "x",
            [{**HF, "label": "a"}, {**HF, "label": "b", "engine": {"dtype": "bfloat16"}}],
            "gate",
        )
    ],
}
"""The command lines of a campaign, which use one cache at the same time."""
NOT_COMPARED = TIME_KEYS | {"sha256", "run", "repeat", "spec_sha256", "scores_key"}
"""Keys whose values depend on the time: also names of a gate's run, and checksums of files that
state a date."""
WORKER_MODULE = "compare_q.backends.worker.engine_process"
TABLE = re.compile(r"^ label ", re.MULTILINE)
NOTHING_YET = re.compile(
    r"^interrupted; what was finished is in the cache$|^error: .*interrupted ", re.MULTILINE
)
"""Message of a run that had not begun to score, had no row yet, or was already showing its table.
"""


@dataclass
class Counts:
    """Counts and observations of a campaign.

    Attributes:
        kills: by the kind of process.
        pairs: pairs of signals, by their names.
        endings: exit statuses after pairs of signals, by what the run had shown.
        tables_lost: endings without the rows that were finished.
        failed_alone: output of runs that failed undisturbed.
        differing, fields, largest: results that differ from the undisturbed run's, where, and by
            how much at most.
        processes_left, files_left: what runs left after their end.
    """

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

    ``begin``: position in the log of its last start; ``disturbed``: True if a process of that start
    was killed; ``baselines``: number of gate.json files of earlier starts, whose scores the cache
    keeps for ``--baseline``.
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
        # The folder of a pack.
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
            model_dir = str(self.folder / "model")
            if model["load_fn"] == "vllm_server":
                model_dir = os.environ[URL]
            models.append({"model_dir": model_dir, **model})
        spec.write_text(json.dumps(models))
        words = work.words(self.folder, spec, ROWS[self.engine], self.out)
        environment = {
            **os.environ,
            "COMPARE_Q_CACHE": str(self.cache),
            # vLLM's engine core is then a process, which can be killed.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "COMPARE_Q_ENGINES": "tests.support.fake_engine:FakeEngine",
            # Marks all processes of this run, which inherit it.
            "KILLED_RUN": str(self.log),
            "TMPDIR": str(self.folder / TEMPORARY),
        }
        with self.log.open("ab") as output:
            self.begin = output.tell()
            self.process = subprocess.Popen(
                [sys.executable, str(ROOT / "eval" / "compare_q.py"), *words],
                stdout=output,
                stderr=output,
                env=environment,
                start_new_session=True,
            )

    @property
    def out(self) -> Path:
        """The path that the command line writes: a file, or the folder of a pack."""
        return self.log.with_suffix(".out")

    @property
    def results(self) -> Path:
        """The file of results."""
        if RUNS[self.engine][self.number].command == "pack":
            return self.out / "pack.json"
        return self.out

    @property
    def output(self) -> str:
        """Output that the run has printed since its last start."""
        return self.log.read_bytes()[self.begin :].decode(errors="replace")

    def processes(self) -> dict[int, str]:
        """Return process id -> kind of process, of all processes of this run."""
        variable = f"KILLED_RUN={self.log}".encode()
        kinds = {}
        for folder in Path("/proc").glob("[0-9]*"):
            # Processes may end while they are read.
            with suppress(OSError):
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    kinds[int(folder.name)] = kind_of_process(folder)
        return kinds

    def ended(self, counts: Counts) -> None:
        """Wait for the run to end, and count the processes that it leaves."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(HANG_S)
        if self.process.poll() is None:
            counts.hangs += 1
        until = time.monotonic() + PATIENCE_S
        running_processes = self.processes()
        while running_processes and time.monotonic() < until:
            time.sleep(0.1)
            running_processes = self.processes()
        counts.processes_left += len(running_processes)
        # They would disturb the next start of the run.
        for pid in running_processes:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def kill_one(self, counts: Counts) -> None:
        """Kill a process of a random kind, or end the driver by SIGTERM."""
        processes = self.processes()
        kinds = sorted(set(processes.values()) - {"other"}) or ["driver"]
        kind = random.choice([*kinds, "driver, by SIGTERM"])
        number = signal.SIGKILL
        if kind.endswith("SIGTERM"):
            number = signal.SIGTERM
        is_driver = kind.startswith("driver")
        if is_driver:
            target = self.process.pid
        else:
            target = random.choice([pid for pid, name in processes.items() if name == kind])
        with suppress(ProcessLookupError):
            os.kill(target, number)
            counts.kills[kind] += 1
        # After losing a worker the run continues with its next model.
        self.disturbed = True
        if is_driver:
            self.ended(counts)

    def signal_twice(self, counts: Counts) -> None:
        """Send the driver two different signals within a second.

        It must show the rows that it had finished.
        """
        first, second = random.sample(ENDING, 2)
        before = self.output
        self.process.send_signal(first)
        time.sleep(random.choice([0.0, random.uniform(0.0, 0.1), random.uniform(0.0, 1.0)]))
        self.process.send_signal(second)
        counts.pairs[f"{first.name} and {second.name}"] += 1
        self.ended(counts)
        status = self.process.returncode
        output = self.output
        has_row = "\nscoring " in before
        progress = "starting"
        if has_row:
            progress = "a row"
        elif before:
            progress = "no row"
        counts.endings[f"{progress}, exit status {status}"] += 1
        if before and not self.ended_well(status, output, {first, second}, has_row=has_row):
            ending = f"{first.name}, {second.name}: status {status}: {output[-2000:]}"
            counts.tables_lost.append(ending)

    def ended_well(
        self, status: int, output: str, signals: set[signal.Signals], *, has_row: bool
    ) -> bool:
        """Return True if a run that got these signals showed all that it had finished.

        ``has_row``: it was scoring before the signals.
        """
        good = {0, int(self.disturbed)}
        for number in signals:
            good.add(128 + number)
            # While Python ends, after everything is shown, a signal ends it like any program.
            if "\nresults: " in output:
                good.add(-number)
        if status not in good or "Traceback" in output:
            return False
        nothing_yet = NOTHING_YET.search(output) is not None
        if not TABLE.search(output) and (has_row or not nothing_yet):
            return False
        return nothing_yet or self.results.exists()


def kind_of_process(folder: Path) -> str:
    """Return the kind of a process; ``folder``: in /proc.

    An engine process forks the workers, which have its command line.
    """
    name = (folder / "comm").read_text().strip()
    words = (folder / "cmdline").read_bytes().decode(errors="replace")
    if WORKER_MODULE in words:
        # The name, in parentheses, may contain spaces and parentheses.
        _, _, after_name = (folder / "stat").read_text().rpartition(")")
        parent = int(after_name.split()[1])
        words_of_parent = Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace")
        if WORKER_MODULE in words_of_parent:
            return "worker"
        return "engine process"
    if "compare_q.py" in words:
        return "driver"
    if name.startswith("VLLM"):
        return "engine"
    return "other"


Action = Callable[[Run, Counts], None]
"""A way to disturb a run."""


def comparable(run: Run) -> Any:
    """Return a run's results without times; for a pack, also a checksum of each tensor."""
    tensors = {}
    for file in sorted(run.results.parent.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            # NumPy has no bf16, so the bytes are compared.
            content = tensor.flatten().view(torch.uint8).numpy().tobytes()
            tensors[f"{file.name}: {name}"] = hashlib.sha256(content).hexdigest()
    results = json.loads(run.results.read_text(encoding="utf-8"))
    return {**without_times(results, NOT_COMPARED), "tensors": tensors}


def differing_fields(a: Any, b: Any, where: str = "") -> Iterator[str]:
    """Yield the places where two results differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from differing_fields(a.get(key), b.get(key), f"{where}/{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for number, (first, second) in enumerate(zip(a, b, strict=True)):
            yield from differing_fields(first, second, f"{where}/{number}")
    elif a != b:
        yield f"{where}: {a} and {b}"


def difference(results: Any, other_results: Any) -> float:
    """Return the largest relative difference of perplexity and divergence between two results."""
    largest = 0.0
    for row, other in zip(results["models"], other_results["models"], strict=True):
        for name in ("ppl", "kld"):
            if row[name] is not None:
                # The KLD of a model from itself may be 0.
                size = max(abs(other[name]), 1e-12)
                largest = max(largest, abs(row[name] - other[name]) / size)
    return largest


def files_of(cache: Path) -> set[str]:
    """Return the files of a cache; checksums and sessions are left out of their names."""
    names = set()
    for file in cache.rglob("*"):
        if not file.is_file() or "logs" in file.parts:
            continue
        parts = file.relative_to(cache).parts
        if parts[0] == "scores" and file.suffix in (".safetensors", ".json"):
            parts = (*parts[:-1], f"*{file.suffix}")
        names.add("/".join(parts))
    return names


def left_over(run: Run, undisturbed: Run) -> list[str]:
    """Return what a run has left in its cache, and the undisturbed run has not.

    The entries of a gate have other keys in each gate, and are counted.  Each gate that has written
    its file keeps the scores and the store of its first variant.
    """
    if RUNS[run.engine][run.number].command != "gate":
        return sorted(files_of(run.cache) - files_of(undisturbed.cache))
    surplus = []
    for section in ("scores", "references", "runs"):
        expected = (1 + run.baselines) * len(list((undisturbed.cache / section).glob("*")))
        more = len(list((run.cache / section).glob("*"))) - expected
        if more > 0:
            surplus.append(f"{section}: {more} more entries")
    return surplus


def in_memory_and_temporary(folder: Path) -> set[str]:
    """Return the files of ``/dev/shm``, and the folders for temporary files of workers.

    New files in ``/dev/shm`` come from the campaign only if nothing else runs on the machine.
    """
    files = [*Path("/dev/shm").glob("*"), *folder.joinpath(TEMPORARY).glob(f"{PREFIX}*")]
    return {str(file) for file in files}


def runs_on(folder: Path, engine: str, name: str) -> list[Run]:
    """Return the runs of an engine's campaign, not started yet, on a cache of that name."""
    cache = folder / f"{engine}-{name}"
    runs = []
    for number in range(len(RUNS[engine])):
        runs.append(Run(folder, engine, number, cache, folder / f"{engine}.{name}.{number}.log"))
    return runs


def until_finished(
    runs: list[Run],
    counts: Counts,
    duration: float,
    actions: list[Action],
    over: float,
) -> None:
    """Run all runs to their end; at random moments, do an action to one of them.

    Each action is removed from ``actions``; none are done after the time ``over``.
    """
    for run in runs:
        run.start()
    while not all(run.process.poll() == 0 for run in runs):
        if time.monotonic() > over:
            actions.clear()
        wait = HANG_S
        if actions:
            wait = random.uniform(0.3, duration / len(runs))
        until = time.monotonic() + wait
        while time.monotonic() < until and any(run.process.poll() is None for run in runs):
            time.sleep(0.02)
        for run in runs:
            if run.process.poll() not in (0, None):
                run.ended(counts)
                if not run.disturbed:
                    counts.failed_alone.append(run.output[-2000:])
                run.start()
        unfinished = [run for run in runs if run.process.poll() is None]
        if time.monotonic() < until or not unfinished:
            continue
        run = random.choice(unfinished)
        if actions:
            action = actions.pop()
            action(run, counts)
        else:
            run.process.kill()
            counts.hangs += 1
            run.ended(counts)
        if run.process.poll() not in (0, None):
            run.start()


def campaign(folder: Path, engine: str, kills: int, pairs: int, over: float) -> dict[str, Any]:
    """Kill runs of one engine, and send them pairs of signals, until the time is ``over``.

    ``kills``, ``pairs``: how many of them.
    """
    counts = Counts()
    folder.joinpath(TEMPORARY).mkdir(exist_ok=True)
    files_before = in_memory_and_temporary(folder)
    undisturbed = runs_on(folder, engine, "whole")
    until_finished(undisturbed, counts, 0.0, [], over)
    gold = [comparable(run) for run in undisturbed]
    actions: list[Action] = []
    for _ in range(kills):
        actions.append(Run.kill_one)
    for _ in range(pairs):
        actions.append(Run.signal_twice)
    random.shuffle(actions)
    duration = 0.0
    while actions:
        counts.runs += 1
        runs = runs_on(folder, engine, str(counts.runs))
        # With the tokens in the cache, all of the time is for models.
        shutil.copytree(undisturbed[0].cache / "tokens", runs[0].cache / "tokens")
        if duration:
            until_finished(runs, counts, duration, actions, over)
        else:
            # The first runs are not disturbed; later ones are within the time that these take.
            began = time.monotonic()
            until_finished(runs, counts, duration, [], over)
            duration = time.monotonic() - began
        for run, gold_of_run in zip(runs, gold, strict=True):
            compare(comparable(run), gold_of_run, counts, batches_differ=engine in BATCHES_DIFFER)
        counts.files_left += left_over(runs[0], undisturbed[0])
        counts.files_left += sorted(in_memory_and_temporary(folder) - files_before)
        shutil.rmtree(runs[0].cache)
        print(f"{engine}: {in_words(counts)}", flush=True)
    return {
        "kills": dict(counts.kills),
        "pairs_of_signals": dict(counts.pairs),
        "endings_after_pairs": dict(counts.endings),
        "runs": counts.runs,
        "seconds_undisturbed": duration,
        "results_that_differ": counts.differing,
        "where": counts.fields,
        "largest_relative_difference": counts.largest,
        "hangs": counts.hangs,
        "tables_lost": counts.tables_lost,
        "failed_undisturbed": counts.failed_alone,
        "processes_left": counts.processes_left,
        "files_left": counts.files_left,
    }


def compare(results: Any, gold: Any, counts: Counts, *, batches_differ: bool) -> None:
    """Compare the results of a run with the undisturbed run's."""
    if not batches_differ:
        if results != gold:
            counts.differing += 1
        counts.fields += itertools.islice(differing_fields(results, gold), 40)
    if "models" in gold:
        counts.largest = max(counts.largest, difference(results, gold))


def in_words(counts: Counts) -> str:
    """Return the counts in one line."""
    fields = ""
    if counts.fields:
        fields = str(counts.fields[:12])
    parts = (
        f"{counts.kills.total()} kills",
        f"{counts.pairs.total()} pairs of signals",
        f"{counts.runs} finished",
        f"{counts.differing} differ, by at most {counts.largest:.2g} {fields}",
        f"{counts.hangs} hang",
        f"{len(counts.tables_lost)} tables lost",
        f"{len(counts.failed_alone)} fail undisturbed",
        f"left: {counts.processes_left} processes, {counts.files_left} files",
    )
    return ", ".join(parts)


def write_text(folder: Path, name: str, seed: int) -> None:
    """Write a text of random characters and its spec."""
    letters = np.random.default_rng(seed).choice(list("abcdefgh \n"), WINDOWS * LENGTH)
    (folder / f"{name}.txt").write_text("".join(letters), encoding="utf-8")
    spec = {
        "tokenizer_dir": str(folder / "model"),
        "dataset": "text",
        "path": str(folder / f"{name}.txt"),
        "eval_len": LENGTH,
        "eval_stride": LENGTH,
    }
    (folder / f"{name}.json").write_text(json.dumps(spec), encoding="utf-8")


def main() -> None:
    """Run the campaigns, and write their counts."""
    p = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    p.add_argument("out", type=Path)
    p.add_argument(
        "--kills",
        type=int,
        default=200,
        help="in all; a third of them in vLLM if others are killed, too",
    )
    p.add_argument("--pairs", type=int, default=0, help="of signals, in each campaign")
    p.add_argument("--engines", nargs="+", default=["Transformers", "vLLM"], choices=list(RUNS))
    p.add_argument("--seed", type=int, default=0)
    p.add_argument(
        "--seconds", type=float, default=math.inf, help="after which nothing more is killed"
    )
    args = p.parse_args()
    random.seed(args.seed)
    over = time.monotonic() + args.seconds
    # Runs inherit ignored signals, and would rightly ignore them.
    for number in ENDING:
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
            write_text(folder, name, seed)
        campaigns = {}
        for engine in args.engines:
            campaigns[engine] = campaign(folder, engine, shares[engine], args.pairs, over)
    from compare_q.backends.common import machine

    origin = {"commit": machine.commit(), "versions": machine.versions(), "cpu": machine.cpu()}
    args.out.write_text(json.dumps({**origin, **campaigns}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
