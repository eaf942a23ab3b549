"""Public names that are loaded when they are first asked for."""
from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def on_demand(package: str, homes: Mapping[str, str]
              ) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """A package's ``__getattr__`` and ``__dir__`` (PEP 562).

    Args:
        package: Its name.
        homes: By public name, the module that it is loaded from.
    """
    def load(name: str) -> Any:
        if name not in homes:
            raise AttributeError(
                f'module {package!r} has no attribute {name!r}')
        value = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})
    return load, names
