"""The base class of what results.json and gate.json hold, and the types of its fields."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from ...backends.common.message_text import redacted, unicode


def json_value(value: Any) -> Any:
    """Return the value as JSON has it; ValueError for a number that is not finite.

    Tuples become lists.  Bytes of a name that are not UTF-8 become escape sequences.
    """
    if isinstance(value, str):
        return unicode(value)
    if isinstance(value, Mapping):
        return {unicode(str(key)): json_value(member) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{value} is not a number that JSON has")
    return value


def printable_text(value: Any) -> Any:
    """Return a string without secrets and without bytes that are not UTF-8.

    Another value is returned as it is: the check of the field's type then refuses it.
    """
    if isinstance(value, str):
        return redacted(unicode(value))
    return value


Text = Annotated[str, BeforeValidator(printable_text)]
JsonObject = Annotated[dict[str, Any], AfterValidator(json_value), AfterValidator(redacted)]
Number = float | None
Positive = Annotated[float, Field(gt=0)]


class Stored(BaseModel):
    """A part of results.json, checked when it is made.

    All numbers are finite, since JSON has no other numbers.
    """

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="ignore",
        allow_inf_nan=False,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
    )

    def updated(self, **changes: Any) -> Self:
        """Return a copy with other values of some fields.

        ValidationError for values that results.json cannot have.
        """
        # Not model_copy, which checks nothing.
        fields = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**fields | changes)
