"""A file is read as it was written, or refused."""
import os
import zipfile

from chainer_fp8pipe.training.snapshots.file import (
    DamagedSnapshot,
    manifest_of,
    read,
    write,
)

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

VALUES = {
    'updater/model:main/l/W': numpy.random.RandomState(0).rand(
        3, 4).astype('f'),
    'empty': numpy.zeros((0, 3), 'f'),
    'iteration': numpy.array(7),
    'text': numpy.array('é\0x'),
    'bytes': numpy.array([b'a', b'bcd']),
    'flags': numpy.array([True, False]),
    'day': numpy.array('2026-11-25', 'M8[D]'),
    'columns': numpy.arange(6.0).reshape(2, 3).T,
    'json': numpy.frombuffer(b'{"lr": 0.1}', 'V1'),
}
IDENTITY = '0123456789abcdef'


def write_to(folder):
    write(str(folder), VALUES, 1, 2, IDENTITY)
    return folder / 'rank1of2.npz'


def is_right(path):
    """Whether a file has the right values; or it is refused."""
    try:
        manifest = manifest_of(str(path))
        found = read(manifest, manifest.is_none)
    except DamagedSnapshot:
        return False
    assert found.keys() == VALUES.keys()
    for name, value in VALUES.items():
        assert (found[name].dtype, found[name].shape, found[name].tobytes(
            )) == (value.dtype, value.shape, value.tobytes()), name
    return True


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    path = write_to(tmp_path_factory.mktemp('whole') / 'x.ranks')
    return path, path.read_bytes()


@pytest.fixture
def path(whole):
    path, content = whole
    path.write_bytes(content)
    return path


def test_a_file_is_read_as_it_was_written_by_numpy_too(path):
    assert is_right(path)
    assert manifest_of(str(path))[:4] == (str(path), 1, 2, IDENTITY)
    with numpy.load(path) as archive:
        for name, value in VALUES.items():
            assert archive[name].dtype == value.dtype
            assert archive[name].tolist() == value.tolist()


def fails(*_):
    raise OSError(28, 'No space left on device')


@pytest.mark.parametrize(('place', 'name'), [
    (zipfile._ZipWriteFile, 'write'), (os, 'fsync'), (os, 'replace')])
def test_what_fails_leaves_the_older_file_and_nothing_else(
        path, place, name, monkeypatch):
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(place, name, fails)
        with pytest.raises(OSError, match='No space left'):
            write_to(path.parent)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
    assert list(path.parent.parent.iterdir()) == [path.parent]


# --- damage ------------------------------------------------------------------

@given(st.data())
def test_missing_doubled_and_overwritten_bytes_are_no_wrong_values(
        whole, data):
    path, content = whole
    start, stop = sorted(data.draw(st.tuples(*[st.integers(
        0, len(content))] * 2)))
    path.write_bytes(content[:start] + data.draw(st.sampled_from([
        b'', bytes(stop - start), content[:stop - start],
        2 * content[start:stop]])) + content[stop:])
    is_right(path)
