"""EXL3 and EXL2 folders, by exllamav3's and exllamav2's own converters."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from demo.h200.logged import last_line, log_of, make_or_report, run_python
from demo.h200.rows import EXL2_BITS, EXL3_BITS

AT_ONCE = 4
CALIBRATION_ROWS = 64
LEGACY = "bf16-legacy"
"""The base with the older keys of rotary embeddings in its config.json, which exllamav2 reads."""


def make_exl3(models: Path, wanted: Callable[[str], bool]) -> None:
    """The EXL3 folders, several at a time, once exllamav3's extension is compiled (three minutes on 16 cores)."""
    if wanted("exl3") and is_compiled(models, "exllamav3", "exl3"):
        make_each(models, "exl3", EXL3_BITS, partial(convert_to_exl3, source=models / "bf16"))


def make_exl2(models: Path, wanted: Callable[[str], bool]) -> None:
    """The EXL2 folders; the converter first measures every layer, once for all of them."""
    if not wanted("exl2"):
        return
    make_or_report(models / LEGACY, partial(with_older_keys, source=models / "bf16"))
    if is_compiled(models, "exllamav2", "exl2"):
        measurement = models / "exl2-measurement.json"
        make_or_report(measurement, partial(measure_for_exl2, source=models / LEGACY))
        if measurement.is_file():
            make_each(models, "exl2", EXL2_BITS, partial(convert_to_exl2, measurement=measurement))


def is_compiled(models: Path, package: str, name: str) -> bool:
    """Whether a package could be imported, which compiles its extension; else a line says why not."""
    try:
        run_python(["-c", f"import {package}"], log_of(models / f"{name}-import"))
    except RuntimeError as error:
        print(f"{name}: failed: {error}", flush=True)
        return False
    return True


def make_each(models: Path, name: str, all_bits: tuple[float, ...], maker: Callable[..., None]) -> None:
    """One folder for each number of bits."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for bits in all_bits:
            pool.submit(make_or_report, models / f"{name}-{bits}", partial(maker, bits=bits))


def convert_to_exl3(out: Path, bits: float, source: Path) -> None:
    """One EXL3 folder; the converter exits with 0 even if it refuses."""
    work = out.with_name(f"work-{out.name}")
    log = log_of(out)
    words = ["-m", "exllamav3.conversion.convert_model", "-i", source, "-o", out, "-w", work]
    run_python([*words, "-b", bits, "-cr", CALIBRATION_ROWS], log)
    check_made(out, log)


def with_older_keys(out: Path, source: Path) -> None:
    """Links to the base's files, and its config.json with ``rope_theta`` beside ``rope_parameters``."""
    out.mkdir()
    for file in source.iterdir():
        if file.name != "config.json":
            (out / file.name).symlink_to(file.resolve())
    config: dict[str, Any] = json.loads((source / "config.json").read_text(encoding="utf-8"))
    config["rope_theta"] = config["rope_parameters"]["rope_theta"]
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def measure_for_exl2(out: Path, source: Path) -> None:
    """What each layer loses at each number of bits, by exllamav2's own calibration text; JSON."""
    log = log_of(out)
    run_python([*exl2_words(out, source), "-om", out], log)
    if not out.is_file():
        raise RuntimeError(f"{last_line(log)} (log: {log})")


def convert_to_exl2(out: Path, bits: float, measurement: Path) -> None:
    """One EXL2 folder with a head of 6 bits, the converter's default."""
    out.mkdir()
    log = log_of(out)
    run_python([*exl2_words(out, out.parent / LEGACY), "-m", measurement, "-b", bits, "-cf", out], log)
    check_made(out, log)


def exl2_words(out: Path, source: Path) -> list[object]:
    """The converter's words that are common to both of its steps."""
    return ["-m", "exllamav2.conversion.convert_exl2", "-nr", "-i", source, "-o", out.with_name(f"work-{out.name}")]


def check_made(out: Path, log: Path) -> None:
    """RuntimeError if a converter left no model."""
    if not (out / "config.json").is_file() or not list(out.glob("*.safetensors")):
        raise RuntimeError(f"{last_line(log)} (log: {log})")
