"""Files that are there whole, or as they were before."""
from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import TextIO


@contextlib.contextmanager
def written_whole(path: str | os.PathLike[str]) -> Iterator[TextIO]:
    """A text file to write, which takes the place of ``path`` at the end.

    Until then it is called ``path`` with the process and ``.partial`` behind
    it, so that two processes can write one file; an error removes it.
    """
    partial = f'{os.fspath(path)}.{os.getpid()}.partial'
    try:
        with open(partial, 'w', encoding='utf-8') as file:
            yield file
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)
        raise
