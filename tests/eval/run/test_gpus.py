"""GPUs of a run: which these are, and that no GPU is given to two models at the same time."""

from __future__ import annotations

import threading
import time

import pytest

from compare_q.backends.common.errors import InputError, StoppedError
from compare_q.backends.common.machine import Gpu
from compare_q.eval.run.gpus import GpuPool, select_gpus

H200 = [Gpu(str(index), "NVIDIA H200", "580.1", 143771.0) for index in range(4)]
H100 = Gpu("4", "NVIDIA H100", "580.1", 81559.0)


def go_on() -> None:
    """The run was not stopped."""


def test_no_gpu_is_given_twice() -> None:
    pool, lock = GpuPool(H200), threading.Lock()
    held: list[str] = []
    most: list[list[str]] = []

    def work(count: int) -> None:
        for _ in range(50):
            with pool.take(count, go_on) as lease:
                assert lease.names is not None
                assert len(lease.names) == count
                with lock:
                    held.extend(lease.names)
                    most.append(sorted(held))
                time.sleep(0)
                with lock:
                    for name in lease.names:
                        held.remove(name)

    threads = [threading.Thread(target=work, args=(count,)) for count in (1, 1, 2, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 6 * 50
    assert all(len(set(names)) == len(names) for names in most)
    assert (pool.free, pool.queue) == ({0, 1, 2, 3}, [])


def test_the_order_of_the_run_decides() -> None:
    """A model on two GPUs is not overtaken by later models on one, also where these ask first."""
    pool, order, asked = GpuPool(H200[:2]), list[str](), list[threading.Thread]()

    def work(name: str, count: int, place: int) -> None:
        with pool.take(count, go_on, place):
            order.append(name)

    with pool.take(1, go_on), pool.take(1, go_on):
        for name, count, place in (("last", 1, 3), ("two GPUs", 2, 1), ("one", 1, 2)):
            asked.append(threading.Thread(target=work, args=(name, count, place)))
            asked[-1].start()
            while len(pool.queue) < len(asked):
                time.sleep(0.001)
        assert order == []
    for thread in asked:
        thread.join()
    assert order[0] == "two GPUs"
    assert sorted(order[1:]) == ["last", "one"]


def test_a_stopped_run_waits_for_no_gpu() -> None:
    pool = GpuPool()

    def stopped() -> None:
        raise StoppedError

    with pool.take(1, go_on) as lease, pytest.raises(StoppedError), pool.take(1, stopped):
        pass
    assert (lease.names, pool.free, pool.queue) == (None, {0}, [])


def test_shares_of_replicas() -> None:
    with GpuPool(H200).take(4, go_on) as lease:
        assert [lease.share(replica, 2) for replica in range(2)] == [("0", "1"), ("2", "3")]
    with GpuPool(slots=3).take(7, go_on) as lease:  # of a cluster, whose GPUs are only counted
        assert (lease.places, lease.share(0, 1)) == ((0, 1, 2), None)


@pytest.mark.parametrize(
    ("found", "wanted", "gold"),
    [
        ([], None, []),
        (H200, None, H200),
        (H200, ["2", "0"], [H200[2], H200[0]]),
        (H200, ["1", "1"], [H200[1]]),
        ([*H200, H100], ["4"], [H100]),
        (H200, [], []),
    ],
)
def test_gpus_of_a_run(found: list[Gpu], wanted: list[str] | None, gold: list[Gpu]) -> None:
    assert select_gpus(found, wanted) == (tuple(gold), "")


def test_of_several_types_the_first_is_used() -> None:
    """Otherwise the type that scores depend on would be chance."""
    used, said = select_gpus([*H200, H100, H100], None)
    assert used == tuple(H200)
    assert "GPUs 4, 4" in said
    assert select_gpus([*H200, H100], ["4", "0"])[0] == (H100,)


@pytest.mark.parametrize(("found", "there"), [(H200, "0, 1, 2, 3"), ([], "none")])
def test_a_name_that_is_no_gpu(found: list[Gpu], there: str) -> None:
    with pytest.raises(InputError, match=f"^--gpus: there is no GPU 7; there are: {there}$"):
        select_gpus(found, ["7"])
