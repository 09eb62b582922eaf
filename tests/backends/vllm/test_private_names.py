"""Private names of vLLM: a missing one is named, with the version and the fix."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from packaging.version import Version

from compare_q.backends.vllm import installed_vllm, private_names
from compare_q.backends.vllm.private_names import RANK_NAMES, WORKER_NAMES, PrivateName

QUEUE = PrivateName("queue", "Queue.pause", "holding requests")
NAMES = (
    QUEUE,
    PrivateName("queue", "Batch.rows", "rows of a step"),
    PrivateName("queue", "KERNELS", "an emulation", on="cpu"),
    PrivateName("gone", "anything", "a module that was moved"),
    PrivateName("queue", "Queue.close", "a method that was renamed"),
    PrivateName("queue", "Batch.columns", "a field that was renamed"),
    PrivateName("queue", "Other.pause", "a class that was renamed"),
)


@dataclass
class Batch:
    """A field without a default is no attribute of the class."""

    rows: int


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module ``vllm.queue``, of a vLLM 0.34."""
    module = ModuleType("vllm.queue")
    module.Queue = SimpleNamespace(pause=print)  # type: ignore[attr-defined]
    module.Batch = Batch  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.queue", module)
    # The first version whose source was not read for compare_q.
    monkeypatch.setattr(installed_vllm, "installed", lambda: ("vllm", Version("0.34.0")))
    return module


def test_missing_names(made_up: ModuleType) -> None:
    lacking = private_names.missing(NAMES, "gpu")
    assert [name.name for name in lacking] == [
        "anything",
        "Queue.close",
        "Batch.columns",
        "Other.pause",
    ]
    assert private_names.missing(NAMES[:3], "cpu") == [NAMES[2]]
    with pytest.raises(RuntimeError) as caught:
        private_names.check_names(NAMES)
    assert str(caught.value) == (
        "vllm 0.34.0 lacks 'anything' in gone (a module that was moved), 'Queue.close' in queue (a "
        "method that was renamed), 'Batch.columns' in queue (a field that was renamed) and 1 more, "
        "which compare_q needs: pip install 'vllm>=0.26,<0.34'"
    )
    private_names.check_names([QUEUE])


def test_a_package_that_is_missing_is_no_name_of_vllm(
    made_up: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    monkeypatch.setattr(sys.modules["vllm"], "__path__", [str(tmp_path)], raising=False)
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        private_names.check_names([PrivateName("broken", "anything", "a test")])


def test_missing_attributes(made_up: ModuleType) -> None:
    private_names.check_attributes(Batch(3), ("rows",), "rows of a step")
    message = "vllm 0.34.0 lacks 'columns' in Batch (rows of a step), which compare_q needs"
    with pytest.raises(RuntimeError, match=re.escape(message)):
        private_names.check_attributes(Batch(3), ("rows", "columns"), "rows of a step")


@pytest.mark.engine
def test_the_installed_vllm_has_all_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.engine.core_client import SyncMPClient

    platform = "gpu"
    if installed_vllm.is_cpu_build():
        platform = "cpu"
    assert private_names.missing(WORKER_NAMES, platform) == []
    assert private_names.missing(RANK_NAMES, platform) == []
    monkeypatch.delattr(SyncMPClient, "call_utility")
    (lacking,) = private_names.missing(WORKER_NAMES, platform)
    assert lacking.name == "SyncMPClient.call_utility"
    with pytest.raises(RuntimeError, match=r"lacks 'SyncMPClient.call_utility' in v1.engine"):
        private_names.check_names(WORKER_NAMES)
