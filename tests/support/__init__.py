"""What tests share: toy models, brute force, stand-in servers, made-up results."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
