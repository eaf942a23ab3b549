import struct

from chainer_fp8pipe.images.decoding import ImageError, read_header

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.images.pictures import jpeg, photograph, png

_LIMIT = 10 ** 6


def _small():
    return photograph()[:40, :50]


def test_headers_give_size_format_frame_depth_and_components():
    for options, frame, components in [
            ({}, 0xC0, 3), ({'progressive': True}, 0xC2, 3),
            ({'mode': 'L'}, 0xC0, 1), ({'mode': 'CMYK'}, 0xC0, 4)]:
        header = read_header(jpeg(_small(), **options), _LIMIT)
        assert header == (50, 40, 'JPEG', frame, 8, components)
    assert read_header(png(_small()), _LIMIT)[:3] == (50, 40, 'PNG')
    data = jpeg(_small())
    for odd in data + bytes(100), data[:2] + b'\xff\xff\xff' + data[2:]:
        assert read_header(odd, _LIMIT)[:2] == (50, 40)


def test_a_thumbnail_in_front_is_not_taken_for_the_image():
    thumbnail = jpeg(photograph()[:8, :16])
    exif = b'Exif\0\0' + thumbnail
    segment = b'\xff\xe1' + struct.pack('>H', len(exif) + 2) + exif
    data = jpeg(_small())
    data = data[:2] + segment + data[2:]
    assert read_header(data, _LIMIT)[:2] == (50, 40)
    # Nor is the thumbnail's end taken for the image's.
    with pytest.raises(ImageError, match='cut short'):
        read_header(data[:-20], _LIMIT)


@pytest.mark.parametrize(('data', 'reason'), [
    (b'', 'the file is empty'),
    (bytes(1000), 'neither JPEG nor PNG'),
    (b'GIF89a' + bytes(100), 'neither JPEG nor PNG.*GIF89a'),
    (b'\xff\xd8', 'cut short in its header'),
    (b'\xff\xd8\xff\xd9', 'a JPEG without an image'),
    (b'\x89PNG\r\n\x1a\n', 'cut short in its header'),
])
def test_a_file_that_is_no_image_is_an_error_with_its_fault(data, reason):
    with pytest.raises(ImageError, match=reason):
        read_header(data, _LIMIT)


@given(st.data())
def test_a_jpeg_that_is_cut_anywhere_is_an_error(data):
    whole = jpeg(_small(), progressive=data.draw(st.booleans()))
    length = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises(ImageError):
        read_header(whole[:length], _LIMIT)


@given(st.binary(max_size=300))
def test_any_bytes_are_an_image_or_an_image_error(data):
    for start in (b'', b'\xff\xd8', b'\x89PNG\r\n\x1a\n'):
        try:
            width, height = read_header(start + data, _LIMIT)[:2]
        except ImageError:
            continue
        assert 0 < width * height <= _LIMIT


@pytest.mark.parametrize(('height', 'width', 'message'), [
    (65000, 64000, '64000 x 65000 pixels.*max_pixels=1,000,000.*smaller'),
    (0, 50, 'no pixels.*50 x 0'),
])
def test_an_image_of_an_impossible_size_names_it(height, width, message):
    data = bytearray(jpeg(_small()))
    frame = data.index(b'\xff\xc0')
    data[frame + 5:frame + 9] = struct.pack('>HH', height, width)
    with pytest.raises(ImageError, match=message):
        read_header(bytes(data), _LIMIT)
