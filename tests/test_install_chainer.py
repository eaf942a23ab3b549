"""Chainer is installed by a command, which its absence names."""
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

from chainer_fp8pipe.__main__ import _COMMANDS
from chainer_fp8pipe.compat import LastFinder, _edits, install_chainer

import pytest

COMMAND = 'python -m chainer_fp8pipe install-chainer'


@pytest.mark.parametrize('name', ['chainer', 'chainermn'])
def test_where_there_is_no_chainer_its_import_names_the_command(
        name, monkeypatch):
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, 'meta_path', [LastFinder()])
    with pytest.raises(ModuleNotFoundError, match=COMMAND) as raised:
        importlib.import_module(name)
    assert raised.value.name == name
    assert COMMAND.split()[-1] in _COMMANDS
    assert importlib.util.find_spec('no_such_module') is None


class Installer:
    """Stands in for pip: keeps the commands, and brings Chainer."""

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
        if '--wheel-dir' in command:
            folder = Path(command[command.index('--wheel-dir') + 1])
            built = folder.parent / 'stand-in'
            (self.bring_chainercv if command[-1].startswith('chainercv')
             else self.bring)(built)
            made = shutil.make_archive(folder / 'chainer', 'zip', built)
            Path(made).rename(folder / 'chainer.whl')
        if 'pack' in command:
            place = Path(command[4])
            self.wheels.append({
                path.relative_to(place).as_posix(): path.read_text()
                for path in place.rglob('*') if path.is_file()})
            information, = place.glob('*.dist-info')
            (Path(command[-1]) / f'{information.stem}-any.whl').touch()
        return subprocess.CompletedProcess(command, self.returncode)

    def bring(self, folder):
        for file, text in sorted(self.brings.items(), reverse=True):
            if file == 'METADATA':
                file = 'chainer-7.8.1.dist-info/METADATA'
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(text)
        with open(folder / file, 'a') as metadata:
            metadata.write('\nVersion: 7.8.1\n')

    def bring_chainercv(self, folder):
        for part in 'chainercv-0.13.1.dist-info', 'chainercv/utils/bbox':
            (folder / part).mkdir(parents=True)


@pytest.fixture
def installer(monkeypatch):
    """What is called in place of pip."""
    stand_in = Installer()
    monkeypatch.setattr(subprocess, 'run', stand_in.run)
    monkeypatch.delenv('PYTHONPATH', raising=False)
    return stand_in


def test_pip_builds_with_an_old_setuptools_and_installs_as_it_would(
        installer):
    options = ['--no-index', '--find-links', 'wheels']
    assert install_chainer.main([*options, '--user', '-U']) == 0
    assert [{'--user', '-U'} <= {*command}
            for command in installer.commands] == [
                False, False, False, True, True]
    tools, build, pack, install, needs = installer.commands
    for command in tools, build, install, needs:
        assert command[:4] == [sys.executable, '-m', 'pip', (
            'wheel' if command is build else 'install')]
        assert set(options) < {*command}
    assert tools[-5:] == [*options, 'setuptools<81', 'wheel']
    assert '--no-build-isolation' in build
    folder = tools[tools.index('--target') + 1]
    assert installer.paths[1:3] == [folder, folder]
    assert build[-1] == 'chainer==7.8.1'
    assert pack[:4] == [sys.executable, '-m', 'wheel', 'pack']
    assert install[-1].endswith(f'chainer-{_edits.TODAY}-any.whl')
    assert needs[-1] == f'chainer=={_edits.TODAY}'
    wheel, = installer.wheels
    assert 'numpy.sctypes' not in ''.join(wheel.values())
    assert 'np.int32' in wheel['chainer/functions/array/as_strided.py']
    assert 'chainer/_today.py' in wheel
    assert f'Version: {_edits.TODAY}\n' in wheel[
        f'chainer-{_edits.TODAY}.dist-info/METADATA']


def test_another_chainer_is_refused(installer):
    installer.brings['chainer/function_node.py'] = 'nothing'
    with pytest.raises(SystemExit, match='chainer/function_node.py is not '
                                         'the one of Chainer 7.8.1'):
        install_chainer.main([])


def test_chainercv_comes_with_a_function_in_place_of_its_c(installer):
    assert install_chainer.main(['--with', 'chainercv', '-q']) == 0
    _, build, _, install = installer.commands[-4:]
    assert build[5:7] == ['--no-build-isolation', '-q']
    assert build[-1] == 'chainercv==0.13.1'
    assert install[-1].endswith('chainercv-0.13.1-any.whl')
    exec(installer.wheels[-1]['chainercv/utils/bbox/_nms_gpu_post.py'],
         found := {})
    with pytest.raises(NotImplementedError, match='to_cpu'):
        found['_nms_gpu_post'](1, 2, 3, 4)


def test_what_failed_is_named(installer, monkeypatch):
    installer.returncode = 2
    with pytest.raises(SystemExit, match='Cannot install Chainer: this failed'
                                         '.*-m pip install'):
        install_chainer.main([])
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(SystemExit, match='has no pip, which "python -m '
                                         'ensurepip" or "uv pip install pip"'):
        install_chainer.main([])
