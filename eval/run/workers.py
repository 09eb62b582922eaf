"""The seam between the driver and whatever runs a model: a worker that is started, told jobs, followed, and ended.

``WorkerProcess`` (``eval/common/processes.py``) is a process of this machine, ``InThisProcess`` no process at all.
Whoever runs workers elsewhere writes a third class, and gives ``Hosts.make_worker`` a function that makes it; nothing
else of the driver asks where a worker is.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from backends.common.engine_log import captured
from backends.worker import serving
from eval.common.processes import Deadline, Wanted, outcome
from eval.common.progress import Tell


class Worker(Protocol):
    """One worker, for one model.

    Its life: ``start``; then the jobs of ``backends/worker/messages.py``, one after the other: ``LoadJob``, which says
    which GPUs it gets, and ``ScoreJob``; last ``close``, whatever happened, also after ``kill``.  Files that jobs name
    lie where the driver sees them: the worker reads the model, the windows and the reference store there, and leaves
    its segments in the job's folder ``scores``, and a reference in the folder ``record`` of its task.  Whoever has no
    common disk brings and fetches these.
    """

    log_file: Path | None
    """What takes its output, None: the terminal."""
    has_died: bool
    """Whether the last job ended because the worker ended, or was silent for too long."""

    @property
    def is_alive(self) -> bool:
        """Whether it can take a job, as far as is known."""

    def start(self) -> None:
        """Start it; InputError in one line if that cannot be."""

    def perform(self, job: Any, deadline: Deadline, show: Tell) -> Any:
        """Do one job: what it returns, after all that ``Told`` messages say was shown.

        ModelError if it fails, if the worker dies (with the reason and where its log is) or is silent for too long,
        StoppedError if it was killed by ``kill``.
        """

    def kill(self) -> None:
        """End it at once, with all that its engine has started; from any thread, also before ``start`` and twice."""

    def close(self) -> None:
        """Let it end, and wait until nothing of it is left."""


Make = Callable[[Wanted], Worker]
"""Makes a worker, which is not started yet."""


class InThisProcess:
    """No worker: jobs are done in the driver's own process, one model after the other, for debugging and for tests."""

    def __init__(self, wanted: Wanted) -> None:
        self.log_file = wanted.log_file
        self.server: serving.Server | None = None
        self.environment: dict[str, str] = {}
        self.has_died = False

    @property
    def is_alive(self) -> bool:
        """It always is."""
        return True

    def start(self) -> None:
        """Nothing to start."""
        self.server = serving.Server()

    def perform(self, job: Any, deadline: Deadline, show: Tell) -> Any:
        """Do one job; what it tells is shown once it has ended."""
        assert self.server is not None
        messages: list[Any] = []
        with captured(self.log_file), self.own_environment():
            self.server.perform(job, messages.append)
        return outcome(iter(messages), show)

    @contextmanager
    def own_environment(self) -> Iterator[None]:
        """What an engine sets in the environment is there for its model only, and in no other model's key."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        try:
            yield
        finally:
            self.environment = {name: value for name, value in os.environ.items() if before.get(name) != value}
            os.environ.clear()
            os.environ.update(before)

    def kill(self) -> None:
        """There is nothing to end."""

    def close(self) -> None:
        """Release a model that was loaded and not scored."""
        if self.server is not None:
            self.server.close()
