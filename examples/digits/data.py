"""Digits from beside this file, and MNIST and CIFAR-10 from local files.

The 1,797 digits are those of scikit-learn, a third of them for the test:
E. Alpaydin, C. Kaynak: Optical Recognition of Handwritten Digits, UCI Machine
Learning Repository (1998), CC BY 4.0.
"""
import contextlib
import gzip
import os
import pickle

import numpy
from chainer.datasets import TupleDataset

_MNIST = {'train': 'train', 'test': 't10k'}
_MNIST_FILES = [f'{name}-{kind}-ubyte' for name in _MNIST.values()
                for kind in ('images-idx3', 'labels-idx1')]
_CIFAR_TRAIN = [f'data_batch_{number}' for number in range(1, 6)]


def load(name, root=None):
    """Training and test set of ``'digits'``, ``'mnist'`` or ``'cifar10'``.

    Returns two data sets of pairs: image, float32 (channels, height, width)
    between 0 and 1, and label, int32.

    Raises FileNotFoundError, naming the expected files, if they are not in
    ``root``, and ValueError if they are not what they should be.
    """
    train, test = {'digits': _digits, 'mnist': _mnist,
                   'cifar10': _cifar10}[name](root)
    return _dataset(*train), _dataset(*test)


def _dataset(images, labels):
    return TupleDataset(numpy.asarray(images, numpy.float32),
                        numpy.asarray(labels, numpy.int32))


def _digits(root):
    with numpy.load(os.path.join(os.path.dirname(__file__), 'digits.npz')
                    ) as file:
        return [(file[part] / 16, file[f'{part}_labels'])
                for part in ('train', 'test')]


def _mnist(root):
    def read(kind, split):
        path = _find(root, f'{_MNIST[split]}-{kind}-ubyte', _MNIST_FILES,
                     'the four files of MNIST (with or without .gz)')
        opener = gzip.open if path.endswith('.gz') else open
        with _naming(path), opener(path, 'rb') as file:
            data = file.read()
        dimensions = data[3] if len(data) > 3 else 0
        shape = tuple(numpy.frombuffer(data, '>i4', dimensions, 4))
        body = data[4 + 4 * dimensions:]
        if data[:3] != b'\0\0\x08' or len(body) != numpy.prod(shape):
            raise ValueError(f'{path} is damaged or no MNIST file')
        return numpy.frombuffer(body, numpy.uint8).reshape(shape)
    return [(read('images-idx3', split)[:, None] / numpy.float32(255),
             read('labels-idx1', split)) for split in _MNIST]


def _cifar10(root):
    def read(name):
        path = _find(root, name, [*_CIFAR_TRAIN, 'test_batch'],
                     'the six batches of CIFAR-10 (python or binary '
                     'version, in DIR or in its cifar-10-batches-* folder)')
        with _naming(path), open(path, 'rb') as file:
            if path.endswith('.bin'):
                rows = numpy.frombuffer(file.read(), numpy.uint8)
                rows = rows.reshape(-1, 3073)
                return rows[:, 1:], rows[:, 0]
            batch = pickle.load(file, encoding='bytes')
            return batch[b'data'], batch[b'labels']

    def join(batches):
        images, labels = zip(*batches, strict=True)
        images = numpy.concatenate(images).reshape(-1, 3, 32, 32)
        return images / numpy.float32(255), numpy.concatenate(labels)
    return (join([read(name) for name in _CIFAR_TRAIN]),
            join([read('test_batch')]))


@contextlib.contextmanager
def _naming(path):
    """What goes wrong in reading a file says which one it is."""
    try:
        yield
    except (EOFError, KeyError, OSError, ValueError,
            pickle.UnpicklingError) as error:
        raise ValueError(f'{path} is damaged: {error}') from error


def _find(root, name, expected, what):
    folders = [root, *(os.path.join(root, f'cifar-10-batches-{kind}')
                       for kind in ('py', 'bin'))]
    for folder in folders:
        for ending in ('', '.gz', '.bin'):
            path = os.path.join(folder, name + ending)
            if os.path.isfile(path):
                return path
    raise FileNotFoundError(f'{name} is not in {root}; expected there: {what},'
                            f' {", ".join(expected)}')
