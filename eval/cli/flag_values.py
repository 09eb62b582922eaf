"""What several flags share: how often a flag may be given, what its value may be."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from compare_q.backends.common.errors import InputError


class Once(argparse.Action):
    """A flag with one value; InputError if it is given twice, where argparse would silently keep the last value."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        seen: set[str] = vars(namespace).setdefault("seen", set())
        if self.dest in seen:
            raise InputError(f"{option}: is given twice; it takes one value")
        seen.add(self.dest)
        setattr(namespace, self.dest, values)


class Mapped(argparse.Action):
    """Collects ``NAME=VALUE`` pairs of several flags in a dict."""

    def __call__(self, _: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, {**getattr(namespace, self.dest), **values})


def path_argument(given: str) -> Path:
    """A file or folder; an empty name, which a shell variable that is not set gives, would be the working directory."""
    if not given:
        raise argparse.ArgumentTypeError("is empty; give a file or folder")
    return Path(given)
