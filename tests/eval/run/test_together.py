"""Models that are loaded together on one GPU, and are scored one after the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from compare_q.backends.base import PlannedModel
from compare_q.backends.common import machine
from compare_q.backends.common.errors import MEMORY_TOO_SMALL
from compare_q.backends.common.machine import Gpu
from compare_q.backends.hf.transformers_engine import TransformersEngine
from compare_q.eval.run import gpu_pool
from compare_q.eval.run.gpu_pool import GpuPool
from tests.support.processes import wait_until
from tests.support.threaded import Told, threaded
from tests.support.toy import Ran, Run, Specs, in_transformers, with_changed_weight

MIB = 2**20
SMALL = Gpu("0", "NVIDIA Small", "580.1", 1000.0)
WAIT_S = 60


def go_on() -> None:
    """Return normally: the run was not stopped."""


@pytest.fixture(autouse=True)
def large_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that can load four models at the same time, whose GPU nothing else uses."""
    monkeypatch.setattr(gpu_pool, "most_loads_at_once", lambda: 4)
    monkeypatch.setattr(machine, "gpu_users", lambda devices, ours=0: "")


@dataclass
class Table:
    """Models that take a pool's GPU, each in a thread, and what they did, in order."""

    pool: GpuPool
    events: list[str] = field(default_factory=list)
    threads: list[threading.Thread] = field(default_factory=list)
    # Name of a model -> event that ends its load; other models load at once.
    loaded: dict[str, threading.Event] = field(default_factory=dict)
    # The same for preparing, and for scoring.
    prepared: dict[str, threading.Event] = field(default_factory=dict)
    scored: dict[str, threading.Event] = field(default_factory=dict)
    # The same for the end of its processes, which is an event only then.
    ended: dict[str, threading.Event] = field(default_factory=dict)
    # How many models were on the GPU, and how many were ending, by the model that had its turn.
    counts: dict[str, tuple[int, int]] = field(default_factory=dict)

    def start(self, name: str, mib: int | None, *, fails: bool = False) -> None:
        """Start a model that needs ``mib`` of memory; None: not known."""
        n_bytes = None
        if mib is not None:
            n_bytes = mib * MIB

        def prepare() -> None:
            self.events.append(f"{name} prepares")
            if name in self.prepared:
                assert self.prepared[name].wait(WAIT_S)

        def work() -> None:
            with self.pool.take(1, go_on, prepare, n_bytes) as gpus:
                self.events.append(f"{name} loads")
                if name in self.loaded:
                    assert self.loaded[name].wait(WAIT_S)
                if fails:
                    self.events.append(f"{name} fails")
                    return
                self.events.append(f"{name} loaded")
                self.counts[name] = gpus.wait_for_turn(go_on)
                self.events.append(f"{name} scores")
                # Other models could begin meanwhile.
                time.sleep(0.01)
                if name in self.scored:
                    assert self.scored[name].wait(WAIT_S)
                self.events.append(f"{name} scored")
                gpus.end_turn()
                if name in self.ended:
                    assert self.ended[name].wait(WAIT_S)
                    self.events.append(f"{name} ended")

        self.threads.append(threading.Thread(target=work))
        self.threads[-1].start()
        # Threads may start in any order.
        wait_until(lambda: self.has_asked(name), WAIT_S)

    def has_asked(self, name: str) -> bool:
        """Return True when a model waits for the GPU, or has it."""
        n_started = len(self.threads)
        n_taken = sum(event.endswith(" loads") for event in self.events)
        return f"{name} loads" in self.events or n_taken + len(self.pool.queue) >= n_started

    def end(self) -> list[str]:
        """Wait for all models; return what they did."""
        for thread in self.threads:
            thread.join(WAIT_S)
            assert not thread.is_alive()
        assert (self.pool.free, self.pool.queue, self.pool.group) == ({0}, [], None)
        return self.events


def test_models_load_at_the_same_time_and_score_in_their_order() -> None:
    """The second one is the last to have loaded."""
    table = Table(GpuPool([SMALL]), loaded={"a": threading.Event(), "b": threading.Event()})
    for name in ("a", "b", "c"):
        table.start(name, 200)
    wait_until(lambda: {"b loads", "c loaded"} <= set(table.events), WAIT_S)
    table.loaded["a"].set()
    time.sleep(0.1)
    # While one of them loads, none scores.
    assert not any(event.endswith("scores") for event in table.events)
    table.loaded["b"].set()
    events = table.end()
    first = events.index("a scores")
    assert sorted(events[:first]) == sorted(
        [f"{name} {step}" for name in "abc" for step in ("loads", "loaded")]
    )
    assert events[first:] == [f"{name} {step}" for name in "abc" for step in ("scores", "scored")]
    # The first one scored beside two others.
    assert {name: turn[0] for name, turn in table.counts.items()} == {"a": 3, "b": 2, "c": 1}


@pytest.mark.parametrize("mib", [None, 500])
def test_a_model_without_room_waits_for_all_others(mib: int | None) -> None:
    """800 MiB of the GPU may be used, and the third model may need more than is left."""
    table = Table(GpuPool([SMALL]), loaded={"a": threading.Event()})
    table.start("a", 200)
    table.start("b", 200)
    table.start("c", mib)
    # It does not overtake the third one.
    table.start("d", None)
    wait_until(lambda: "c prepares" in table.events, WAIT_S)
    table.loaded["a"].set()
    events = table.end()
    for name in "ab":
        assert events.index(f"{name} scored") < events.index("c loads")
    assert events.index("c prepares") < events.index("a scores")
    assert events.index("c loads") < events.index("d loads")


def test_no_model_joins_others_that_score() -> None:
    """Its load would change their speed."""
    table = Table(GpuPool([SMALL]), scored={"a": threading.Event()})
    table.start("a", 200)
    wait_until(lambda: "a scores" in table.events, WAIT_S)
    table.start("b", 200)
    wait_until(lambda: "b prepares" in table.events, WAIT_S)
    table.scored["a"].set()
    events = table.end()
    assert events.index("a scored") < events.index("b loads")


def test_the_next_model_scores_while_the_one_before_it_ends() -> None:
    """But the memory of all of them must be free before another model loads."""
    table = Table(GpuPool([SMALL]), loaded={"a": threading.Event()}, ended={"a": threading.Event()})
    table.start("a", 200)
    table.start("b", 200)
    wait_until(lambda: "b loaded" in table.events, WAIT_S)
    table.start("c", 700)
    table.loaded["a"].set()
    wait_until(lambda: "b scored" in table.events, WAIT_S)
    # Longer than the third one would need.
    time.sleep(0.1)
    assert "c loads" not in table.events
    table.ended["a"].set()
    events = table.end()
    assert events.index("b scored") < events.index("a ended") < events.index("c loads")
    assert table.counts == {"a": (2, 0), "b": (1, 1), "c": (1, 0)}


def test_the_others_go_on_if_one_fails_to_load() -> None:
    table = Table(GpuPool([SMALL]), loaded={"a": threading.Event()})
    table.start("a", 200, fails=True)
    table.start("b", 200)
    wait_until(lambda: "b loaded" in table.events, WAIT_S)
    table.loaded["a"].set()
    events = table.end()
    assert events.index("a fails") < events.index("b scores")
    assert table.counts == {"b": (1, 0)}


def test_no_model_waits_for_one_behind_it_that_prepares() -> None:
    table = Table(
        GpuPool([SMALL]), prepared={"d": threading.Event()}, scored={"a": threading.Event()}
    )
    table.start("a", 200)
    wait_until(lambda: "a scores" in table.events, WAIT_S)
    table.start("b", None)
    wait_until(lambda: "b prepares" in table.events, WAIT_S)
    # Of models whose memory is not known, only the next one prepares.
    table.start("c", None)
    table.start("d", 200)
    wait_until(lambda: "d prepares" in table.events, WAIT_S)
    table.scored["a"].set()
    wait_until(lambda: "c scored" in table.events, WAIT_S)
    assert "c prepares" not in table.events
    table.prepared["d"].set()
    assert table.end()[-1] == "d scored"


def test_on_several_gpus_only_the_next_model_prepares() -> None:
    """There, the others may have to wait for long."""
    pool = GpuPool([SMALL, Gpu("1", "NVIDIA Small", "580.1", 1000.0)])
    prepared: list[int] = []
    threads = []

    def work(number: int) -> None:
        with pool.take(1, go_on, lambda: prepared.append(number), MIB):
            pass

    with pool.take(2, go_on):
        for number in range(3):
            threads.append(threading.Thread(target=work, args=(number,)))
            threads[-1].start()
            wait_until(lambda: len(pool.queue) == len(threads), WAIT_S)
        wait_until(lambda: prepared == [0], WAIT_S)
        # Longer than all of them would need.
        time.sleep(0.1)
        assert prepared == [0]
    for thread in threads:
        thread.join(WAIT_S)


@pytest.mark.parametrize("cause", ["another program", "two GPUs", "no memory"])
def test_a_model_that_shares_its_gpu_with_nothing(
    cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [SMALL]
    if cause == "another program":
        monkeypatch.setattr(machine, "gpu_users", lambda devices, ours=0: "python (process 7)")
    elif cause == "two GPUs":
        gpus = [SMALL, Gpu("1", "NVIDIA Small", "580.1", 1000.0)]
    else:
        # MIG: nvidia-smi reports no size.
        gpus = [Gpu("0", "unknown GPU", "", 0.0)]
    pool = GpuPool(gpus)
    n_together = 0
    most = 0
    lock = threading.Lock()

    @contextmanager
    def counted(device: str) -> Iterator[None]:
        nonlocal n_together, most
        with lock:
            n_together += 1
            most = max(most, n_together)
        yield
        with lock:
            n_together -= 1

    def work() -> None:
        with pool.take(1, go_on, n_bytes=MIB) as taken:
            assert taken.names is not None
            if taken.names[0] == "0":
                with counted("0"):
                    time.sleep(0.02)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert most == 1


@dataclass
class Comparison:
    """A run of three models in Transformers, which load together except the reference."""

    compare_q: Run
    told: Told
    data: Path
    models: Path

    def run(self) -> Ran:
        """Run it."""
        return self.compare_q("-d", self.data, "-m", self.models, "-r", 3)


@pytest.fixture
def comparison(
    compare_q: Run,
    write_specs: Specs,
    toy_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Comparison:
    """A run on one GPU, whose engine states how much memory a model needs."""

    def gpu_bytes(model: PlannedModel) -> int:
        return 10 * 1024 * MIB

    monkeypatch.setattr(TransformersEngine, "gpu_bytes", gpu_bytes)
    specs = [in_transformers(toy_model, label="reference", reference=True)]
    for label, name in (("one", "gate_proj"), ("two", "down_proj")):
        other = with_changed_weight(toy_model, tmp_path / label, f"model.layers.1.mlp.{name}")
        specs.append(in_transformers(other, label=label))
    told = threaded(monkeypatch, gpus=1)
    # Each load ends only after the other one has begun.
    told.first = {("one", "load done"): ("two", "load"), ("two", "load done"): ("one", "load")}
    return Comparison(compare_q, told, *write_specs(specs))


@pytest.mark.engine
def test_scores_of_models_that_load_together_are_the_same(
    comparison: Comparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = comparison.told
    # The next model scores while the worker of this one ends.
    told.first[("one", "close")] = ("two", "score")
    ran = comparison.run()
    assert ran.status == 0, ran.err
    for label in ("one", "two"):
        assert told.before((label, "load done"), ("one", "score"))
    assert told.before(("one", "score done"), ("two", "score"))
    loads = {job.model.label: job for job in told.jobs if job.type == "load"}
    assert loads["one"].users == ""
    assert told.halving() == [True, False, False]
    together = [line for line in ran.out.splitlines() if " one " in line or " two " in line]
    # Alone, in another run.
    monkeypatch.setattr(TransformersEngine, "gpu_bytes", lambda model: None)
    # In one process, preparing a model would change torch's default dtype for the other one.
    told.first = {("two", "prepare"): ("one", "score done")}
    told.steps.clear()
    alone = comparison.compare_q("-d", comparison.data, "-m", comparison.models, "-r", 3, "-cc")
    assert alone.status == 0, alone.err
    assert told.before(("one", "score done"), ("two", "load"))
    lines_alone = [line for line in alone.out.splitlines() if " one " in line or " two " in line]
    assert [line.split()[:7] for line in lines_alone] == [line.split()[:7] for line in together]


@pytest.mark.engine
def test_a_model_without_enough_memory_is_loaded_again_alone(comparison: Comparison) -> None:
    told = comparison.told
    # In one process, preparing a model would change torch's default dtype for the other one.
    told.first[("one", "prepare")] = ("two", "score done")
    # The first one waits for the GPU before that.
    told.first[("two", "score done")] = ("one", "prepare")
    told.fails[("one", "score")] = "memory"
    ran = comparison.run()
    assert ran.status == 0, ran.err
    assert told.of("one") == ["load", "score", "prepare", "load", "score"]
    assert told.of("two") == ["load", "score"]
    # The reference, both models, and the first one once more.
    assert told.halving() == [True, False, False, True]
    # Alone: the other one has ended, or has not begun.
    second_load = len(told.steps) - 1 - told.steps[::-1].index(("one", "load"))
    assert ("two", "score done") in told.steps[:second_load]
    # Without other models, the error is the row's.
    told.fails[("reference", "load")] = "memory"
    ran = comparison.compare_q("-d", comparison.data, "-m", comparison.models, "-r", 3, "-cc")
    assert MEMORY_TOO_SMALL in ran.out
    assert told.of("reference").count("load") == 2


@pytest.mark.engine
def test_a_model_that_does_not_load_beside_others_is_loaded_again_alone(
    comparison: Comparison,
) -> None:
    """Its load may have failed for want of memory without saying so."""
    told = comparison.told
    told.first[("two", "prepare")] = ("one", "score done")
    told.first[("one", "score done")] = ("two", "prepare")
    told.fails[("two", "load")] = "dies"
    ran = comparison.run()
    assert ran.status == 0, ran.err
    assert told.of("two") == ["load", "prepare", "load", "score"]
    # Errors of scoring are the row's.
    told.first = {("two", "prepare"): ("one", "score done")}
    told.fails[("one", "score")] = "dies"
    told.steps.clear()
    ran = comparison.compare_q("-d", comparison.data, "-m", comparison.models, "-r", 3, "-cc")
    assert ran.status == 1
    assert told.of("one") == ["load", "score"]
