import logging
import pickle
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

from chainer_fp8pipe.images import decoding, libturbojpeg, resizing
from chainer_fp8pipe.images.decoding import ImageError, create_decoder
from chainer_fp8pipe.images.transforms import Crop, RandomResizedCrop

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.images.pictures import difference, jpeg, photograph, png, reference
from tests.images.turbo import needs_turbo

every_decoder = pytest.mark.parametrize('name', [
    pytest.param('turbojpeg', marks=needs_turbo), 'pillow'])


def _whole(width, height):
    return Crop((0, 0, width, height), (height, width))


def _small():
    return photograph()[:40, :50]


@every_decoder
@settings(max_examples=30)
@given(st.data())
def test_a_part_is_what_cropping_and_resizing_the_whole_gives(name, data):
    number = st.integers(0, 2 ** 32 - 1)
    width, height = data.draw(st.tuples(*[st.integers(1, 120)] * 2))
    plan = RandomResizedCrop((60, 61)).plan(
        width, height, numpy.random.default_rng(data.draw(number)))
    encoded = jpeg(photograph()[100:100 + height, 200:200 + width],
                   subsampling=data.draw(
                       st.sampled_from(['4:4:4', '4:2:2', '4:2:0'])),
                   progressive=data.draw(st.booleans()))
    result = create_decoder(name).decode(encoded, plan)
    # Less than twice as large as needed: decoding does not shrink.
    found = difference(result, reference(encoded, plan))
    assert found.max() <= 2
    assert (found > 1).mean() < 0.001


@every_decoder
@pytest.mark.parametrize('side', [213, 106, 50, 25])
def test_shrinking_while_decoding_changes_little(name, side):
    encoded = jpeg(photograph())
    plan = Crop((7, 1, 426, 425), (side, side), True)
    error = difference(create_decoder(name).decode(encoded, plan),
                       reference(encoded, plan)).mean()
    assert error < 3


def _kinds():
    """Encoded images of 40 rows of 50, and the pixels that they mean."""
    small = _small()
    ink = numpy.broadcast_to(numpy.uint8([200, 100, 50]), (40, 50, 3))
    red = numpy.zeros((40, 50, 3), numpy.uint8)
    red[:4] = 255, 0, 0
    deep = numpy.arange(2000, dtype=numpy.uint16).reshape(40, 50) * 32
    grey = numpy.repeat((small @ numpy.array([.299, .587, .114])).astype(
        numpy.uint8)[..., None], 3, 2)
    clear = numpy.dstack([small, numpy.zeros((40, 50), numpy.uint8)])
    turned = Image.Exif()
    turned[0x0112] = 6      # by 90 degrees: this is left to the user
    return {
        'grey JPEG': (jpeg(small, mode='L'), grey, 3),
        'grey PNG': (png(small, mode='L'), grey, 1),
        'ink': (jpeg(ink, mode='CMYK'), ink, 1),
        'transparent': (png(clear), small, 0),
        'sixteen bits': (png(deep), numpy.repeat(
            (deep >> 8).astype(numpy.uint8)[..., None], 3, 2), 0),
        'palette': (png(red, mode='P'), red, 0),
        'turned': (jpeg(small, exif=turned, quality=100,
                        subsampling='4:4:4'), small, 1),
    }


@every_decoder
@pytest.mark.parametrize('kind', list(_kinds()))
def test_every_kind_of_image_becomes_eight_bits_of_three_colours(name, kind):
    encoded, pixels, limit = _kinds()[kind]
    decoder = create_decoder(name)
    assert decoder.size(encoded) == (50, 40)
    result = decoder.decode(encoded, _whole(50, 40))
    assert difference(result, pixels).mean() <= limit


@every_decoder
def test_ink_can_be_shrunk(name):
    ink = numpy.broadcast_to(numpy.uint8([200, 100, 50]), (40, 50, 3))
    result = create_decoder(name).decode(jpeg(ink, mode='CMYK'),
                                         Crop((0, 0, 50, 40), (10, 12)))
    assert difference(result, ink[:10, :12]).max() < 5


@every_decoder
@pytest.mark.parametrize('data', [
    b'', b'no image', bytes(5000), b'\xff\xd8\xff',
    jpeg(photograph()[:40, :50])[:-100], png(photograph()[:40, :50])[:-100],
], ids=['empty', 'text', 'zeros', 'start', 'cut JPEG', 'cut PNG'])
def test_a_bad_file_is_an_image_error(name, data):
    with pytest.raises(ImageError):
        create_decoder(name).decode(data, _whole(50, 40))


@every_decoder
@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_gives_an_image_or_an_image_error(name, data):
    encoded = bytearray(jpeg(
        photograph()[100:148, 100:164],
        progressive=data.draw(st.booleans())))
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(2, len(encoded) - 1))
        encoded[place] = data.draw(st.integers(0, 255))
    decoder = create_decoder(name, max_pixels=10 ** 5)
    try:
        width, height = decoder.size(bytes(encoded))
        plan = Crop((width // 2, height // 2, width - width // 2,
                     height - height // 2), (20, 20))
        assert decoder.decode(bytes(encoded), plan).shape == (20, 20, 3)
    except ImageError:
        pass


@every_decoder
def test_the_limit_on_pixels_can_be_set(name):
    encoded = jpeg(_small())
    assert create_decoder(name, max_pixels=2000).size(encoded) == (50, 40)
    decoder = create_decoder(name, max_pixels=1999)
    for act in (lambda: decoder.size(encoded),
                lambda: decoder.decode(encoded, _whole(50, 40))):
        with pytest.raises(ImageError, match='50 x 40.*max_pixels=1,999'):
            act()


@every_decoder
def test_a_part_outside_the_image_is_an_error(name):
    with pytest.raises(ValueError, match='not inside an image of 50 x 40'):
        create_decoder(name).decode(jpeg(_small()), _whole(51, 40))


@every_decoder
def test_threads_share_a_decoder(name):
    encoded = jpeg(photograph())
    decoder, rng = create_decoder(name), numpy.random.default_rng(0)
    plans = [RandomResizedCrop(64).plan(640, 427, rng) for _ in range(60)]
    expected = [decoder.decode(encoded, plan) for plan in plans]
    barrier = threading.Barrier(4)

    def work(_):
        barrier.wait()
        return [decoder.decode(encoded, plan) for plan in plans]
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(work, range(4)):
            numpy.testing.assert_array_equal(found, expected)


@every_decoder
def test_a_decoder_can_be_sent_to_another_process(name):
    decoder = pickle.loads(pickle.dumps(create_decoder(name, 1999)))
    assert decoder.name == name
    with pytest.raises(ImageError):
        decoder.size(jpeg(_small()))


def test_an_unknown_decoder_is_an_error_that_names_the_others():
    with pytest.raises(ValueError, match="'fast'.*auto.*pillow"):
        create_decoder('fast')


@needs_turbo
def test_the_fast_library_is_used_and_decodes_the_part_alone(monkeypatch):
    asked = []
    decompress = libturbojpeg.Decompressor.decode

    def decode(self, data, *what):
        asked.append(what)
        return decompress(self, data, *what)
    monkeypatch.setattr(libturbojpeg.Decompressor, 'decode', decode)
    box = (200, 100, 120, 130)
    create_decoder().decode(jpeg(photograph()), Crop(box, (60, 60)))
    assert asked == [(640, 427, box, 2)]


@pytest.fixture
def without_libraries(monkeypatch):
    monkeypatch.setattr(libturbojpeg, 'library', lambda: None)
    monkeypatch.setattr(resizing, 'FAST', False)
    monkeypatch.setattr(decoding, '_told', threading.Event())


@pytest.mark.usefixtures('without_libraries')
def test_missing_libraries_are_replaced_by_pillow_and_logged_once(
        caplog):
    create_decoder('pillow')        # nothing to log: it was named
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        names = [create_decoder().name for _ in range(3)]
    assert names == ['pillow'] * 3
    assert len(caplog.messages) == 1
    for word in ('libturbojpeg 3', 'cykooz-resizer', 'Pillow',
                 'chainer_fp8pipe[images]'):
        assert word in caplog.text
    with pytest.raises(RuntimeError, match=r'chainer_fp8pipe\[images\]'):
        create_decoder('turbojpeg')


def test_without_pillow_the_remedy_is_named():
    found = subprocess.run(
        [sys.executable, '-c',
         'import sys\n'
         'sys.modules["PIL"] = None\n'
         'from chainer_fp8pipe.images import create_decoder\n'
         'create_decoder()'],
        capture_output=True, text=True)
    assert "pip install 'chainer_fp8pipe[images]'" in found.stderr
