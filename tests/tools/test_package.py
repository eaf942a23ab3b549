"""What is left in dist/ is what was tried, with a tag that an index takes."""
import sys
import zipfile

import pytest

from tools import package

BUILT = 'some-1-cp312-cp312-linux_x86_64.whl'
TAGGED = 'some-1-cp312-cp312-manylinux_2_34_x86_64.whl'


class Commands:
    """Stand in for those that build, tag, install and run."""

    def __init__(self):
        self.checked = []
        self.installed = ''

    def run(self, *command, cwd=None):
        if 'wheel' in command:
            folder = command[command.index('--wheel-dir') + 1]
            zipfile.ZipFile(folder / BUILT, 'w').close()
        elif 'auditwheel' in command:
            folder = command[command.index('--wheel-dir') + 1]
            folder.mkdir()
            command[-1].rename(folder / TAGGED)
        elif 'twine' in command:
            self.checked.append(command[-1].name)
        elif 'bash' in command:
            self.installed = command[-1]
        elif 'job.py' in command:
            return str(cwd / 'venv')
        return ''


@pytest.mark.parametrize(('reason', 'name'), [
    ('', TAGGED), ('auditwheel is not installed', BUILT)])
def test_the_wheel_that_was_tried_is_left(reason, name, tmp_path, monkeypatch):
    commands = Commands()
    monkeypatch.setattr(package, 'run', commands.run)
    monkeypatch.setattr(package, 'why_not_portable', lambda: reason)
    monkeypatch.setattr(package, 'DIST', tmp_path / 'dist')
    for folder in 'dist', 'tried':
        (tmp_path / folder).mkdir()
    left = package.try_on('python3.12', tmp_path / 'some.tar.gz',
                          tmp_path / 'tried')
    assert left == tmp_path / 'dist' / name
    assert left.exists()
    assert commands.checked == [name]
    assert f'/{name}[mpich]' in commands.installed


@pytest.mark.parametrize(('platform', 'specification', 'reason'), [
    ('linux', 'there', ''),
    ('linux', None, 'auditwheel is not installed'),
    ('darwin', 'there', 'auditwheel is for Linux')])
def test_why_wheels_keep_their_tag_is_said(
        platform, specification, reason, monkeypatch):
    monkeypatch.setattr(sys, 'platform', platform)
    monkeypatch.setattr(package.importlib.util, 'find_spec',
                        lambda name: specification)
    assert package.why_not_portable() == reason
