"""A process that meets the stand-in hub as a user's does: the clients read ``HF_ENDPOINT`` when they are imported.

One process answers many questions, since importing the clients takes seconds.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.hub import Hub, Request

LOOP = """
import json, os, sys
names, answers = {}, os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what is printed is no answer
for line in sys.stdin:
    try:
        exec(json.loads(line), names)
        answer = {"value": names.pop("value", None)}
    except Exception as error:
        answer = {"kind": type(error).__name__, "error": str(error)}
    print(json.dumps(answer), file=answers, flush=True)
"""
PREPARED = """
import pathlib
from compare_q.backends import hub
from compare_q.eval.text import corpus, hub_datasets
from compare_q.eval.common.progress import Progress
from compare_q.eval.specs.reading import parse_data_spec

def spec(**keys):
    return parse_data_spec({"tokenizer_dir": "t", "eval_stride": 2, "eval_len": 4, **keys}, pathlib.Path("d.json"))

class Watch:
    def __init__(self): self.total, self.done, self.said = 0, 0, []
    def expect(self, total): self.total = total
    def advance(self, amount=1): self.done += amount
    def say(self, text): self.said.append(text)
"""


def copy(screen: int, file: int) -> None:
    """What is drawn on a terminal goes into a file, until its program ends."""
    with suppress(OSError):
        while data := os.read(screen, 65536):
            os.write(file, data)


class Client:
    """A process with a cache of its own in ``home``; its standard error is in ``said``.  A context manager.

    ``terminal``: that is a terminal for it, where bars are drawn.
    """

    def __init__(self, hub: Hub, home: Path, *, terminal: bool = False, **variables: str) -> None:
        self.hub = hub
        self.said = home / "stderr.txt"
        home.mkdir(parents=True, exist_ok=True)
        stderr = os.open(self.said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        if terminal:
            screen, there = pty.openpty()
            threading.Thread(target=copy, args=(screen, stderr), daemon=True).start()
            stderr = there
        self.process = subprocess.Popen(
            [sys.executable, "-c", LOOP], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            cwd=ROOT, env=hub.environment(home, PYTHONPATH=str(ROOT), **variables),
        )  # fmt: skip
        os.close(stderr)
        self.run(PREPARED)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # an orderly end of all that datasets imports took 6 s
        self.process.wait()

    def answer(self, code: str) -> dict[str, Any]:
        """What became of some lines of Python: the ``value`` that they set, or their error."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.hub.requests.clear()
        print(json.dumps(code), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        assert line, self.said.read_text()
        found: dict[str, Any] = json.loads(line)
        return found

    def run(self, code: str) -> Any:
        """The ``value`` that some lines of Python set."""
        answer = self.answer(code)
        assert "error" not in answer, answer
        return answer["value"]

    def refusal(self, code: str) -> str:
        """The one line of the InputError that some lines of Python raise."""
        answer = self.answer(code)
        assert answer.get("kind") in ("InputError", "HubAwayError"), answer
        assert len(answer["error"].splitlines()) == 1
        return str(answer["error"])

    @property
    def asked(self) -> list[Request]:
        """The requests of the last question."""
        return self.hub.requests
