"""Flags that say what runs, and where."""

from __future__ import annotations

import argparse
import math
import re

from compare_q.eval.cli.flag_values import Mapped, path_argument


def add(p: argparse.ArgumentParser) -> None:
    """Flags that say what runs."""
    p.add_argument("-d", "--dataspec", type=path_argument, nargs="+", action="extend",
                   help="data specifications (JSON), wildcards allowed; a model loads once for all")  # fmt: skip
    p.add_argument(
        "-m", "--modelspec", nargs="+", action="extend", help="model specifications (JSON), wildcards allowed"
    )
    p.add_argument(
        "-r", "--rows", type=window_count, help="number of windows, or all; replaces max_rows of the data spec"
    )
    p.add_argument("-mask", "--mask", help="only models whose label holds one of these words, with semicolons between")
    p.add_argument(
        "-cc", "--clear_cache", action="store_true", help="forget what is stored of this text and these models first"
    )
    p.add_argument(
        "-lf", "--logits_file", type=path_argument, help="reference store for KL divergence: read, or made there"
    )
    p.add_argument("--divergences", action="store_true",
                   help="measure reverse KLD, Jensen-Shannon, total variation and top-5 agreement too")  # fmt: skip
    p.add_argument("--from", dest="source", type=path_argument, nargs="+", action="extend", default=[], metavar="FILE",
                   help="show a finished run (results.json, report.html), or several merged; runs nothing")  # fmt: skip
    p.add_argument("--from-qbench", type=path_argument, metavar="PROJECT",
                   help="write a qbench project (YAML) as specs beside it, and do nothing else")  # fmt: skip
    p.add_argument(
        "--cache-dir", type=path_argument, help="where tokens, scores and references are kept (default: %(default)s)"
    )
    p.add_argument("--cache", action="store_true", help="list what the cache holds, and do nothing else")
    p.add_argument(
        "--cache-limit", type=byte_size, metavar="SIZE", help="keep the cache below SIZE (20GB); the oldest goes first"
    )
    p.add_argument(
        "--gpus", type=device_list, metavar="LIST", help="GPUs to use (0,1); models run at the same time on several"
    )
    p.add_argument(
        "--ray",
        type=node_address,
        metavar="ADDRESS",
        help="run models on the nodes of a Ray cluster (auto: its own)",
    )
    p.add_argument("--python", type=engine_python, action=Mapped, default={}, metavar="ENGINE=PYTHON",
                   help="Python (or folder of a virtual environment) that runs an engine")  # fmt: skip
    p.add_argument("--deadline", type=seconds, metavar="SECONDS",
                   help="end a model that is silent for so long (default: generous)")  # fmt: skip
    p.add_argument("--verify-weights", action="store_true",
                   help="tell models apart by every byte of their files, not by samples")  # fmt: skip
    p.add_argument("--check", action="store_true", help="read the specs and say what would run; start no engine")
    p.add_argument("--doctor", nargs="+", action="extend", default=[], metavar="MODEL",
                   help="say what checkpoints are and what is wrong with them; load nothing")  # fmt: skip
    p.add_argument("--against", metavar="MODEL", help="with --doctor: compare weights and tokens with this model's")
    p.add_argument("--list-engines", action="store_true", help="list engines, their load_fn names and versions")
    p.add_argument("--verbose", action="store_true", help="let the engines print their own logs")


def window_count(given: str) -> int:
    """``-r``: a number of windows; 0 means all, as in the spec."""
    if given == "all":
        return 0
    if not given.isdecimal():
        raise argparse.ArgumentTypeError(f"{given!r} is neither a number of windows nor 'all'")
    return int(given)


def device_list(given: str) -> list[str]:
    """``--gpus``: names of GPUs with commas between."""
    found = [each.strip() for each in given.split(",") if each.strip()]
    if not found:
        raise argparse.ArgumentTypeError("names no GPU; leave the flag out to use all")
    return found


def node_address(given: str) -> str:
    """``--ray``: what Ray calls the address of a cluster."""
    if not given.strip():
        raise argparse.ArgumentTypeError("is empty; give auto, or the address that ray start has printed")
    return given


def engine_python(given: str) -> dict[str, str]:
    """``--python``: an engine or load_fn, and the Python that runs it."""
    engine, equals, python = given.partition("=")
    if not (engine and equals and python):
        raise argparse.ArgumentTypeError(f"{given!r} is not ENGINE=PYTHON")
    return {engine: python}


def seconds(given: str) -> float:
    """``--deadline``: a positive number."""
    try:
        found = float(given)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise argparse.ArgumentTypeError(f"{given!r} is no positive number of seconds")
    return found


def byte_size(given: str) -> int:
    """``--cache-limit`` in bytes: a number with B, KB to TB (powers of 1,000), or KiB to TiB (powers of 1,024).

    A number alone is refused: 20 bytes, where 20 GB were meant, would empty the cache.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)B?|B)", given.strip(), re.IGNORECASE)
    if found is None:
        example = f"{given.strip()}GB" if given.strip().isdecimal() else "20GB"
        raise argparse.ArgumentTypeError(f"{given!r} is no size with a unit; give for example {example} or 500MiB")
    power = "KMGT".find(found[2].upper()) + 1 if found[2] else 0
    wanted = float(found[1]) * (1024 if found[3] else 1000) ** power
    if not math.isfinite(wanted):
        raise argparse.ArgumentTypeError(f"{given[:20]}... is too large")
    return int(wanted)
