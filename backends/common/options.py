"""Checks of the ``engine`` object of a model spec, which the engine named in the spec makes once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from backends.common.errors import InputError
from backends.common.messages import nearest, printable, shortened

Model = TypeVar("Model", bound=BaseModel)


def parse_options(model: type[Model], options: Mapping[str, Any]) -> Model:
    """The options as an object of ``model``; InputError with one line for the first option that is wrong."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        raise InputError(f"engine.{describe(error, model.model_fields)}") from None


def describe(error: ValidationError, known: Iterable[str]) -> str:
    """``key: what is wrong`` for the first error of a pydantic validation, on one line."""
    first = error.errors(include_url=False)[0]
    key = shortened(printable(".".join(str(step) for step in first["loc"]))) or "(whole object)"
    if first["type"] == "extra_forbidden":
        return f"{key}: unknown key{nearest(str(first['loc'][-1]), known)}"
    if first["type"] == "missing":
        return f"{key}: missing"
    message = printable(first["msg"].removeprefix("Value error, "))
    given = "" if isinstance(first["input"], dict) else f" (got {shortened(repr(first['input']))})"
    return f"{key}: {message[0].lower()}{message[1:]}{given}"


def check_names(given: Iterable[str], known: Iterable[str], owner: str) -> None:
    """InputError for the first option that ``owner`` does not have."""
    names = set(known)
    for name in given:
        if name not in names:
            raise InputError(f"engine.{printable(name)}: {owner} has no such argument{nearest(name, names)}")
