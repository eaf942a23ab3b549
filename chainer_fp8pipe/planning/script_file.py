"""Looks at a user's script before anything is started for it."""
from __future__ import annotations

import contextlib
import importlib.util
import os
import warnings
import zipfile

from ..command_line import did_you_mean


def check_script(path: str | None) -> None:
    """Compiles a script, which every rank would fail in at its first line.

    Args:
        path: Of the file; None: no script was named.

    Raises:
        ValueError: There is no such file, it cannot be read, or it is no
            Python.  The message is a line.
    """
    if not path:
        raise ValueError('there is no script; name it after the options')
    if os.path.isdir(path):
        raise ValueError(f'{path} is a folder, and no script')
    if not os.path.exists(path):
        raise ValueError(f'there is no script {path}{_meant(path)}')
    try:
        with open(path, 'rb') as file:
            source = file.read()
        if source.startswith(importlib.util.MAGIC_NUMBER) or (
                zipfile.is_zipfile(path)):
            return          # Python runs these, too, and has compiled them
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')     # Python warns when it runs it
            compile(source, path, 'exec', dont_inherit=True)
    except SyntaxError as error:
        line = (error.text or '').strip()
        raise ValueError(
            path + f', line {error.lineno}' * bool(error.lineno)
            + f': {type(error).__name__}: {error.msg}'
            + f': {line}' * bool(line)) from None
    except (ValueError, OSError) as error:      # bytes that are no text
        raise ValueError(f'{path} cannot be read as a script: {error}'
                         ) from None


def _meant(path: str) -> str:
    folder, name = os.path.split(path)
    with contextlib.suppress(OSError):
        return did_you_mean(name, os.listdir(folder or '.'), 0.8)
    return f': there is no folder {folder}'
