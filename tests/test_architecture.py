"""What the page on the architecture names is there."""
import re
from pathlib import Path

import pytest

from tests.ranks import run_script

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / 'docs/architecture.rst').read_text()


@pytest.mark.parametrize(('modules', 'others'), [
    ('chains.cuts, chainer_fp8pipe.report.svg',
     {'chainer', 'mpi4py', 'matplotlib'}),
    ('launcher.launch_command', {'chainer', 'mpi4py'})])
def test_what_is_said_to_know_nothing_of_others_imports_none(modules, others):
    done = run_script(0, '-c', f'import sys, chainer_fp8pipe.{modules}\n'
                      f'print({others} & set(sys.modules))')
    assert done.stdout == 'set()\n', done.stderr


def test_files_that_the_page_names_are_there():
    named = set(re.findall(r'``([\w/]+\.(?:py|h))``', PAGE))
    homes = ROOT, ROOT / 'chainer_fp8pipe'
    assert not [name for name in named
                if not any((home / name).is_file() for home in homes)]


def test_every_folder_of_the_package_is_on_the_page():
    rooms = [path.parent.name for path in
             (ROOT / 'chainer_fp8pipe').glob('*/__init__.py')]
    assert not [room for room in rooms if f'``{room}``' not in PAGE]
