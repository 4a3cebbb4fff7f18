"""Frozen dataclasses to JSON and back, by their annotations: a run reopens without its Python file."""

import dataclasses
import difflib
import json
import types
import typing
from typing import Any, TypeVar

import numpy as np

from iha_jax.json_text import parse_json

T = TypeVar("T")
_KIND = "kind_of"


def to_json(config: Any) -> str:
    """JSON text of a dataclass instance: nested objects, tuples as lists, dtypes by name."""
    return json.dumps(to_plain(config), indent=2) + "\n"


def from_json(kind: type[T], text: str) -> T:
    """The instance that ``to_json`` wrote.

    Raises:
      ValueError: it isn't JSON, a field is unknown (naming the nearest) or missing, or a value has the wrong type.
    """
    return from_plain(kind, parse_json(text, kind.__name__), kind.__name__)


def to_plain(value: Any) -> Any:
    """Nested dicts, lists and scalars; dataclasses carry their class name where ``from_plain`` needs it."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {_KIND: type(value).__name__, **fields}
    if isinstance(value, (tuple, list)):
        return [to_plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): to_plain(v) for k, v in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    try:
        return np.dtype(value).name  # jnp.bfloat16 and its like
    except TypeError as error:
        raise ValueError(f"{value!r} of type {type(value).__name__} has no JSON form") from error


def from_plain(annotation: Any, value: Any, where: str) -> Any:
    """A value of an annotated type from its plain form.

    Args:
      annotation: a dataclass, tuple, Literal, union or scalar type.
      value: nested dicts, lists and scalars.
      where: path of the value, for messages.

    Raises:
      ValueError: the value doesn't fit.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if dataclasses.is_dataclass(annotation) and isinstance(annotation, type):
        return _dataclass(annotation, value, where)
    if origin in (typing.Union, types.UnionType):
        return _union(arguments, value, where)
    if origin is typing.Literal:
        if value not in arguments:
            raise ValueError(f"{where} must be one of {list(arguments)}, got {value!r}")
        return value
    if origin is tuple and isinstance(value, list):
        kinds = [arguments[0]] * len(value) if arguments[1:] == (...,) else list(arguments)
        if len(kinds) != len(value):
            raise ValueError(f"{where} must have {len(kinds)} elements, got {len(value)}")
        return tuple(from_plain(k, v, f"{where}[{i}]") for i, (k, v) in enumerate(zip(kinds, value, strict=True)))
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if annotation in (bool, int, float, str, type(None)):
        expected = type(None) if annotation is None else annotation
        if type(value) is not expected:
            raise ValueError(f"{where} must be {expected.__name__}, got {value!r}")
    return value


def differences(old: Any, new: Any, where: str = "") -> dict[str, tuple[Any, Any]]:
    """Path → (old, new) of every value that differs between two plain forms."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted({*old, *new}):
            path = f"{where}.{key}" if where else key
            found |= differences(old.get(key), new.get(key), path)
        return found
    return {} if old == new else {where: (old, new)}


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must be an object of {kind.__name__}, got {value!r}")
    hints = typing.get_type_hints(kind)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    arguments = {}
    for name, plain in value.items():
        if name == _KIND:
            continue
        if name not in fields:
            near = difflib.get_close_matches(name, list(fields), 1)
            raise ValueError(f"{where} has no field {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        arguments[name] = from_plain(hints[name], plain, f"{where}.{name}")
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in arguments:
            raise ValueError(f"{where} lacks {name!r}")
    return kind(**arguments)


def _union(arguments: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    if isinstance(value, dict) and _KIND in value:
        arguments = tuple(a for a in arguments if getattr(a, "__name__", None) == value[_KIND]) or arguments
    reasons = []
    for argument in arguments:
        try:
            return from_plain(argument, value, where)
        except ValueError as error:
            reasons.append(str(error))
    raise ValueError(f"{where}: {'; or '.join(reasons)}")
