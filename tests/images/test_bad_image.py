import pickle

from chainer_fp8pipe.images.decoding import ImageError


def test_the_message_names_the_file_and_the_reason():
    assert str(ImageError('a/b.JPEG', 'is empty')) == 'a/b.JPEG: is empty'
    assert str(ImageError('', 'is empty')) == 'is empty'


def test_an_image_error_can_be_pickled():
    error = pickle.loads(pickle.dumps(ImageError('a', 'b')))
    assert (error.path, error.reason) == ('a', 'b')
