"""What a Python has of an engine, found out without importing the engine."""

from __future__ import annotations

import backends
from backends.common import machine
from backends.common.errors import CompareQError
from backends.worker.messages import Described, DescribeJob


def describe(job: DescribeJob) -> Described:
    """What this Python has of an engine, and what is wrong with a request to it."""
    backend = backends.engine_class(job.engine)
    capabilities = backend.capabilities
    installed = capabilities.installed()
    if installed is None:
        return Described(None)
    problem = ""
    try:
        backend.check(job.request)
    except CompareQError as error:
        problem = str(error)
    cpu_only = capabilities.torch and machine.cpu_build_of_torch()
    return Described(installed, backend.versions(), cpu_only, problem)
