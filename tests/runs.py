"""Runs scripts in this process, by ``run`` or as Python does.

A start of ``mpiexec`` takes seconds; ranks of the tests are there already.
"""
from __future__ import annotations

import contextlib
import io
import linecache
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from chainer_fp8pipe.__main__ import main
from chainer_fp8pipe.compat.old_names import run_main
from chainer_fp8pipe.intercept.training_objects import LIBRARIES
from chainer_fp8pipe.training.unmodified import additions, launch

import pytest
from chainer.training.extensions import PrintReport
from mpi4py import MPI


@contextlib.contextmanager
def _process(folder: Path) -> Iterator[tuple[io.StringIO, io.StringIO]]:
    """A block in a folder, and what is printed in it, whose end undoes it."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(
            io.StringIO()) as out, contextlib.redirect_stderr(
                io.StringIO()) as said:
        patch.chdir(folder)
        patch.setitem(sys.modules, '__main__', sys.modules['__main__'])
        for name, value in (('argv', ['script.py']), ('path', [*sys.path]),
                            ('excepthook', sys.excepthook)):
            patch.setattr(sys, name, value)
        # The lines of the tests are no script's.
        patch.setattr(additions, 'LIBRARIES', LIBRARIES | {'tests'})
        linecache.clearcache()
        patch.setattr(PrintReport.__init__, '__defaults__',
                      ('LogReport', out))
        # Ranks that share cores may be late.
        patch.setattr(launch, '_PATIENCE', 300)
        yield out, said


def run_here(comm: MPI.Comm, folder: Path, script: str, *options: Any,
             arguments: Sequence[str] = (), command: str = 'run'
             ) -> SimpleNamespace:
    """``run *options script.py *arguments`` on these ranks, which are all.

    A script that raises must do so on all ranks.

    Returns:
        ``stdout`` and ``stderr`` of all ranks, one after the other, and this
        rank's ``returncode``.
    """
    if comm.rank == 0:
        folder.mkdir(exist_ok=True)
        (folder / 'script.py').write_text(script)
    comm.Barrier()
    return _on_all(comm, folder, lambda: main(
        [command, *map(str, options), 'script.py', *arguments]))


def run_python(comm: MPI.Comm, folder: Path, script: Path | str,
               *arguments: Any) -> SimpleNamespace:
    """As :func:`run_here`, of a script's text or path, as Python runs it."""
    path = script if isinstance(script, Path) else folder / 'script.py'
    if comm.rank == 0 and path is not script:
        path.write_text(script)
    comm.Barrier()

    def run() -> None:
        sys.argv = [str(path), *map(str, arguments)]
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name='__main__')
    return _on_all(comm, folder, run)


def _on_all(comm: MPI.Comm, folder: Path, run: Callable[[], Any]
            ) -> SimpleNamespace:
    code: Any = 0
    with _process(folder) as (out, said):
        try:
            run()
        except SystemExit as end:
            code = end.code or 0
        except Exception:
            code = 1
            # One that ends all ranks would end the tests.
            (sys.excepthook if comm.size == 1 else traceback.print_exception)(
                *sys.exc_info())
    return SimpleNamespace(returncode=code, **{
        name: ''.join(comm.allgather(text.getvalue()))
        for name, text in (('stdout', out), ('stderr', said))})


def run_alone(folder: Path, script: str) -> dict[str, Any]:
    """A script's variables, and its ``stdout``, with old names only."""
    found = {'__name__': '__main__'}
    folder.mkdir(exist_ok=True)
    (folder / 'script.py').write_text(script)
    with _process(folder) as (out, _):
        run_main('script.py', found)
    return {**found, 'stdout': out.getvalue()}
