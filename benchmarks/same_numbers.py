"""Check that a change of the code changes no number: run the same command lines in two checkouts
and compare.

    python -m benchmarks.same_numbers save CHECKOUT FOLDER --models demo/models
    python -m benchmarks.same_numbers compare BEFORE AFTER
    python -m benchmarks.same_numbers joined AFTER

``save`` runs every case of ``cases`` with the code of CHECKOUT on the models of the demo (``python
-m demo --all`` makes them) and keeps the results.json of each case in FOLDER.  ``compare`` reads
two such folders, of format 8 or 9, and prints how many numbers each case compared and every one
that differs.  Its exit status is 1 if there is one, or if a case compared fewer numbers than it
must.  Fields that only one side has are listed by name.  ``joined`` compares each text of a run of
two texts with its own run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from compare_q.backends.common import machine
from tests.support.paths import TIME_KEYS

ROOT = Path(__file__).resolve().parents[1]
NOT_COMPARED = TIME_KEYS | {
    "commit",
    "format",
    "title",
    "versions",
    "worst_tokens",
    "path",
    "spec_sha256",
    "spec",
    "provenance",
}
"""Keys whose values depend on the time, on the version of the code, or on the format."""
SLICED = ("tokens", "ppl", "kld", "same_top")
"""Numbers of a text that format 8 has in its row, and format 9 in its slice."""
ALONE = {"text_one": "opticks", "text_chat": "conversations"}
"""Case of a text alone -> the text's name in the case of both."""
EAGER = {"enforce_eager": True}


PORT = 8765
"""Port of the real vLLM server on this machine."""
STARTUP_S = 300


@dataclass(frozen=True)
class Case:
    """One command line: data specs by name, model specs, and flags.

    ``pack``: data spec of a reference pack that is recorded first; the models may name it as
    ``pack``, its folder.  ``server``: model that a real ``vllm serve`` serves while the case runs.
    ``values``: the least number of values that a comparison must have compared.
    """

    texts: dict[str, dict[str, Any]]
    models: list[dict[str, Any]]
    flags: list[str] = field(default_factory=list)
    pack: dict[str, Any] | None = None
    server: str = ""
    values: int = 0


def cases(models: Path) -> dict[str, Case]:
    """Return name -> case, for the models of the demo in the folder ``models``."""
    base = str(models / "smollm2-135m")
    opticks: dict[str, Any] = {
        "dataset": "text",
        "path": str(ROOT / "eval/spec/opticks.txt"),
        "tokenizer_dir": base,
    }
    text = {**opticks, "eval_len": 1024, "eval_stride": 512, "max_rows": 16}
    short = {**opticks, "eval_len": 256, "eval_stride": 256, "max_rows": 4}
    chat = {
        "dataset": "chat",
        "path": str(ROOT / "demo/conversations.jsonl"),
        "tokenizer_dir": base,
        "eval_len": 1024,
    }

    def vllm(name: str, suffix: str = "", **keys: Any) -> dict[str, Any]:
        engine = {**EAGER, **keys.pop("engine", {})}
        return {
            "load_fn": "vllm_score",
            "label": name,
            "model_dir": base + suffix,
            "engine": engine,
            **keys,
        }

    def transformers(name: str, suffix: str = "", **keys: Any) -> dict[str, Any]:
        return {
            "load_fn": "transformers_auto_bf16",
            "label": name,
            "model_dir": base + suffix,
            **keys,
        }

    def llamacpp(kind: str, **keys: Any) -> dict[str, Any]:
        return {
            "load_fn": "llamacpp",
            "label": f"GGUF {kind}",
            "model_dir": f"{base}-{kind.lower()}.gguf",
            **keys,
        }

    reference = vllm("vLLM bf16", reference=True)
    hf_reference = transformers("HF bf16", reference=True)
    hf_fp32 = transformers("HF fp32", engine={"dtype": "float32"})
    w8a8 = vllm("W8A8", "-w8a8")
    w4a16 = vllm("W4A16", "-w4a16-g32")
    least_values = 2600
    if not machine.has_avx512():
        # vLLM has no kernel for W4A16 there, and bf16 is emulated, slowly.
        w4a16 = transformers("W4A16", "-w4a16-g32")
        text["max_rows"] = 4
        least_values = 2100
    nvfp4 = vllm("NVFP4", "-nvfp4")
    nvfp4a16 = transformers("HF NVFP4A16", "-nvfp4a16")
    noise_floor = transformers("HF bf16", noise_floor=True)
    decode: dict[str, Any] = {"phase": "decode", "batch": 4}
    swept = vllm("W8A8", "-w8a8", sweep={"engine.max_num_batched_tokens": [256, 1024]})
    served = {
        "load_fn": "vllm_server",
        "label": "served",
        "model_dir": f"http://127.0.0.1:{PORT}",
        # With more requests at once, batches depend on time, and scores on batches.
        "engine": {"concurrency": 1},
    }
    quantized = [w8a8, w4a16, nvfp4a16, nvfp4, llamacpp("Q8_0"), llamacpp("Q4_1")]
    return {
        "demo": Case({"text": text}, [noise_floor, reference, *quantized], values=least_values),
        "chat": Case({"chat": chat}, [hf_reference, transformers("HF W8A8", "-w8a8")], values=370),
        "texts": Case({"one": short, "chat": chat}, [hf_reference, hf_fp32], values=16),
        "text_one": Case({"one": short}, [hf_reference, hf_fp32], values=320),
        "text_chat": Case({"chat": chat}, [hf_reference, hf_fp32], values=370),
        "decode": Case(
            {"short": {**short, "max_rows": 2}},
            [reference, vllm("vLLM decode", **decode)],
            values=280,
        ),
        "sweep": Case({"short": short}, [reference, swept], values=540),
        "streaming": Case(
            {"short": short},
            [hf_reference, transformers("HF streaming", engine={"streaming": True})],
            values=320,
        ),
        "pack": Case({"short": short}, [w8a8, nvfp4a16, llamacpp("Q8_0")], pack=short, values=740),
        "server": Case({"text": text}, [hf_reference, served], server=base, values=250),
        "one_line": Case(
            {}, [], [base, f"{base}-w8a8", "-r", "4", "-d", opticks["path"]], values=300
        ),
    }


def save(
    checkout: Path, folder: Path, models: Path, only: Sequence[str], cache: Path | None
) -> int:
    """Run the cases in ``checkout``, with each results.json in ``folder``.

    Returns exit status 1 if a case fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    checkout = checkout.resolve()
    folder = folder.resolve()
    models = models.resolve()
    failed = 0
    for name, case in cases(models).items():
        if only and name not in only:
            continue
        began = time.monotonic()
        status = save_case(checkout, folder, name, case, models, cache)
        print(f"{name}: exit status {status}, {time.monotonic() - began:.1f} s", flush=True)
        if status != 0:
            failed += 1
    if not only or "drop_in" in only:
        text = folder / "drop_in.specs.txt"
        opticks = (ROOT / "eval/spec/opticks.txt").read_text(encoding="utf-8")
        text.write_text(opticks[:40_000], encoding="utf-8")
        words = [str(checkout / "compare_q_vllm.py"), "--model", str(models / "smollm2-135m-w8a8")]
        words += ["--text", str(text), "--context-length", "2048", "--stride", "2048"]
        if run(checkout, words, folder, cache, folder / "drop_in.txt") != 0:
            failed += 1
    return int(failed > 0)


def save_case(
    checkout: Path, folder: Path, name: str, case: Case, models: Path, cache: Path | None
) -> int:
    """Run one case, after what it needs has been made; return the exit status."""
    specs = folder / f"{name}.specs"
    specs.mkdir(exist_ok=True)
    command = str(checkout / "eval/compare_q.py")
    model_specs = list(case.models)
    if case.pack is not None:
        pack = specs / "pack"
        shutil.rmtree(pack, ignore_errors=True)
        recorded = {
            "load_fn": "vllm_score",
            "model_dir": str(models / "smollm2-135m"),
            "engine": EAGER,
        }
        (specs / "pack_text.json").write_text(json.dumps(case.pack), encoding="utf-8")
        (specs / "pack_model.json").write_text(json.dumps([recorded]), encoding="utf-8")
        words = [command, "pack", "-d", str(specs / "pack_text.json")]
        words += ["-m", str(specs / "pack_model.json"), "-o", str(pack), "--no-floor"]
        status = run(checkout, words, specs, cache)
        if status:
            return status
        reference = {"load_fn": "pack", "label": "pack", "model_dir": str(pack), "reference": True}
        model_specs.insert(0, reference)
        case = replace(case, texts={"short": {"pack": str(pack)}})
    words = [command, *case.flags, "-o", str(folder / f"{name}.json")]
    data_files = []
    for text_name, spec in case.texts.items():
        file = specs / f"{text_name}.json"
        file.write_text(json.dumps(spec), encoding="utf-8")
        data_files.append(str(file))
    if model_specs:
        (specs / "models.json").write_text(json.dumps(model_specs), encoding="utf-8")
        words += ["-d", *data_files, "-m", str(specs / "models.json")]
    if not case.server:
        return run(checkout, words, specs, cache)
    with real_server(case.server, specs / "server.txt"):
        return run(checkout, words, specs, cache)


@contextmanager
def real_server(model: str, log: Path) -> Iterator[None]:
    """Run vLLM's own server of a model on ``PORT`` while the block runs."""
    words = ["-m", "vllm.entrypoints.openai.api_server", "--model", model]
    words += ["--host", "127.0.0.1", "--port", str(PORT)]
    words += ["--enforce-eager", "--max-model-len", "2048"]
    # By default, vLLM would claim 92 % of a CPU's memory.
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, *words],
            stdout=stream,
            stderr=stream,
            env=environment,
            start_new_session=True,
        )
        try:
            wait_for_server(process)
            yield
        finally:
            with suppress(ProcessLookupError):
                # The server has child processes, which must end with it.
                os.killpg(process.pid, signal.SIGTERM)
            process.wait(60)


def wait_for_server(process: subprocess.Popen[bytes]) -> None:
    """Wait until the server answers.

    RuntimeError if it ends, or does not answer within ``STARTUP_S``.
    """
    began = time.monotonic()
    while time.monotonic() - began < STARTUP_S and process.poll() is None:
        with (
            suppress(OSError),
            urllib.request.urlopen(f"http://127.0.0.1:{PORT}/health", timeout=5),
        ):
            return
        time.sleep(1)
    raise RuntimeError("vLLM's server did not start; its log is in the folder of the case")


def run(
    checkout: Path,
    words: Sequence[str],
    folder: Path,
    cache: Path | None,
    output: Path | None = None,
) -> int:
    """Run a script of a checkout with its log in ``folder``; return the exit status.

    ``output``: the file of standard output, by default ``out.txt``.
    """
    environment = {**os.environ, "PYTHONPATH": str(checkout), "NO_COLOR": "1", "COLUMNS": "160"}
    if cache is None:
        environment["COMPARE_Q_CACHE"] = str(folder / "cache")
    else:
        environment["COMPARE_Q_CACHE"] = str(cache.resolve())
    command = [sys.executable, *words]
    with open(output or folder / "out.txt", "w") as out, open(folder / "err.txt", "w") as err:
        process = subprocess.run(
            command, cwd=checkout, env=environment, stdout=out, stderr=err, check=False
        )
    return process.returncode


def compare(before: Path, after: Path) -> int:
    """Print the values that differ between the results in two folders.

    Exit status 1 if a value differs, or if a case is missing, or has fewer common values than its
    list says.
    """
    status = 0
    for name, case in cases(Path("models")).items():
        files = existing(name, before / f"{name}.json", after / f"{name}.json")
        if not files or not is_equal(name, case, files):
            status = 1
    outputs = existing("drop_in", before / "drop_in.txt", after / "drop_in.txt")
    if not outputs or not is_equal_output(outputs):
        status = 1
    return status


def existing(name: str, *files: Path) -> list[Path]:
    """Return the files of a case, or print which are missing and return none."""
    missing = [str(file) for file in files if not file.exists()]
    if missing:
        print(f"{name}: missing: {', '.join(missing)}")
        return []
    return list(files)


def is_equal(name: str, case: Case, files: Sequence[Path]) -> bool:
    """Print the values of a case that differ; False if there are some, or too few common ones."""
    one, other = [dict(values_of(json.loads(file.read_text("utf-8")))) for file in files]
    common = one.keys() & other.keys()
    lines = []
    for place in sorted(common):
        if one[place] != other[place]:
            lines.append(f"{place}: {one[place]!r} before, {other[place]!r} after")
    print(f"{name}: {len(common):,} values compared, {len(lines)} differ")
    for line in lines[:60]:
        print(f"    {line}")
    if len(common) < case.values:
        print(f"    fewer than the {case.values:,} that this case must compare")
    print_other_names("before", one.keys() - other.keys())
    print_other_names("after", other.keys() - one.keys())
    return not lines and len(common) >= case.values


def is_equal_output(files: Sequence[Path]) -> bool:
    """Print whether ``compare_q_vllm.py`` printed the same."""
    outputs = []
    for file in files:
        # Its times come last.
        outputs.append(file.read_text(encoding="utf-8").partition("Seconds")[0])
    if outputs[0] == outputs[1]:
        print("drop_in: the same")
        return True
    print(f"drop_in: {outputs}")
    return False


def print_other_names(side: str, places: Collection[str]) -> None:
    """Print the names of the values that only one side has."""
    names = sorted({place.split("//", 1)[1] for place in places})
    if names:
        print(f"    only {side}: {', '.join(names)}")


def joined(before: Path) -> int:
    """Print whether each text has the same numbers alone and in the joined run.

    Returns exit status 1 if one differs.
    """
    results = {}
    for name in ("texts", *ALONE):
        results[name] = json.loads((before / f"{name}.json").read_text("utf-8"))
    rows_of_texts = {row["label"]: row for row in results["texts"]["models"]}
    differing = 0
    compared = 0
    for name, text in ALONE.items():
        for alone in results[name]["models"]:
            label = alone["label"]
            for key, value in rows_of_texts[label]["slices"][text].items():
                if key not in SLICED or value is None:
                    continue
                compared += 1
                if value != alone[key]:
                    differing += 1
                    print(f"{text} / {label} {key}: {value} joined, {alone[key]} alone")
    counts = f"{compared} values compared with their own runs, {differing} differ"
    print(f"texts of the joined run: {counts}")
    return int(differing > 0 or not compared)


def values_of(results: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """(``text / model // name``, value) of every number and digest of a results.json of format 8 or
    9.

    With several texts, only the numbers that a slice has: format 8 has a row for each text, format
    9 a slice.
    """
    if results["format"] == 8:
        several = len(results["texts"]) > 1
        for text in results["texts"]:
            yield from numbers_in(text["data"], f"{text['name']}//data", NOT_COMPARED)
            for row in text["models"]:
                if several:
                    yield from sliced(row, f"{text['name']} / {row['label']}//")
                else:
                    yield from numbers_in(flattened(row), f"{row['label']}//", NOT_COMPARED)
        return
    texts = results["data"]["texts"]
    for text in texts:
        yield from numbers_in(text, f"{text['name']}//data", NOT_COMPARED)
    for row in results["models"]:
        if len(texts) > 1:
            for text in texts:
                yield from sliced(row["slices"][text["name"]], f"{text['name']} / {row['label']}//")
        else:
            yield from numbers_in(row, f"{row['label']}//", {*NOT_COMPARED, "slices"})


def sliced(row: dict[str, Any], place: str) -> Iterator[tuple[str, Any]]:
    """(place, value) of the numbers that a row of format 8 and a slice both have, but a reference's
    own.
    """
    for name in SLICED:
        if row[name] is not None and not row.get("reference"):
            yield f"{place}/{name}", row[name]


def flattened(row: dict[str, Any]) -> dict[str, Any]:
    """A row of format 8 as format 9 has it: each number of ``estimates`` under the name of its
    field.
    """
    fields = {name: value for name, value in row.items() if name != "estimates"}
    estimates = row["estimates"]
    if estimates is None:
        return fields
    fields["blocks"] = estimates["blocks"]
    fields["curve"] = estimates["curve"]
    if estimates.get("sampled"):
        fields["ln_ppl_stderr_of_text"] = estimates["sampled"]["nll"]
        fields["kld_stderr_of_text"] = estimates["sampled"]["kld"]
    against = estimates["against"]
    if against is not None:
        fields["correlation"] = against["correlation"]
        fields["ref_ppl"] = against["ref_ppl"]["value"]
        fields["ref_ppl_tokens"] = against["ref_ppl"]["tokens"]
        fields["kld_percentiles"] = against["kld_percentiles"]
        fields["delta_p_percentiles"] = against["delta_p_percentiles"]
        for name in ("ppl_difference", "delta_p", "delta_p_rms"):
            fields[name] = against[name]["value"]
            fields[f"{name}_stderr"] = against[name]["stderr"]
    return fields


def numbers_in(value: Any, place: str, left_out: Collection[str]) -> Iterator[tuple[str, Any]]:
    """(place, value) of every number inside a value, and of the digest of a row's scores."""
    if isinstance(value, dict):
        for key, item in value.items():
            if key not in left_out:
                yield from numbers_in(item, f"{place}/{key}", left_out)
    elif isinstance(value, list):
        for number, item in enumerate(value):
            yield from numbers_in(item, f"{place}/{number}", left_out)
    elif isinstance(value, int | float) or place.endswith("/scores_digest"):
        yield place, value


def main(words: Sequence[str] | None = None) -> int:
    """``python -m benchmarks.same_numbers``."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.same_numbers", description=(__doc__ or "").partition("\n\n")[0]
    )
    commands = parser.add_subparsers(required=True, dest="command")
    saving = commands.add_parser("save", help="run the cases in a checkout and keep their results")
    saving.add_argument("checkout", type=Path)
    saving.add_argument("folder", type=Path)
    saving.add_argument(
        "--models", type=Path, default=ROOT / "demo/models", help="the demo's models"
    )
    saving.add_argument("--only", nargs="+", default=[], help="names of cases")
    saving.add_argument(
        "--cache", type=Path, help="one cache for all cases, such as that of an earlier `save`"
    )
    comparing = commands.add_parser("compare", help="compare two folders of results")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    joining = commands.add_parser(
        "joined", help="compare each text of the joined run with its own run"
    )
    joining.add_argument("folder", type=Path)
    args = parser.parse_args(words)
    if args.command == "save":
        return save(args.checkout, args.folder, args.models, args.only, args.cache)
    if args.command == "joined":
        return joined(args.folder)
    return compare(args.before, args.after)


if __name__ == "__main__":
    sys.exit(main())
