"""Reads a JSON file, which people may have edited."""
from __future__ import annotations

import json
from typing import Any


def read_json(path: str, remedy: str = '') -> Any:
    """The content of a file.

    Args:
        path: Of the file.
        remedy: What to do if the file is no JSON, for the message.

    Raises:
        OSError: The file cannot be read.
        ValueError: The file is no JSON; the message names path, place and
            remedy.
    """
    with open(path, encoding='utf-8') as file:
        try:
            return json.load(file)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            reason = f' ({error}); {remedy}' if remedy else f': {error}'
            raise ValueError(f'{path} is no JSON{reason}') from None
