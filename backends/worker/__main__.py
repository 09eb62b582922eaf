"""``python -m backends.worker MESSAGES LIFELINE``: a worker, which the driver starts (``eval/run/worker_process.py``).

Jobs come as lines on the standard input; messages go as lines to the file descriptor MESSAGES.  What engines print goes
where the driver has pointed the standard output and error.  The driver's end closes the pipe LIFELINE.
"""

from __future__ import annotations

import faulthandler
import os
import sys

from backends.worker.supervisor import become_worker


def main(descriptors: list[str]) -> int:
    """Work until no job comes any more."""
    messages, lifeline = map(int, descriptors)
    become_worker(messages, lifeline)
    faulthandler.enable()  # a crash says in the log where it was
    os.set_inheritable(messages, False)  # an engine's own processes must not hold the channel open
    with os.fdopen(messages, "wb", buffering=0) as channel:
        try:
            from backends.worker import serving
        except ModuleNotFoundError as missing:
            # As little as a driver can read without the packages that messages need.
            package = {"yaml": "pyyaml"}.get(missing.name or "", missing.name)
            channel.write(
                b'{"type": "failed", "reason": "python: %s lacks %s: %s -m pip install numpy pydantic safetensors"}\n'
                % (sys.executable.encode(), str(package).encode(), sys.executable.encode())
            )
            return 1
        serving.serve(sys.stdin.buffer, channel)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
