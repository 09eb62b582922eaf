"""What a Python has of an engine, found out without importing the engine, and what a model is that runs elsewhere."""

from __future__ import annotations

import importlib.util
import sys

import backends
from backends.base import ModelFacts
from backends.common import machine
from backends.common.errors import InputError, ModelError
from backends.worker.messages import Described, DescribeJob


def describe(job: DescribeJob) -> Described:
    """What this Python has of an engine, and what is wrong with a request to it."""
    backend = backends.engine_class(job.engine)
    capabilities = backend.capabilities
    installed = capabilities.installed()
    if installed is None:
        return Described(None)
    problem, silence, facts, stamp = "", "", None if capabilities.here else ModelFacts(), ""
    try:
        backend.check(job.request)
        if not capabilities.here:
            facts, stamp = backend.facts(job.request), backend.stamp(job.request)
    except InputError as error:
        problem = str(error)
    except ModelError as error:
        silence = str(error)
    if capabilities.here and not problem and importlib.util.find_spec("torch") is None:
        problem = f"load_fn: scoring needs torch, which {sys.executable} lacks"
    cpu_only = capabilities.torch and machine.cpu_build_of_torch()
    return Described(installed, backend.versions(), cpu_only, problem, facts, stamp, silence)
