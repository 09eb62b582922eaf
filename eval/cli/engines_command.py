"""``engines``: list the engines, their versions, and how to install those that are missing."""

from __future__ import annotations

from ... import backends
from ..common.terminal import say


def run() -> int:
    """Print three lines on each engine; return the exit status."""
    for _, engine in backends.engines():
        capabilities = engine.capabilities
        installed = capabilities.installed()
        if installed is None:
            state = f"not installed: {capabilities.install}"
        else:
            distribution, version = installed
            # An engine that is built in has no version.
            state = f"installed: {distribution} {version}".rstrip()
        say(", ".join(capabilities.load_fns), f"  {capabilities.summary}", f"  {state}")
    return 0
