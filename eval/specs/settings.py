"""The user's settings file: which Python runs which engine, for every run on this machine.

{"python": {"vllm_score": "/home/me/vllm/bin/python", "exllamav3": "~/venvs/exl3"}}
"""

from __future__ import annotations

import os
from pathlib import Path

from platformdirs import user_config_path
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from backends.common import json_files
from backends.common.errors import InputError
from backends.common.options import describe

ENVIRONMENT = "COMPARE_Q_SETTINGS"


class Settings(BaseModel):
    """``python``: engine or load_fn -> a Python, or the folder of a virtual environment."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    python: dict[str, str] = Field(default_factory=dict)


def settings_file() -> Path:
    """``$COMPARE_Q_SETTINGS``, else ``settings.json`` in the user's folder of settings."""
    chosen = os.environ.get(ENVIRONMENT)
    return Path(chosen) if chosen else user_config_path("compare_q", appauthor=False) / "settings.json"


def load() -> Settings:
    """The settings; empty where there is no file.  InputError in one line that names the file and the key."""
    file = settings_file()
    if not file.is_file():
        return Settings()
    try:
        return Settings.model_validate(json_files.read_object(file))
    except ValidationError as error:
        raise InputError(f"{file}: {describe(error, Settings.model_fields)}") from None
