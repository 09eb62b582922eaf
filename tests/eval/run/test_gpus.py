"""The GPUs of a run, and that no GPU is assigned to two models at the same time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from compare_q.backends.common.errors import InputError, StoppedError
from compare_q.backends.common.machine import Gpu
from compare_q.eval.common import page_cache
from compare_q.eval.run import run_scoring
from compare_q.eval.run.gpu_pool import GpuPool, select_gpus
from compare_q.eval.run.run_scoring import StartOrder
from tests.support.threaded import H200, threaded
from tests.support.toy import Run, Specs, in_transformers, with_changed_weight

H100 = Gpu("4", "NVIDIA H100", "580.1", 81559.0)


def go_on() -> None:
    """Return normally: the run was not stopped."""


def test_no_gpu_is_given_twice() -> None:
    pool = GpuPool(H200)
    lock = threading.Lock()
    held = list[str]()
    most = list[list[str]]()

    def work(count: int) -> None:
        for _ in range(50):
            with pool.take(count, go_on) as gpus:
                names = gpus.names
                assert names is not None
                assert len(names) == count
                with lock:
                    held.extend(names)
                    most.append(sorted(held))
                # Other threads run while this one holds its GPUs.
                time.sleep(0)
                with lock:
                    for name in names:
                        held.remove(name)

    # If smaller requests could overtake it, the one for all four GPUs would be served last.
    threads = [threading.Thread(target=work, args=(count,)) for count in (1, 1, 2, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 6 * 50
    assert all(len(set(names)) == len(names) for names in most)
    assert (pool.free, pool.queue) == ({0, 1, 2, 3}, [])


def test_who_waits_for_two_gpus_is_not_overtaken_by_others_that_want_one() -> None:
    pool = GpuPool(H200[:2])
    order = list[str]()
    waiting = list[threading.Thread]()

    def work(name: str, count: int) -> None:
        with pool.take(count, go_on):
            order.append(name)

    with pool.take(1, go_on):
        for name, count in (("two GPUs", 2), ("one", 1), ("last", 1)):
            waiting.append(threading.Thread(target=work, args=(name, count)))
            waiting[-1].start()
            # Threads may start in any order: each one must be in the queue before the next.
            while len(pool.queue) < len(waiting):
                time.sleep(0.001)
        assert order == []
    for thread in waiting:
        thread.join()
    assert order[0] == "two GPUs"
    assert sorted(order[1:]) == ["last", "one"]


def test_a_stopped_run_waits_for_no_gpu() -> None:
    pool = GpuPool()

    def stopped() -> None:
        raise StoppedError

    with pool.take(1, go_on) as gpus, pytest.raises(StoppedError), pool.take(1, stopped):
        pass
    assert (gpus.names, pool.free, pool.queue) == (None, {0}, [])
    # On a cluster, GPUs are only counted.
    pool = GpuPool(slots=3)
    with pool.take(7, go_on) as gpus:
        assert (gpus.names, pool.free) == (None, set())


@pytest.mark.parametrize(
    ("found", "wanted", "gold", "others"),
    [
        ([], None, [], ""),
        (H200, None, H200, ""),
        (H200, ["2", "0"], [H200[2], H200[0]], ""),
        (H200, [], [], ""),
        # One type, because scores depend on it.
        ([*H200, H100, H100], None, H200, "4, 4"),
        ([*H200, H100], ["4", "0"], [H100], "0"),
    ],
)
def test_gpus_of_a_run(
    found: list[Gpu], wanted: list[str] | None, gold: list[Gpu], others: str
) -> None:
    messages: list[str] = []
    assert select_gpus(found, wanted, messages.append) == gold
    with pytest.raises(InputError, match=r"^--gpus: there is no GPU 7; there are: "):
        select_gpus(found, ["7"], print)
    assert messages == (
        [f"not used, since they are no {gold[0].name}: GPUs {others}"] if others else []
    )


def test_a_model_prepares_while_others_have_its_gpus() -> None:
    pool = GpuPool(H200[:1])
    steps = list[str]()

    def wait() -> None:
        """Give the GPU back after the waiting model has prepared."""
        with pool.take(1, go_on, lambda: steps.append("the first one prepares")):
            steps.append("taken")
            while "prepared" not in steps:
                time.sleep(0.001)
        steps.append("given back")

    first = threading.Thread(target=wait)
    first.start()
    while not steps:
        time.sleep(0.001)
    with pool.take(1, go_on, lambda: steps.append("prepared")) as gpus:
        assert gpus.names == ("0",)
    first.join()
    # The GPU was free when the first one asked for it.
    assert steps == ["taken", "prepared", "given back"]


def test_a_model_that_cannot_prepare_leaves_the_line() -> None:
    pool = GpuPool(H200[:1])

    def fail() -> None:
        raise InputError("no such file")

    with pool.take(1, go_on):
        with pytest.raises(InputError, match="no such file"), pool.take(1, go_on, fail):
            pass
        assert (pool.free, pool.queue) == (set(), [])
    assert pool.free == {0}


def test_nobody_prepares_for_gpus_that_ray_assigns() -> None:
    """The node, and with it the worker, is not known before."""
    pool = GpuPool(slots=1)
    prepared = list[bool]()
    is_stopped = threading.Event()

    def check() -> None:
        if is_stopped.is_set():
            raise StoppedError()

    def wait() -> None:
        with suppress(StoppedError), pool.take(1, check, lambda: prepared.append(True)):
            pass

    with pool.take(1, go_on):
        waiting = threading.Thread(target=wait)
        waiting.start()
        while not pool.queue:
            time.sleep(0.001)
        is_stopped.set()
        waiting.join()
    assert prepared == []


@pytest.mark.engine
def test_weights_are_read_while_an_earlier_model_runs(
    compare_q: Run,
    write_specs: Specs,
    toy_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each model's weights are read once: the reference's, and the next model's before its load."""
    read: list[Path] = []

    def note(files: Sequence[Path], check: Callable[[], None]) -> None:
        check()
        read.extend(files)

    monkeypatch.setattr(page_cache, "read_ahead", note)
    told = threaded(monkeypatch, gpus=1)
    other = with_changed_weight(toy_model, tmp_path / "other", "model.layers.1.mlp.down_proj")
    models = {"first": toy_model, "second": other}
    specs = []
    for label, model in models.items():
        specs.append(in_transformers(model, label=label, reference=label == "first"))
    data, models_file = write_specs(specs)
    # The reference is scored after the weights of both were read.
    told.may_score = lambda: len(read) == 2
    ran = compare_q("-d", data, "-m", models_file, "-r", 2)
    assert ran.status == 0, ran.err
    assert sorted(read) == sorted(model / "model.safetensors" for model in models.values())
    # Scores in the cache need no weights.
    read.clear()
    assert compare_q("-d", data, "-m", models_file, "-r", 2).status == 0
    assert read == []


def test_models_request_gpus_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the model before takes to start, unless the run is stopped."""
    monkeypatch.setattr(run_scoring, "STOP_POLL_S", 0.001)
    first: Any = SimpleNamespace(label="first")
    second: Any = SimpleNamespace(label="second")
    order = StartOrder([first, second])
    n_checks = 0

    def check() -> None:
        nonlocal n_checks
        n_checks += 1
        if n_checks == 3:
            order.note_start(first)

    order.wait(first, check)
    assert n_checks == 0
    order.wait(second, check)
    assert n_checks == 3

    def stopped() -> None:
        raise StoppedError

    with pytest.raises(StoppedError):
        StartOrder([first, second]).wait(second, stopped)
