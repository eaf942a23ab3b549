"""Looks at a user's script before anything is started for it."""
from __future__ import annotations

import importlib.util
import os
import traceback
import warnings
import zipfile


def check_script(path: str | None) -> None:
    """Compiles a script, which every rank would fail in at its first line.

    Args:
        path: Of the file; None: no script was named.

    Raises:
        ValueError: There is no such file, it cannot be read, or it is no
            Python.  The message shows the line.
    """
    if not path or not os.path.isfile(path):
        raise ValueError(' '.join(['there is no script', path or '']).strip())
    try:
        with open(path, 'rb') as file:
            source = file.read()
    except OSError as error:
        raise ValueError(f'the script cannot be read: {error}') from None
    if source.startswith(importlib.util.MAGIC_NUMBER) or (
            zipfile.is_zipfile(path)):
        return              # Python runs these, too, and has compiled them
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')     # Python warns when it runs it
            compile(source, path, 'exec', dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        said = ''.join(traceback.format_exception_only(error)).rstrip()
        raise ValueError(f'the script {path} is no Python:\n{said}') from None
