"""Chainer is installed by a command, which its absence names."""
import importlib.util
import os
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

from chainer_fp8pipe.__main__ import _COMMANDS
from chainer_fp8pipe.compat import _hook, install_chainer

import pytest

from tests.ranks import run_script

COMMAND = 'python -m chainer_fp8pipe install-chainer'


@pytest.mark.parametrize('name', ['chainer', 'chainermn'])
def test_where_there_is_no_chainer_its_import_names_the_command(
        name, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, 'meta_path', [_hook._Finder({})])
    with pytest.raises(ModuleNotFoundError, match=COMMAND) as raised:
        importlib.import_module(name)
    assert raised.value.name == name
    assert COMMAND.split()[-1] in _COMMANDS
    assert importlib.util.find_spec('no_such_module') is None


def test_where_chainer_is_installed_the_command_does_nothing():
    done = run_script(0, '-m', 'chainer_fp8pipe', 'install-chainer',
                      env={**os.environ, 'PATH': ''})
    assert (done.stdout, done.stderr, done.returncode) == (
        'Chainer 7.8.1 is installed already\n', '', 0)


class Installer:
    """Stands in for pip and uv: keeps the commands, and makes the wheel."""

    def __init__(self):
        self.commands = []
        self.constraints = []
        self.returncode = 0

    def run(self, command, env):
        self.commands.append(command)
        self.constraints.append([
            env.get(name, '').strip() for name in (
                'PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT')])
        self.files = [
            urllib.request.urlopen(url).read().decode()
            for value in self.constraints[-1] for url in value.split()
            if url.startswith('file:')]
        if '--build-constraints' in command:
            place = command.index('--build-constraints') + 1
            self.files = [Path(command[place]).read_text()]
        if 'wheel' in command:
            folder = command[command.index('--wheel-dir') + 1]
            (Path(folder) / 'chainer-7.8.1-py3-none-any.whl').touch()
        return subprocess.CompletedProcess(command, self.returncode)


@pytest.fixture
def installer(monkeypatch):
    """What is called where neither Chainer nor constraints are there."""
    stand_in = Installer()
    monkeypatch.setattr(subprocess, 'run', stand_in.run)
    monkeypatch.setattr(install_chainer, 'version', lambda name: None)
    for name in 'PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT', 'UV':
        monkeypatch.delenv(name, raising=False)
    return stand_in


def test_pip_builds_with_an_old_setuptools_and_installs_as_it_would(
        installer, monkeypatch):
    monkeypatch.setenv('PIP_CONSTRAINT', 'mine.txt')
    assert install_chainer.main(['--no-index', '--find-links', 'wheels']) == 0
    build, install = installer.commands
    assert build[:4] == [sys.executable, '-m', 'pip', 'wheel']
    assert install[:4] == [sys.executable, '-m', 'pip', 'install']
    assert build[-1] == 'chainer==7.8.1'
    assert install[-1].endswith('chainer-7.8.1-py3-none-any.whl')
    for command in build, install:
        assert command[-4:-1] == ['--no-index', '--find-links', 'wheels']
    (old, new), own = installer.constraints
    assert own == ['mine.txt', '']
    assert old == f'mine.txt {new}'


def test_the_constraint_of_a_build_holds_where_its_path_has_a_blank(
        installer, monkeypatch, tmp_path):
    (tmp_path / 'with a blank').mkdir()
    monkeypatch.setattr(install_chainer.tempfile, 'tempdir',
                        str(tmp_path / 'with a blank'))
    install_chainer.build_wheel(tmp_path)
    assert installer.files == ['setuptools<81\n'] * 2


@pytest.mark.parametrize(('variable', 'found'), [
    ('', '/bin/uv'), ('/elsewhere/uv', ''), ('', '')])
def test_without_pip_uv_installs(installer, monkeypatch, capsys, variable,
                                 found):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(shutil, 'which', lambda name: found or None)
    if variable:        # of the uv that runs the command
        monkeypatch.setenv('UV', variable)
    uv = variable or found
    assert install_chainer.main(['--offline']) == (0 if uv else 1)
    if not uv:
        assert not installer.commands
        assert ('put it there, or install pip with "python -m ensurepip"'
                in capsys.readouterr().err)
        return
    (command,) = installer.commands
    assert command[:5] == [uv, 'pip', 'install', '--python', sys.executable]
    assert command[-2:] == ['--offline', 'chainer==7.8.1']
    assert installer.files == ['setuptools<81\n']


def test_what_failed_is_named(installer, capsys):
    installer.returncode = 2
    assert install_chainer.main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith('Cannot install Chainer: this failed')
    assert '-m pip wheel' in error
