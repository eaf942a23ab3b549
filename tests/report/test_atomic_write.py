"""A file is there whole, or as it was."""
import contextlib
import os

from chainer_fp8pipe.report.atomic_write import written_whole

import pytest


def test_the_file_is_replaced_at_the_end(tmp_path):
    path = tmp_path / 'record'
    path.write_text('before')
    with written_whole(path) as file:
        file.write('ä')
        file.flush()
        assert path.read_text() == 'before'
    assert path.read_text(encoding='utf-8') == 'ä'
    assert [*tmp_path.iterdir()] == [path]


def test_an_error_leaves_the_file_as_it_was(tmp_path):
    path = tmp_path / 'record'
    path.write_text('before')
    with contextlib.suppress(KeyError), written_whole(path) as file:
        file.write('half')
        raise KeyError
    assert path.read_text() == 'before'
    assert [*tmp_path.iterdir()] == [path]


def test_two_processes_may_write_one_file(tmp_path):
    path = tmp_path / 'record'
    with written_whole(path) as file:
        file.write('parent')
        child = os.fork()
        if not child:
            with written_whole(path) as other:
                other.write('child')
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert path.read_text() == 'child'
    assert path.read_text() == 'parent'
    assert [*tmp_path.iterdir()] == [path]


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError), written_whole(
            tmp_path / 'none' / 'record'):
        pass
