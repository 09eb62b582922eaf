"""The settings file: where it lies, what it may hold, and one line for everything else."""

from __future__ import annotations

from pathlib import Path

import pytest

from eval.specs import settings
from tests.support.toy import refusal


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the settings are looked for."""
    monkeypatch.setenv(settings.ENVIRONMENT, str(tmp_path / "mine.json"))
    return tmp_path / "mine.json"


def test_without_a_file_there_are_none(file: Path) -> None:
    assert settings.load().python == {}


def test_pythons_of_engines(file: Path) -> None:
    file.write_text('{"python": {"vllm_score": "/venv/bin/python", "exllamav3": "~/exl3"}}')
    assert settings.load().python == {"vllm_score": "/venv/bin/python", "exllamav3": "~/exl3"}
    file.write_text("{}")
    assert settings.load().python == {}


@pytest.mark.parametrize(
    ("text", "gold"),
    [
        ('{"pyhton": {}}', "pyhton: unknown key (did you mean 'python'?)"),
        ('{"python": "/venv"}', "python: "),
        ('{"python": {"vllm_score": 3}}', "python.vllm_score: "),
        ("[]", ""),
        ("{", ""),
        ("", ""),
        ("[" * 100_000, ""),
        ("\udcff", ""),
    ],
)
def test_settings_that_are_none(file: Path, text: str, gold: str) -> None:
    file.write_text(text, errors="surrogateescape")
    assert refusal(settings.load).startswith(f"{file}: {gold}")


def test_where_the_file_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    for unset in (lambda: monkeypatch.delenv(settings.ENVIRONMENT, raising=False),
                  lambda: monkeypatch.setenv(settings.ENVIRONMENT, "")):  # fmt: skip
        unset()
        assert settings.settings_file().name == "settings.json"
        assert settings.settings_file().parent.name == "compare_q"
