"""Runs the command line on one rank, in forks of one process.

Each fork has imported Chainer, which takes longer than a script that is
refused.
"""
from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.ranks import end_with_parent, environment

_SCRIPT = '''
import os, runpy, sys
import chainer_fp8pipe, chainermn       # neither starts MPI
import chainer_fp8pipe.chains.cuts
import chainer.training.extensions
split = sys.argv.index('--')
folders, sys.argv[split:] = sys.argv[split + 1:], []
for folder in folders:
    child = os.fork()
    if not child:
        os.chdir(folder)
        for number, name in (1, 'stdout'), (2, 'stderr'):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o600), number)
        runpy.run_module('chainer_fp8pipe', run_name='__main__')
        sys.exit()
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
'''


def script_folders(tmp_path_factory: pytest.TempPathFactory,
                   scripts: Iterable[str]) -> list[Path]:
    """A new folder for each script, which is its ``script.py``."""
    folders = []
    for script in scripts:
        folders.append(tmp_path_factory.mktemp('script'))
        (folders[-1] / 'script.py').write_text(script)
    return folders


def run_in_forks(arguments: Sequence[str], folders: Sequence[Path]
                 ) -> list[subprocess.CompletedProcess]:
    """``python -m chainer_fp8pipe *arguments`` in each folder, in turn."""
    done = subprocess.run(
        [sys.executable, '-c', _SCRIPT, *arguments, '--',
         *map(str, folders)], env=environment(), capture_output=True,
        text=True, timeout=300, preexec_fn=end_with_parent)
    codes = done.stdout.split()
    assert len(codes) == len(folders), done.stderr
    return [subprocess.CompletedProcess(
        arguments, int(code), (folder / 'stdout').read_text(),
        (folder / 'stderr').read_text())
        for code, folder in zip(codes, folders, strict=True)]
