import os
import pathlib

from chainer_fp8pipe.images.file_list import find_images, share

import pytest


def touch(root, *names):
    for name in names:
        path = pathlib.Path(root, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_classes_and_files_are_sorted_by_name(tmp_path):
    touch(tmp_path, 'b/2.JPEG', 'b/1.jpg', 'a/z.png', 'a/ä.jpeg', 'c/x.JPG')
    table = find_images(str(tmp_path))
    assert table.classes == ['a', 'b', 'c']
    assert [table.path(index) for index in range(len(table))] == [
        str(tmp_path / name) for name in (
            'a/z.png', 'a/ä.jpeg', 'b/1.jpg', 'b/2.JPEG', 'c/x.JPG')]
    assert table.labels.tolist() == [0, 0, 1, 1, 2]
    assert table.labels.dtype == 'int32'


def test_what_is_no_image_is_left_out(tmp_path):
    touch(tmp_path, 'a/1.jpg', 'a/readme.txt', 'a/.2.jpg', 'a/3.jpg/4.jpg',
          '.hidden/5.jpg', '6.jpg')
    table = find_images(str(tmp_path))
    assert table.classes == ['a']
    assert [table.path(index) for index in range(len(table))] == [
        str(tmp_path / 'a/1.jpg')]


def test_a_name_that_is_no_text_is_found(tmp_path):
    (tmp_path / 'a').mkdir()
    path = os.path.join(os.fsencode(tmp_path), b'a', b'\xff.jpg')
    with open(path, 'wb'):
        pass
    assert os.fsencode(find_images(str(tmp_path)).path(0)) == path


def test_a_child_sees_the_same_table(tmp_path):
    touch(tmp_path, *(f'{name}/{number}.jpg' for name in 'ab'
                      for number in range(0, 200, 7)))
    table = find_images(str(tmp_path))
    segment, handle = share(table)
    # A child has a descriptor of its own.
    seen = handle._replace(fd=os.dup(handle.fd)).open()
    segment.close()
    assert len(seen) == len(table)
    assert [seen.path(index) for index in range(len(seen))] == [
        table.path(index) for index in range(len(table))]
    assert seen.labels.tolist() == table.labels.tolist()


@pytest.mark.parametrize(('names', 'message'), [
    ((), 'has no folders in it'),
    (('1.jpg',), 'has no folders in it'),
    (('a/1.jpg', 'b/readme.txt'), "no images .* in 'b' of"),
    (('a/1.jpg', *(f'b{number}/x' for number in range(7))), 'and 2 more of'),
])
def test_a_folder_without_images_is_an_error_that_names_it(
        tmp_path, names, message):
    touch(tmp_path, *names)
    with pytest.raises(ValueError, match=message) as caught:
        find_images(str(tmp_path))
    assert repr(str(tmp_path)) in str(caught.value)


def test_a_missing_folder_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="nowhere' is not a folder"):
        find_images(str(tmp_path / 'nowhere'))
