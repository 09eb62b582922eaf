"""What a Python has of an engine, found out without importing the engine, and what a model is that runs elsewhere."""

from __future__ import annotations

import importlib.util
import sys

from compare_q import backends
from compare_q.backends import hub
from compare_q.backends.base import LoadRequest, ModelFacts
from compare_q.backends.common import machine
from compare_q.backends.common.errors import InputError, ModelError
from compare_q.backends.common.messages import printable
from compare_q.backends.common.options import named_files, strings_in
from compare_q.backends.worker.messages import Described, DescribeJob


def describe(job: DescribeJob) -> Described:
    """What this Python has of an engine, and what is wrong with a request to it."""
    engine = backends.engine_class(job.engine)
    capabilities = engine.capabilities
    installed = capabilities.installed()
    if installed is None:
        return Described(None)
    problem, silence, facts, stamp = "", "", None if capabilities.here else ModelFacts(), ""
    try:
        engine.check(job.request)
        model = engine.files(job.request)
        if capabilities.here:
            check_pinned(job.request)
        else:
            facts, stamp = model.facts(), model.stamp()
    except InputError as error:
        problem = str(error)
    except ModelError as error:
        silence = str(error)
    if capabilities.here and not problem and importlib.util.find_spec("torch") is None:
        problem = f"load_fn: scoring needs torch, which {sys.executable} lacks"
    cpu_only = capabilities.torch and machine.cpu_build_of_torch()
    try:
        versions = {**engine.versions(), **named_files(job.request.options)}
    except InputError as error:
        return Described(installed, {}, cpu_only, problem or str(error), facts, stamp, silence)
    return Described(installed, versions, cpu_only, problem, facts, stamp, silence)


def check_pinned(request: LoadRequest) -> None:
    """InputError for an option that names a repository of the hub, whose content may change under its name."""
    for name, value in request.options.items():
        for each in filter(hub.is_hub_id, strings_in(value)):
            raise InputError(
                f"engine.{name}: {printable(each)} is no path here, and a repository on the hub may change; fetch it "
                "and give its folder, or owner/name@commit where the engine takes that"
            )
