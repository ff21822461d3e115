"""A solver's problem from JSON text, with errors that name the field."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from schedopt.errors import PlanFileError

T = TypeVar("T")


def read_problem(path: str | Path) -> bytes:
    """The file's bytes; PlanFileError says why it can not be read."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise PlanFileError(f"{path}: can not be read: {error.strerror}") from error


def json_of(text: str | bytes, source: str) -> Any:
    """Parsed; PlanFileError where `text` is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, UnicodeDecodeError) as error:
        raise PlanFileError(f"{source}: no JSON: {error}") from error


def validated(adapter: TypeAdapter[T], data: Any, source: str) -> T:
    """`data` as the adapter's type; PlanFileError names the first field that is wrong."""
    try:
        return adapter.validate_python(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise PlanFileError(f"{source}: {field}: {first['msg']}") from error
