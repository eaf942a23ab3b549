"""What the page on the architecture names is there."""
import importlib
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PICTURES = json.loads((ROOT / 'docs/architecture/ways.json').read_text())
BOXES = [box for picture in PICTURES for box in picture['boxes']]


@pytest.mark.parametrize('box', BOXES, ids=lambda box: box.get(
    'name', box.get('file')))
def test_a_box_names_something_of_the_package(box):
    if 'file' in box:
        assert (ROOT / 'chainer_fp8pipe' / box['file']).is_file()
        return
    found = importlib.import_module(f'chainer_fp8pipe.{box["in"]}')
    for name in box['name'].split('.'):
        found = getattr(found, name)


@pytest.mark.parametrize('picture', PICTURES,
                         ids=lambda picture: picture['picture'])
def test_the_page_shows_every_picture(picture):
    assert (ROOT / 'docs/architecture' / picture['picture']).is_file()
    page = (ROOT / 'docs/architecture.rst').read_text()
    assert f'architecture/{picture["picture"]}' in page


def test_files_that_the_page_names_are_there():
    page = (ROOT / 'docs/architecture.rst').read_text()
    named = set(re.findall(r'``([\w/]+\.(?:py|h))``', page))
    assert len(named) > 10
    homes = ROOT, ROOT / 'chainer_fp8pipe'
    assert not [name for name in named
                if not any((home / name).is_file() for home in homes)]


def test_every_folder_of_the_package_is_on_the_page():
    page = (ROOT / 'docs/architecture.rst').read_text()
    rooms = [path.parent.name for path in
             (ROOT / 'chainer_fp8pipe').glob('*/__init__.py')]
    assert len(rooms) > 10
    assert not [room for room in rooms if f'``{room}``' not in page]


def test_no_file_and_no_public_class_has_the_name_of_another():
    files, classes = [], []
    for path in (ROOT / 'chainer_fp8pipe').rglob('*.py'):
        if path.name != '__init__.py':
            files.append(path.name)
        classes += re.findall(r'^class ([A-Z]\w*)', path.read_text(), re.M)
    assert len(files) == len(set(files))
    assert len(classes) == len(set(classes))


def test_no_folder_has_more_than_fifteen_files_beside_each_other():
    for folder in (ROOT / 'chainer_fp8pipe').rglob('__init__.py'):
        beside = [path for path in folder.parent.iterdir()
                  if path.suffix in ('.py', '.pyi', '.c', '.h')
                  and path.name != '__init__.py']
        assert len(beside) <= 15, folder.parent
