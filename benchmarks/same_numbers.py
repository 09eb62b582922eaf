"""Whether two checkouts of compare_q show and write the same numbers: the proof that a change of the code changed none.

    python -m benchmarks.same_numbers BEFORE AFTER
    python -m benchmarks.same_numbers BEFORE AFTER --engine transformers

BEFORE and AFTER are folders of checkouts.  Both show every published table (in the format of results.json that the
table has in this checkout), and both score small models of a closed-form engine, or of a random Llama in Transformers,
on one text, on three texts of which one is questions (where lm-eval is installed), and twice to be merged.
Compared are the terminal's table at two widths and with all columns, the statistics, the pairs, CSV and Markdown as
text, and results.json number by number.  Prints what differs; exit status 1 if anything does.
"""

from __future__ import annotations

import argparse
import csv
import difflib
import io
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PUBLISHED = (
    "results/cpu/results.json", "results/cpu/report.html", "results/cpu/demo_amx.json", "results/cpu/demo_avx2.json",
    "results/cpu/demo_avx512.json", "results/h200/table/results.json", "results/h200/table/report.html",
    "results/h200/two_engines.json", "results/h200/repeated.json",
)  # fmt: skip
MERGED = (("results/cpu/results.json", "results/cpu/report.html"),
          ("results/h200/table/report.html", "results/h200/table/results.json"))  # fmt: skip
EVERY_COLUMN = "every column"
"""Stands for the names of all columns, which differ between checkouts."""
ASKED = {
    "wide": ("260", ["--statistics", "--pairs", "--timing", "-o", "results.json", "--csv", "wide.csv",
                     "--markdown", "wide.md"]),
    "narrow": ("100", ["--sort", "ppl", "--csv", "narrow.csv"]),
    "all columns": ("100", ["--columns", EVERY_COLUMN, "--csv", "all.csv", "--markdown", "all.md"]),
}  # fmt: skip
"""Name -> width of the terminal, and flags."""
RENAMED = {"layer_bpw": "bpw_layer", "head_bpw": "bpw_head", "vram_gb": "vram_gib"}
"""Fields of results.json and CSV -> what later versions call them."""
TIMES: dict[str, Any] = {
    "created": "2026-11-24T00:00:00+00:00", "load_seconds": 1.0, "score_seconds": 2.0, "timing": None,
    "commit": None, "command": [], "from_cache": False,
}  # fmt: skip
"""Keys whose values are another run's in another run -> what is written instead before a scored run is shown."""
NOT_COMPARED = {*TIMES, "format", "tokens_per_second", "beside", "seconds", "scores_key", "spec_sha256"}
"""Keys of a scored run that may differ.  Keys of token scores may change with the code, scores may not."""
SEVERAL = ("prose", "code", "endings")


@dataclass(frozen=True)
class Checkout:
    """One version of the code, and the folder into which it writes."""

    root: Path
    out: Path

    @cached_property
    def columns(self) -> str:
        """The names of all columns, with commas between."""
        refused = self.run(["--columns", "?"])
        return re.search(r"there are: (.*)", refused)[1].replace(" ", "").partition(";")[0]  # type: ignore[index]

    def run(self, words: Sequence[str], width: str = "200", folder: str = "") -> str:
        """What the command line prints, on both streams; its files lie in ``folder`` of ``out``."""
        where = self.out / folder
        where.mkdir(parents=True, exist_ok=True)
        words = [self.columns if word == EVERY_COLUMN else word for word in words]
        environment = {**os.environ, "COLUMNS": width, "PYTHONPATH": str(self.root), "NO_COLOR": "1"}
        ran = subprocess.run(
            [sys.executable, str(self.root / "eval" / "compare_q.py"), *words],
            cwd=where, env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
        return f"{ran.stdout}\nexit status {ran.returncode}\n{ran.stderr}"


def main(words: Sequence[str]) -> int:
    """``python -m benchmarks.same_numbers``; exit status 1 if a number differs."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.same_numbers", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("before", type=Path, help="a checkout")
    parser.add_argument("after", type=Path, help="another one")
    parser.add_argument("--engine", choices=("fake", "transformers"), default="fake", help="what scores small models")
    parser.add_argument("--published", action="store_true", help="only show the published tables, and score nothing")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="same_numbers.") as folder:
        pair = [
            Checkout(root.resolve(), Path(folder) / name)
            for name, root in (("before", arguments.before), ("after", arguments.after))
        ]
        compared = shown_published(pair)
        if not arguments.published:
            compared += scored(pair, Path(folder), arguments.engine)
    differing = 0
    for name, differences in compared:
        differing += bool(differences)
        print(f"{name}: {'the same' if not differences else 'DIFFERS'}")
        for line in differences[:40]:
            print(f"    {line}")
    print(f"{len(compared)} outputs compared, {differing} differ")
    return int(differing > 0)


Compared = list[tuple[str, list[str]]]


def shown_published(pair: Sequence[Checkout]) -> Compared:
    """Every published table, and merged ones, in the format of each checkout."""
    compared: Compared = []
    for files in [*((file,) for file in PUBLISHED), *MERGED]:
        compared += shown(pair, " + ".join(files), [[str(each.root / file) for file in files] for each in pair])
    return compared


def shown(pair: Sequence[Checkout], name: str, files: Sequence[Sequence[str]]) -> Compared:
    """Everything that ``--from`` shows and writes of finished runs, in both checkouts."""
    compared: Compared = []
    for what, (width, flags) in ASKED.items():
        words = [each.run(["--from", *given, *flags], width, name) for each, given in zip(pair, files, strict=True)]
        compared.append((f"{name}: {what}", text_differences(*words)))
        for file in (flag for flag in flags if flag.endswith((".csv", ".md"))):
            texts = [(each.out / name / file).read_text(encoding="utf-8") for each in pair]
            texts = list(map(with_new_names, texts)) if file.endswith(".csv") else texts
            compared.append((f"{name}: {file}", text_differences(*texts)))
    raw = [json.loads((each.out / name / "results.json").read_text(encoding="utf-8")) for each in pair]
    return [*compared, (f"{name}: results.json", json_differences(raw[0], raw[1], without={"format"}))]


def scored(pair: Sequence[Checkout], folder: Path, engine: str) -> Compared:
    """Small models scored in both checkouts, on one text and on three, and two merged runs."""
    texts, models = write_texts(folder), write_models(folder, engine)
    several = [texts[name] for name in SEVERAL if name in texts]
    compared: Compared = []
    for name, data, chosen in (("one", several[:1], "ab"), ("other", several[:1], "ac"), ("three", several, "abc")):
        specs = [models[each] for each in chosen]
        for each in pair:
            output = f"{name}.json"
            words = ["-d", *data, "-m", *specs, "-o", output, "--divergences", "--cache-dir", str(each.out / "cache")]
            said = each.run(words)
            if not (each.out / output).exists():
                raise SystemExit(f"{each.root}: {name}: no results:\n{said}")
        raw = [json.loads((each.out / f"{name}.json").read_text(encoding="utf-8")) for each in pair]
        compared.append((f"scored {engine}, {name}", json_differences(raw[0], raw[1], without=NOT_COMPARED)))
        for each, found in zip(pair, raw, strict=True):
            (each.out / f"{name}.json").write_text(json.dumps(at_one_time(found)), encoding="utf-8")
        compared += shown(pair, f"shown {name}", [[str(each.out / f"{name}.json")] for each in pair])
    merged = [[str(each.out / "one.json"), str(each.out / "other.json")] for each in pair]
    return compared + shown(pair, "merged", merged)


def write_texts(folder: Path) -> dict[str, str]:
    """Name -> data spec of a text."""
    from benchmarks.shapes import write_tokenizer

    (folder / "tokenizer").mkdir()
    write_tokenizer(folder / "tokenizer")
    root = Path(__file__).resolve().parents[1]
    text = (root / "demo" / "opticks.txt").read_text(encoding="utf-8")
    code = (root / "demo" / "quantize.py").read_text(encoding="utf-8")
    specs: dict[str, dict[str, Any]] = {}
    for name, content, length in (("prose", text[5000:13000], 200), ("code", code[:4000], 100)):
        (folder / f"{name}.txt").write_text(content, encoding="utf-8")
        specs[name] = {
            "label": name,
            "dataset": "text",
            "path": f"{name}.txt",
            "eval_len": length,
            "eval_stride": length // 2,
        }
    if find_spec("lm_eval"):
        task = (root / "demo" / "questions" / "opticks_endings.yaml").read_text(encoding="utf-8")
        (folder / "endings.yaml").write_text(task.replace("demo/questions/", f"{root}/demo/questions/"), "utf-8")
        specs["endings"] = {"dataset": "lm_eval", "task": "endings.yaml", "eval_len": 256, "max_rows": 12}
    for name, spec in specs.items():
        spec |= {"tokenizer_dir": "tokenizer"}
        (folder / f"{name}.json").write_text(json.dumps(spec), encoding="utf-8")
    return {name: str(folder / f"{name}.json") for name in specs}


def write_models(folder: Path, engine: str) -> dict[str, str]:
    """Letter -> model spec: a reference, a model that is compared with it, and one that lacks scores or is noisier."""
    if engine == "fake":
        (folder / "model").mkdir()
        common = {"vocab_size": 300}
        specs: dict[str, dict[str, Any]] = {
            "a": {"engine": {**common, "boost": 4.0}, "reference": True},
            "b": {"engine": {**common, "boost": 3.0}},
            "c": {"engine": {**common, "boost": 2.0, "nan_windows": [1]}},
        }
        specs = {letter: {"load_fn": "fake", "model_dir": "model", **spec} for letter, spec in specs.items()}
    else:
        from benchmarks.kills import make_model

        make_model(folder / "model")
        specs = {
            "a": {"load_fn": "transformers_auto_bf16", "reference": True},
            "b": {"load_fn": "transformers", "noise_floor": True},
            "c": {"load_fn": "transformers", "engine": {"dtype": "float16"}},
        }
        specs = {letter: {"model_dir": "model", **spec} for letter, spec in specs.items()}
    for letter, spec in specs.items():
        (folder / f"model_{letter}.json").write_text(json.dumps({"label": letter, **spec}), encoding="utf-8")
    return {letter: str(folder / f"model_{letter}.json") for letter in specs}


def at_one_time(found: Any) -> Any:
    """Results as if they had been made at one moment, so that no table shows when they were."""
    if isinstance(found, dict):
        return {key: TIMES[key] if key in TIMES else at_one_time(value) for key, value in found.items()}
    return [at_one_time(each) for each in found] if isinstance(found, list) else found


def text_differences(before: str, after: str) -> list[str]:
    """The lines in which two texts differ, each with a sign of the one that has it."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), "before", "after", lineterm="", n=0)
    return [line for line in lines if not line.startswith("@@")]


def with_new_names(text: str) -> str:
    """CSV whose first line has the fields' new names, wherever they stand in it."""
    header, *rows = csv.reader(io.StringIO(text))
    stream = io.StringIO()
    csv.writer(stream).writerows([[RENAMED.get(name, name) for name in header], *rows])
    return stream.getvalue()


def json_differences(before: Any, after: Any, *, without: set[str]) -> list[str]:
    """The places at which the values of two results.json differ; ``without``: keys that are not compared."""
    one, other = (dict(values_in(in_texts(found), without)) for found in (before, after))
    places = sorted(one.keys() | other.keys())
    return [
        f"{place}: {one.get(place, 'missing')!r} before, {other.get(place, 'missing')!r} after"
        for place in places if place not in one or place not in other or one[place] != other[place]
    ]  # fmt: skip


def in_texts(found: Mapping[str, Any]) -> dict[str, Any]:
    """A results.json of any format as a list of texts, without what is made from the texts, or the only text's name."""
    of_text = ("data", "subtitle", "reference", "models")
    texts = found["texts"] if "texts" in found else [{key: found[key] for key in of_text}]
    rest = {key: value for key, value in found.items() if key not in (*of_text, "texts", "means")}
    rest = {**rest, "parts": rest.get("parts") or []}
    texts = [{key: value for key, value in text.items() if key != "error" or value} for text in texts]
    if len(texts) == 1:
        texts = [{key: value for key, value in texts[0].items() if key != "name"}]
    return {**rest, "texts": texts, "means": found.get("means", []) if len(texts) > 1 else []}


def values_in(found: Any, without: set[str], place: str = "") -> Iterator[tuple[str, Any]]:
    """(place, value) of every number, text and null."""
    if isinstance(found, dict):
        for key, value in found.items():
            if key not in without and place.endswith("/provenance") <= (key != "kv_cache"):  # which a field has too
                yield from values_in(value, without, f"{place}/{RENAMED.get(key, key)}")
    elif isinstance(found, list):
        for number, value in enumerate(found):
            yield from values_in(value, without, f"{place}/{number}")
    else:
        yield place, found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
