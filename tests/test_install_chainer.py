"""Chainer is installed by a command, which its absence names."""
import base64
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path

from chainer_fp8pipe.__main__ import _COMMANDS
from chainer_fp8pipe.compat import (
    _absent,
    _edits,
    _nms_gpu_post,
    install_chainer,
)

import numpy
import pytest

from tests.ranks import run_script

COMMAND = 'python -m chainer_fp8pipe install-chainer'
WHEEL = 'chainer-7.8.1+today-py3-none-any.whl'


@pytest.mark.parametrize('name', ['chainer', 'chainermn'])
def test_where_there_is_no_chainer_its_import_names_the_command(
        name, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, 'meta_path', [_absent._Last()])
    with pytest.raises(ModuleNotFoundError, match=COMMAND) as raised:
        importlib.import_module(name)
    assert raised.value.name == name
    assert COMMAND.split()[-1] in _COMMANDS
    assert importlib.util.find_spec('no_such_module') is None


def test_where_chainer_is_installed_the_command_does_nothing():
    done = run_script(0, '-m', 'chainer_fp8pipe', 'install-chainer',
                      env={**os.environ, 'PATH': ''})
    assert (done.stdout, done.stderr, done.returncode) == (
        'Chainer 7.8.1+today is installed already\n', '', 0)


class Installer:
    """Stands in for pip and uv: keeps the commands, and brings Chainer."""

    def __init__(self):
        self.commands = []
        self.wheels = []
        self.returncode = 0
        self.brings = {edit.file: '' for edit in _edits.EDITS}
        for edit in _edits.EDITS:
            self.brings[edit.file] += (
                edit.fragment.removesuffix('...') + '\n') * edit.times

    def run(self, command, env):
        self.commands.append(command)
        self.constraints = [env.get(name, '').strip() for name in (
            'PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT')]
        self.files = [
            urllib.request.urlopen(url).read().decode()
            for value in self.constraints for url in value.split()
            if url.startswith('file:')]
        if '--build-constraints' in command:
            place = command.index('--build-constraints') + 1
            self.files = [Path(command[place]).read_text()]
        if '--target' in command:
            folder = Path(command[command.index('--target') + 1])
            folder.mkdir(exist_ok=True)
            if command[-1].startswith('chainercv'):
                self.bring_chainercv(folder)
            elif command[-1].startswith('chainer'):
                self.bring(folder)
        if command[-1].endswith('.whl'):
            with zipfile.ZipFile(command[-1]) as file:
                self.wheels.append(
                    {name: file.read(name) for name in file.namelist()})
        return subprocess.CompletedProcess(command, self.returncode)

    def bring(self, folder):
        for file, text in self.brings.items():
            if file == 'METADATA':
                file = 'chainer-7.8.1.dist-info/METADATA'
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        (folder / 'chainer-7.8.1.dist-info' / 'RECORD').touch()

    def bring_chainercv(self, folder):
        for part in 'chainercv-0.13.1.dist-info', 'chainercv/utils/bbox':
            (folder / part).mkdir(parents=True)


@pytest.fixture
def installer(monkeypatch):
    """What is called where neither Chainer nor constraints are there."""
    stand_in = Installer()
    monkeypatch.setattr(subprocess, 'run', stand_in.run)
    monkeypatch.setattr(install_chainer, 'is_mended', lambda: False)
    for name in 'PIP_CONSTRAINT', 'PIP_BUILD_CONSTRAINT', 'UV':
        monkeypatch.delenv(name, raising=False)
    return stand_in


def test_pip_builds_with_an_old_setuptools_and_installs_as_it_would(
        installer, monkeypatch):
    monkeypatch.setenv('PIP_CONSTRAINT', 'mine.txt')
    options = ['--no-index', '--find-links', 'wheels']
    assert install_chainer.main(options) == 0
    build, install, needs = installer.commands
    for command in installer.commands:
        assert command[:4] == [sys.executable, '-m', 'pip', 'install']
        assert command[-4:-1] == options
    assert build[-1] == 'chainer==7.8.1'
    assert install[-1].endswith(WHEEL)
    assert needs[-1] == 'chainer==7.8.1+today'
    old, new = installer.constraints
    assert old == f'mine.txt {new}'


def test_the_wheel_is_the_edited_chainer(installer):
    assert install_chainer.main([]) == 0
    (wheel,) = installer.wheels
    assert b'numpy.sctypes' not in b''.join(wheel.values())
    assert b'np.int32' in wheel['chainer/functions/array/as_strided.py']
    assert 'chainer/_today.py' in wheel
    folder = 'chainer-7.8.1+today.dist-info'
    assert b'Version: 7.8.1+today\n' in wheel[f'{folder}/METADATA']
    assert wheel[f'{folder}/EDITS'].decode() == _edits.digest()
    rows = [row.split(',') for row in
            wheel.pop(f'{folder}/RECORD').decode().split()]
    assert rows.pop() == [f'{folder}/RECORD', '', '']
    assert rows == [[name, 'sha256=' + base64.urlsafe_b64encode(
        hashlib.sha256(content).digest()).rstrip(b'=').decode(),
        str(len(content))] for name, content in wheel.items()]


def test_another_chainer_is_refused(installer, capsys):
    installer.brings['chainer/function_node.py'] = 'nothing'
    assert install_chainer.main([]) == 1
    assert ('chainer/function_node.py is not the one of Chainer 7.8.1'
            in capsys.readouterr().err)


def test_chainercv_comes_with_a_function_in_place_of_its_c(
        installer, monkeypatch):
    monkeypatch.setattr(install_chainer, 'is_mended', lambda: True)
    assert install_chainer.main(['--with', 'chainercv', '-q']) == 0
    tools, build, install = installer.commands
    assert tools[-2:] == ['setuptools<81', 'wheel']
    assert build[-3:] == ['--no-build-isolation', '-q', 'chainercv==0.13.1']
    assert install[-1].endswith('chainercv-0.13.1-py3-none-any.whl')
    assert 'chainercv/utils/bbox/_nms_gpu_post.py' in installer.wheels[0]


def test_boxes_that_a_better_one_covers_are_left_out():
    # Of 4 boxes in numbers of 2 bits, 0 covers 1 and 3, and 1 covers 2.
    mask = numpy.array([[0b10, 0b10], [0, 0b01], [0, 0], [0, 0]], 'u8')
    boxes, count = _nms_gpu_post._nms_gpu_post(mask.ravel(), 4, 2, 2)
    assert boxes[:count].tolist() == [0, 2]


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
    for command in installer.commands:
        assert command[:5] == [
            uv, 'pip', 'install', '--python', sys.executable]
    assert installer.commands[0][-2:] == ['--offline', 'chainer==7.8.1']
    assert installer.files == ['setuptools<81\n']


def test_what_failed_is_named(installer, capsys):
    installer.returncode = 2
    assert install_chainer.main([]) == 1
    error = capsys.readouterr().err
    assert error.startswith('Cannot install Chainer: this failed')
    assert '-m pip install' in error
