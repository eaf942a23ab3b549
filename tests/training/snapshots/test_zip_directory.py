import io
import random
import zipfile

from chainer_fp8pipe.training.snapshots import zip_directory
from chainer_fp8pipe.training.snapshots.zip_directory import (
    Member,
    read_directory,
)

import pytest

from .damage import Part, overlap, put_together, said_wrong, zip64


def archive(*names, **options):
    file = io.BytesIO()
    with zipfile.ZipFile(file, 'w', **options) as written:
        for name in names:
            with written.open(name, 'w', force_zip64=True) as member:
                member.write(name.encode())
    return file


def test_members_are_where_zipfile_finds_them():
    file = archive('a.npy', 'b/ü.npy', 'c.npy')
    found = read_directory(file)
    assert [member.name for member in found] == ['a', 'b/ü', 'c']
    for member in found:
        name = f'{member.name}.npy'
        file.seek(member.start)
        assert file.read(member.size) == name.encode()
        assert member.crc == zipfile.ZipFile(file).getinfo(name).CRC


@pytest.mark.parametrize('names', [0, 1, 65534, 65535, 65536])
def test_any_number_of_members_is_read(names):
    """From 65,535 on the number stands in another place."""
    file = archive(*(f'{number}.npy' for number in range(names)))
    assert len(read_directory(file)) == names


def test_files_beyond_32_bits_are_read(monkeypatch):
    """As zipfile writes them; its limit is lowered in place of 4 GB."""
    monkeypatch.setattr(zipfile, 'ZIP64_LIMIT', 10)
    file = archive('long-name-a.npy', 'long-name-b.npy')
    found = read_directory(file)
    assert [member.name for member in found] == ['long-name-a', 'long-name-b']
    assert file.getvalue().count(b'PK\6\6') == 1


def parts():
    return [Part(f'{name}.npy', name.encode() * 9) for name in 'abc']


def test_a_file_by_hand_is_read():
    assert read_directory(io.BytesIO(put_together(parts()))) == [
        Member(name, 30 + 5 + place * 44, 9, part.said('local', 0)['crc'])
        for place, (name, part) in enumerate(zip('abc', parts(),
                                                 strict=True))]


@pytest.mark.parametrize(('end', 'match'), [
    ({'count': 2}, 'more than its entries'), ({'count': 4}, 'end does not'),
    ({'before': b'x'}, 'end does not'), ({'gap': b'x'}, 'end does not'),
    ({'gap': b'x', 'start': 133}, 'does not follow its members'),
    ({'comment': b'x'}, 'end is missing'), ({'size': 9}, 'end does not')])
def test_an_end_that_does_not_agree_is_damage(end, match):
    with pytest.raises(ValueError, match=match):
        read_directory(io.BytesIO(put_together(parts(), **end)))


@pytest.mark.parametrize('kind', [overlap, said_wrong, zip64])
@pytest.mark.parametrize('seed', range(30))
def test_a_member_that_does_not_agree_is_damage(kind, seed):
    """Or it says what is true."""
    damaged = parts()
    kind(damaged, random.Random(seed))
    data = put_together(damaged)
    try:
        found = read_directory(io.BytesIO(data))
    except ValueError:
        return
    assert [data[member.start:member.start + member.size]
            for member in found] == [part.data for part in parts()]


def test_two_members_of_one_name_are_damage():
    with pytest.raises(ValueError, match='the same name'):
        read_directory(io.BytesIO(put_together(parts()[:1] * 2)))


@pytest.mark.parametrize('method', [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2])
def test_nothing_is_unpacked(method):
    file = archive('a.npy', compression=method)
    with pytest.raises(ValueError, match='compressed or encrypted'):
        read_directory(file)


def test_what_is_read_of_a_directory_is_in_the_file(monkeypatch):
    asked, original = [], zip_directory._bytes_at

    def read(file, start, size):
        asked.append(size)
        return original(file, start, size)
    monkeypatch.setattr(zip_directory, '_bytes_at', read)
    data = put_together(parts(), size=0xfffffff0)
    with pytest.raises(ValueError, match='end does not'):
        read_directory(io.BytesIO(data))
    assert max(asked) < len(data)
