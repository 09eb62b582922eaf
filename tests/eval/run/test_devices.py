"""GPUs of a run: which these are, and that each is in one hand at a time, first come, first served."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError
from compare_q.backends.common.machine import Gpu
from compare_q.eval.run.devices import Devices, Hold, chosen
from tests.support.toy import refusal

PATIENCE_S = 30
STAGES: tuple[Any, ...] = ("loading", "scoring", "ending", "closing")
GIB = 1 << 30
H200 = [Gpu(str(index), "NVIDIA H200", "580.1", 143771.0) for index in range(4)]
H100 = Gpu("4", "NVIDIA H100", "580.1", 81559.0)


def until(holds: Callable[[], bool]) -> None:
    """Wait until something holds that another thread brings about."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_who_came_first_is_served_first() -> None:
    """A model on two GPUs waits for both; one that came later does not take the one that is free meanwhile."""
    devices, served = Devices(H200[:2]), []
    release = {name: threading.Event() for name in ("first", "both", "one")}

    def work(name: str, wanted: int) -> None:
        with devices.taken(wanted) as held:
            served.append((name, held.names))
            assert release[name].wait(PATIENCE_S)

    threads = []
    for name, wanted, waiting in (("first", 1, 0), ("both", 2, 1), ("one", 1, 2)):
        threads.append(threading.Thread(target=work, args=(name, wanted)))
        threads[-1].start()
        until(lambda waiting=waiting: len(served) == 1 and len(devices.waiting) == waiting)
    assert served == [("first", ("0",))]
    release["first"].set()
    until(lambda: len(served) == 2)
    assert served[1] == ("both", ("0", "1"))
    assert len(devices.waiting) == 1
    for event in release.values():
        event.set()
    for thread in threads:
        thread.join()
    assert served[2] == ("one", ("0",))
    assert (devices.free, devices.waiting) == ([0, 1], [])


def test_no_gpu_is_in_two_hands() -> None:
    devices, lock = Devices(H200), threading.Lock()
    held: list[str] = []
    most: list[list[str]] = []

    def work(wanted: int) -> None:
        for _ in range(50):
            with devices.taken(wanted) as hold:
                names = hold.names
                assert names is not None
                assert len(names) == wanted
                with lock:
                    held.extend(names)
                    most.append(sorted(held))
                time.sleep(0)
                with lock:
                    for name in names:
                        held.remove(name)

    threads = [threading.Thread(target=work, args=(wanted,)) for wanted in (1, 1, 2, 2, 3, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == 6 * 50
    assert all(len(set(names)) == len(names) for names in most)
    assert devices.free == [0, 1, 2, 3]


def test_gpus_come_back_after_an_error() -> None:
    devices, held = Devices(H200), []

    def fail() -> None:
        with devices.taken(3) as hold:
            held.append(hold.names)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert held == [("0", "1", "2")]
    assert devices.free == [0, 1, 2, 3]


def test_without_gpus_models_run_one_after_the_other() -> None:
    devices = Devices()
    assert (devices.slots, devices.needed(0), devices.needed(8), devices.planned(2)) == (1, 0, 0, ())
    with devices.taken(0) as held:
        assert held.names is None
        assert devices.free == []


@pytest.mark.parametrize(("wanted", "gold"), [(0, 4), (1, 1), (4, 4)])
def test_what_a_model_gets(wanted: int, gold: int) -> None:
    devices = Devices(H200)
    assert (devices.slots, devices.needed(wanted), devices.planned(wanted)) == (4, gold, tuple(H200[:gold]))


def test_more_than_there_are() -> None:
    assert refusal(Devices(H200).planned, 5) == "gpus: the model needs 5 GPUs, the run has 4"


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
    assert chosen(found, wanted) == (tuple(gold), "")


def test_of_several_kinds_the_first_is_used() -> None:
    """Else the kind that scores belong to would be chance."""
    text = "not used, since they are no NVIDIA H200: GPUs 4, 4"
    assert chosen([*H200, H100, H100], None) == (tuple(H200), text)
    assert chosen([H100, *H200], None)[0] == (H100,)
    assert chosen([*H200, H100], ["4", "0"])[0] == (H100,)


@pytest.mark.parametrize(("found", "there"), [(H200, "0, 1, 2, 3"), ([], "none")])
def test_a_name_that_is_no_gpu(found: list[Gpu], there: str) -> None:
    with pytest.raises(InputError, match=f"^--gpus: there is no GPU 7; there are: {there}$"):
        chosen(found, ["7"])


@pytest.mark.parametrize(
    ("stage", "needs", "gold"),
    [
        ("ending", 20 * GIB, True),
        ("closing", 20 * GIB, True),
        ("loading", 20 * GIB, False),  # one at a time
        ("scoring", 20 * GIB, False),  # another GPU may become free earlier
        ("ending", 21 * GIB, False),
        ("closing", 21 * GIB, False),  # as soon as it fits, and not before
        ("ending", None, False),
        ("closing", None, False),
    ],
)
def test_who_may_load_beside_the_model_before(
    stage: Any, needs: int | None, gold: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU that both get, with 20 GiB free beside the first one."""
    monkeypatch.setattr(machine, "free_gpu_memory", lambda names: {("0",): 20 * GIB}[tuple(names)])
    devices = Devices(H200[:1])
    with devices.taken(1) as first:
        first.stage = stage
        assert offered(devices, 1, needs) == ((0,) if gold else ())
        assert devices.free == []
    assert offered(devices, 1, needs) == (0,)


def offered(devices: Devices, wanted: int, needs: int | None) -> tuple[int, ...]:
    """The GPUs that a model would get now."""
    hold = Hold(max(wanted, 1), 99, needs)
    devices.waiting.append(hold)
    try:
        return devices._offered(hold)
    finally:
        devices.waiting.remove(hold)


def test_on_several_gpus_a_model_loads_beside_one_that_has_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda names: GIB)
    devices = Devices(H200[:2])
    with devices.taken(2) as first:
        first.stage = "ending"
        assert (offered(devices, 2, 1), offered(devices, 1, 1)) == ((0, 1), ())
        with devices.taken(2, needs=1) as second:  # and no third one beside these two
            assert second.names == first.names == ("0", "1")
            second.stage = "ending"
            assert not offered(devices, 2, 1)
    with devices.taken(1) as first:
        first.stage = "ending"
        assert (offered(devices, 2, 1), offered(devices, 1, 1)) == ((), (1,))


@pytest.mark.parametrize(
    ("stages", "room", "gold"),
    [
        (("ending", "scoring"), (True, True), (0,)),
        (("scoring", "ending"), (True, True), (1,)),
        (("ending", "ending"), (False, True), (1,)),
        (("scoring", "ending"), (True, False), ()),
        (("scoring", "scoring"), (True, True), ()),  # either may become free first
    ],
)
def test_on_several_gpus_a_model_loads_where_another_ends_soon(
    stages: tuple[Any, Any], room: tuple[bool, bool], gold: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda names: GIB if all(room[int(name)] for name in names) else 0)
    devices = Devices(H200[:2])
    with devices.taken(1) as first, devices.taken(1) as second:
        first.stage, second.stage = stages
        assert offered(devices, 1, GIB) == gold
        assert offered(devices, 1, 2 * GIB) == offered(devices, 2, GIB) == ()


def test_without_gpus_no_model_loads_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both would want the same cores."""
    monkeypatch.setattr(machine, "free_gpu_memory", lambda names: 20 * GIB)
    devices = Devices()
    with devices.taken(0) as first:
        for stage in STAGES:
            first.stage = stage
            assert not offered(devices, 0, GIB)
    assert offered(devices, 0, GIB) == (0,)


def test_who_loads_beside_scores_after_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_gpu_memory", lambda names: 2 * GIB)
    devices, said = Devices(H200[:1]), []

    def work() -> None:
        with devices.taken(1, place=1, needs=GIB) as hold:
            said.append("loads")
            devices.await_turn(hold)
            said.append("scores")
            devices.await_room(hold)
            said.append("alone")

    with devices.taken(1, place=0) as first:
        thread = threading.Thread(target=work)
        thread.start()
        time.sleep(0.01)
        assert said == []
        devices.await_turn(first)
        time.sleep(0.01)
        assert said == []
        devices.reach(first, "ending")
        until(lambda: said == ["loads"])
        time.sleep(0.01)
        assert said == ["loads"]
        devices.reach(first, "closing")
        until(lambda: said == ["loads", "scores"])
    thread.join(PATIENCE_S)
    assert said == ["loads", "scores", "alone"]
