"""Signals: the first one ends a run, others change nothing, and what a process was started to ignore stays ignored."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from compare_q.backends.worker.engine_process import ENDING
from compare_q.eval.run import workers
from compare_q.eval.run.workers import InterruptedRun, Workers, signals_interrupt


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Python's own handlers, whatever this process was started to ignore; its handlers are there again afterwards."""
    before = {number: signal.getsignal(number) for number in ENDING}
    for number in ENDING:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("first", ENDING)
def test_the_first_signal_interrupts_and_no_other_does(first: signal.Signals) -> None:
    def storm() -> None:
        with signals_interrupt(Workers()), ExitStack() as unwinding:
            for number in (*ENDING, first):
                unwinding.callback(signal.raise_signal, number)
            signal.raise_signal(first)

    with pytest.raises(InterruptedRun) as raised:
        storm()
    assert raised.value.signal == first
    for number in ENDING:  # while Python ends, too, which takes our handlers away
        assert signal.getsignal(number) == signal.SIG_IGN


def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with signals_interrupt(Workers()):
        signal.raise_signal(signal.SIGHUP)
        with pytest.raises(InterruptedRun):
            signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_an_interrupt_that_got_lost_can_be_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as nothing has stopped the run: Python swallows what is raised while it deletes an object."""
    running = Workers()
    with signals_interrupt(running):
        with pytest.raises(InterruptedRun):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)  # at once
        monkeypatch.setattr(workers, "AGAIN_S", -1.0)
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(InterruptedRun):
            signal.raise_signal(signal.SIGINT)
        running.stop()
        signal.raise_signal(signal.SIGINT)
