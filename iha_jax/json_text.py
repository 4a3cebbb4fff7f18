"""JSON from files that anyone may have written."""

import json
from typing import Any


def parse_json(text: str | bytes, where: str) -> Any:
    """What a JSON text holds.

    Args:
      text: a text, or its bytes in UTF-8, UTF-16 or UTF-32.
      where: it came from, for the message.

    Raises:
      ValueError: it isn't JSON, is nested too deep to be read, or has a number of thousands of digits.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} isn't JSON: {error}") from error


def parse_json_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The same where an object is expected.

    Raises:
      ValueError: as `parse_json`, or it holds something else.
    """
    found = parse_json(text, where)
    if not isinstance(found, dict):
        raise ValueError(f"{where} must hold a JSON object, got {type(found).__name__}")
    return found
