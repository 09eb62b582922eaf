"""GPUs of a run: which these are, and that each is in one hand at a time, first come, first served."""

from __future__ import annotations

import threading
import time

import pytest

from compare_q.backends.common.errors import InputError
from compare_q.backends.common.machine import Gpu
from compare_q.eval.run.devices import Devices, Hold, chosen
from tests.support.toy import refusal

H200 = [Gpu(str(index), "NVIDIA H200", "580.1", 143771.0) for index in range(4)]
H100 = Gpu("4", "NVIDIA H100", "580.1", 81559.0)


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
    assert devices.holds == devices.waiting == []


@pytest.mark.parametrize(("gpus", "wanted", "gold"), [(H200, 0, 4), (H200, 1, 1), (H200, 4, 4), ([], 0, 0), ([], 8, 0)])
def test_what_a_model_gets(gpus: list[Gpu], wanted: int, gold: int) -> None:
    devices = Devices(gpus)
    assert devices.planned(wanted) == tuple(gpus[:gold])
    if gpus:
        assert refusal(devices.planned, 5) == "gpus: the model needs 5 GPUs, the run has 4"


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
    assert chosen([*H200, H100], ["4", "0"])[0] == (H100,)


@pytest.mark.parametrize(("found", "there"), [(H200, "0, 1, 2, 3"), ([], "none")])
def test_a_name_that_is_no_gpu(found: list[Gpu], there: str) -> None:
    with pytest.raises(InputError, match=f"^--gpus: there is no GPU 7; there are: {there}$"):
        chosen(found, ["7"])


def test_a_model_that_comes_early_waits_for_those_before_it() -> None:
    """On one GPU for all of them; on two one of them may come later, for which the second GPU is free."""
    for gpus, may_begin in ((1, [False, False, True]), (2, [False, True, True])):
        devices, hold = Devices(H200[:gpus]), Hold(1, 2)
        devices.waiting.append(hold)
        found = [bool(devices._offered(hold))]
        for place in range(2):
            devices.pass_by(place)
            found.append(bool(devices._offered(hold)))
        assert found == may_begin


def test_a_model_on_two_gpus_is_not_overtaken() -> None:
    devices = Devices(H200[:2])
    with devices.taken(1):
        devices.waiting += [Hold(1, 1), Hold(2, 0)]
        assert [devices._offered(hold) for hold in devices.waiting] == [(), ()]
    assert [devices._offered(hold) for hold in devices.waiting] == [(), (0, 1)]
