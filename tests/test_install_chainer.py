"""Chainer is installed by a command, which its absence names."""
import base64
import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from chainer_fp8pipe.__main__ import _COMMANDS
from chainer_fp8pipe.compat import _absent, _edits, install_chainer

import pytest

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


class Installer:
    """Stands in for pip and uv: keeps the commands, and brings Chainer."""

    def __init__(self):
        self.commands = []
        self.paths = []
        self.wheels = []
        self.returncode = 0
        self.brings = {edit.file: '' for edit in _edits.EDITS}
        for edit in _edits.EDITS:
            self.brings[edit.file] += (
                edit.fragment.removesuffix('...') + '\n') * edit.times

    def run(self, command, env):
        self.commands.append(command)
        self.paths.append(env.get('PYTHONPATH'))
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
    """What is called in place of pip and uv."""
    stand_in = Installer()
    monkeypatch.setattr(subprocess, 'run', stand_in.run)
    for name in 'UV', 'PYTHONPATH':
        monkeypatch.delenv(name, raising=False)
    return stand_in


def test_pip_builds_with_an_old_setuptools_and_installs_as_it_would(
        installer):
    options = ['--no-index', '--find-links', 'wheels']
    assert install_chainer.main(options) == 0
    tools, build, install, needs = installer.commands
    for command in installer.commands:
        assert command[:4] == [sys.executable, '-m', 'pip', 'install']
        assert command[-4:-1] == options or command is tools
    assert tools[-5:] == [*options, 'setuptools<81', 'wheel']
    assert '--no-build-isolation' in build
    assert installer.paths[1] == tools[tools.index('--target') + 1]
    assert build[-1] == 'chainer==7.8.1'
    assert install[-1].endswith(WHEEL)
    assert needs[-1] == 'chainer==7.8.1+today'


def test_the_wheel_is_the_edited_chainer(installer):
    assert install_chainer.main([]) == 0
    (wheel,) = installer.wheels
    assert b'numpy.sctypes' not in b''.join(wheel.values())
    assert b'np.int32' in wheel['chainer/functions/array/as_strided.py']
    assert 'chainer/_today.py' in wheel
    folder = 'chainer-7.8.1+today.dist-info'
    assert b'Version: 7.8.1+today\n' in wheel[f'{folder}/METADATA']
    rows = [row.split(',') for row in
            wheel.pop(f'{folder}/RECORD').decode().split()]
    assert rows.pop() == [f'{folder}/RECORD', '', '']
    assert rows == [[name, 'sha256=' + base64.urlsafe_b64encode(
        hashlib.sha256(content).digest()).rstrip(b'=').decode(),
        str(len(content))] for name, content in wheel.items()]


def test_another_chainer_is_refused(installer):
    installer.brings['chainer/function_node.py'] = 'nothing'
    with pytest.raises(SystemExit, match='chainer/function_node.py is not '
                                         'the one of Chainer 7.8.1'):
        install_chainer.main([])


def test_chainercv_comes_with_a_function_in_place_of_its_c(installer):
    assert install_chainer.main(['--with', 'chainercv', '-q']) == 0
    _, build, install = installer.commands[-3:]
    assert build[-3:] == ['--no-build-isolation', '-q', 'chainercv==0.13.1']
    assert install[-1].endswith('chainercv-0.13.1-py3-none-any.whl')
    exec(installer.wheels[-1]['chainercv/utils/bbox/_nms_gpu_post.py'],
         found := {})
    with pytest.raises(NotImplementedError, match='to_cpu'):
        found['_nms_gpu_post'](1, 2, 3, 4)


@pytest.mark.parametrize(('variable', 'found'), [
    ('', '/bin/uv'), ('/elsewhere/uv', '')])
def test_without_pip_uv_installs(installer, monkeypatch, variable, found):
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(shutil, 'which', lambda name: found or None)
    if variable:        # of the uv that runs the command
        monkeypatch.setenv('UV', variable)
    assert install_chainer.main(['--offline']) == 0
    for command in installer.commands:
        assert command[:5] == [
            variable or found, 'pip', 'install', '--python', sys.executable]
    assert installer.commands[1][-2:] == ['--offline', 'chainer==7.8.1']


def test_what_failed_is_named(installer, monkeypatch):
    installer.returncode = 2
    with pytest.raises(SystemExit, match='Cannot install Chainer: this failed'
                                         '.*-m pip install'):
        install_chainer.main([])
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    monkeypatch.setattr(shutil, 'which', lambda name: None)
    with pytest.raises(SystemExit, match='put it there, or install pip with '
                                         '"python -m ensurepip"'):
        install_chainer.main([])
