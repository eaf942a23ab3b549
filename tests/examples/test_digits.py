"""The main job, as a user starts it, on few ranks and for few epochs."""
import gzip
import importlib
import json
import os
import pickle
import signal
import struct

import chainer
import numpy
import pytest
from chainer.dataset import concat_examples

from tests.ranks import run_script

from .digits import digits
from .interrupted import interrupted

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
SCRIPT = os.path.join(_ROOT, 'examples', 'digits', 'train_digits.py')


# Measures nothing for a prediction, which takes seconds.
WITHOUT = '--link', '0'


def run(*arguments, ranks=2):
    return run_script(ranks, SCRIPT, *WITHOUT, *arguments, timeout=300)


def arrays(path):
    with numpy.load(path) as archive:
        return {key: archive[key].tobytes() for key in archive.files}


def test_it_compares_communicators_in_a_table_and_a_picture(tmp_path):
    done = run('--epoch', '2', '--warmup', '10', '--root', digits(), '--out',
               tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'PREDICTED' not in done.stdout
    table = done.stdout[done.stdout.index('communicator'):]
    for name in ('float32', 'fp8', 'fp8_paper'):
        assert f'\n{name} ' in table
        assert f'{name}: ' in done.stdout
        assert (tmp_path / name / 'model.npz').exists()
    assert 'total [' in done.stdout             # the progress bar
    assert (tmp_path / 'curves.png').stat().st_size > 10000
    assert (tmp_path / 'fp8' / 'compression.png').stat().st_size > 10000
    runs = {one['name']: one for one in
            json.loads((tmp_path / 'summary.json').read_text())}
    assert runs['fp8']['bytes'] <= 0.26 * runs['float32']['bytes']
    # All start from the same weights with a warm-up in float32.
    assert runs['fp8']['losses'][0] == pytest.approx(
        runs['float32']['losses'][0], rel=0.1)


@pytest.mark.parametrize(('given', 'message'), [
    ('fp9', "no communicator is called 'fp9'"),
    ('fp8:period=x', "period must be of type int, not 'x'")])
def test_a_wrong_communicator_is_said_before_the_first_run(
        given, message, tmp_path):
    done = run('--communicator', 'float32', given, '--out', tmp_path)
    assert done.returncode
    assert done.stderr.count(message) == 1
    assert 'Traceback' not in done.stderr
    assert not [*tmp_path.iterdir()]


def test_updates_are_predicted_for_a_rank_per_host(tmp_path):
    write_mnist(tmp_path, False)
    names = 'float32', 'fp8', 'fp8:algorithm=ring', 'fp8_paper', 'naive'
    done = run('--dataset', 'mnist', '--root', tmp_path, '--out',
               tmp_path / 'out', '--epoch', '1', '--link', '1e-9',
               '--communicator', *names)
    assert done.returncode == 0, done.stderr
    assert 'updates on 2 hosts with 1e-09 Gbit/s' in done.stdout
    # Of 60,554 elements, half to the other host and half back; fp8 saves
    # three quarters of the time where nothing else counts: it takes weeks.
    rows = {line.split()[0]: line.split()[-1]
            for line in done.stdout.splitlines()
            if line.split()[:1] and line.split()[0] in names}
    whole = 1000 * 4 * 60554 / (1 / 8 * 0.95)
    assert float(rows['float32']) == pytest.approx(whole, rel=0.01)
    for name in 'fp8', 'fp8:algorithm=ring':
        assert float(rows[name]) == pytest.approx(whole / 4, rel=0.02)
    assert rows['fp8_paper'] == rows['naive'] == '-'
    assert done.stdout.count('PREDICTED') == 3
    runs = json.loads((tmp_path / 'out' / 'summary.json').read_text())
    assert runs[0]['predicted'] == pytest.approx(whole, rel=0.01)


INTERRUPTED = (*WITHOUT, '--communicator', 'fp8', '--epoch', '2',
               '--warmup', '10')


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
    """The results of a run that nobody has killed."""
    out = tmp_path_factory.mktemp('whole')
    done = run(*INTERRUPTED, '--root', digits(), '--out', out)
    assert done.returncode == 0, done.stderr
    return out


def test_it_learns(uninterrupted):
    (summary,) = json.loads((uninterrupted / 'summary.json').read_text())
    assert summary['best'] > 60         # chance is 10


@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGINT])
def test_killed_and_resumed_it_ends_with_the_same_weights(
        uninterrupted, tmp_path, how):
    options = *INTERRUPTED, '--root', digits()
    # A rank has died, or the launcher, and every other with it.
    assert interrupted(how, 80, SCRIPT, *options,
                       '--out', tmp_path / 'part') != 0
    assert not (tmp_path / 'part' / 'fp8' / 'model.npz').exists()
    done = run(*options, '--out', tmp_path / 'part', '--resume')
    assert done.returncode == 0, done.stderr
    assert 'goes on after iteration' in done.stdout
    assert arrays(tmp_path / 'part' / 'fp8' / 'model.npz') == arrays(
        uninterrupted / 'fp8' / 'model.npz')


def test_resume_without_a_snapshot_starts_afresh(tmp_path):
    write_mnist(tmp_path, False)
    (tmp_path / 'float32').mkdir()      # interrupted before the first
    done = run('--dataset', 'mnist', '--root', tmp_path, '--communicator',
               'float32', '--epoch', '1', '--resume', '--out', tmp_path)
    assert done.returncode == 0, done.stderr


def write_mnist(root, compress):
    generator = numpy.random.default_rng(0)
    for split, count in (('train', 60), ('t10k', 20)):
        images = generator.integers(0, 256, (count, 28, 28), numpy.uint8)
        labels = generator.integers(0, 10, count).astype(numpy.uint8)
        for kind, array in (('images-idx3', images),
                            ('labels-idx1', labels)):
            data = struct.pack('>BBBB', 0, 0, 8, array.ndim)
            data += struct.pack(f'>{array.ndim}i', *array.shape)
            data += array.tobytes()
            path = root / f'{split}-{kind}-ubyte{".gz" * compress}'
            path.write_bytes(gzip.compress(data) if compress else data)


def write_cifar(root, binary):
    generator = numpy.random.default_rng(0)
    folder = root / f'cifar-10-batches-{"bin" if binary else "py"}'
    folder.mkdir()
    for name in [*(f'data_batch_{n}' for n in range(1, 6)), 'test_batch']:
        images = generator.integers(0, 256, (12, 3072), numpy.uint8)
        labels = generator.integers(0, 10, 12).tolist()
        if binary:
            rows = numpy.column_stack([labels, images]).astype(numpy.uint8)
            (folder / f'{name}.bin').write_bytes(rows.tobytes())
        else:
            (folder / name).write_bytes(pickle.dumps(
                {b'data': images, b'labels': labels}))


@pytest.mark.parametrize(('dataset', 'write', 'variant'), [
    ('mnist', write_mnist, False), ('mnist', write_mnist, True),
    ('cifar10', write_cifar, False), ('cifar10', write_cifar, True)])
def test_it_reads_files_in_their_original_formats(
        tmp_path, dataset, write, variant):
    write(tmp_path, variant)
    done = run('--dataset', dataset, '--root', tmp_path, '--epoch', '1',
               '--communicator', 'fp8', '--out', tmp_path / 'out')
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(('dataset', 'expected'), [
    ('mnist', 'train-images-idx3-ubyte'), ('cifar10', 'data_batch_1')])
def test_missing_files_are_named_once(tmp_path, dataset, expected):
    done = run('--dataset', dataset, '--root', tmp_path)
    assert done.returncode != 0
    assert done.stderr.count('FileNotFoundError') == 1
    assert expected in done.stderr
    assert str(tmp_path) in done.stderr


def test_digits_from_a_file_are_those_of_scikit_learn(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(os.path.dirname(SCRIPT))
    data = importlib.import_module('data')
    data.save_digits(tmp_path / 'digits.npz')
    for read, expected in zip(data.load('digits', tmp_path),
                              data.load('digits'), strict=True):
        for one, other in zip(concat_examples(read[:]),
                              concat_examples(expected[:]), strict=True):
            assert one.dtype == other.dtype
            numpy.testing.assert_array_equal(one, other)


def test_without_a_gpu_the_reason_is_given():
    if chainer.backends.cuda.available:
        pytest.skip('CuPy is installed')
    done = run('--device', '@cupy:0')
    assert done.returncode != 0
    assert 'No GPU can be used. CuPy is not installed' in done.stderr


def test_a_second_run_keeps_the_firsts_results(tmp_path):
    write_mnist(tmp_path, False)
    options = ('--dataset', 'mnist', '--root', tmp_path, '--communicator',
               'float32', '--epoch', '1', '--out', tmp_path)
    assert run(*options).returncode == 0
    done = run(*options)
    assert done.returncode == 0, done.stderr
    assert 'float32.1' in done.stdout
    assert arrays(tmp_path / 'float32.1' / 'model.npz') == arrays(
        tmp_path / 'float32' / 'model.npz')


@pytest.mark.parametrize(('dataset', 'write', 'name'), [
    ('mnist', write_mnist, 'train-images-idx3-ubyte.gz'),
    ('cifar10', lambda root, _: write_cifar(root, False),
     'cifar-10-batches-py/data_batch_1')])
def test_a_truncated_file_ends_all_ranks(tmp_path, dataset, write, name):
    write(tmp_path, True)
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:200])
    done = run('--dataset', dataset, '--root', tmp_path)
    assert done.returncode != 0
    assert 'Error' in done.stderr


def test_a_damaged_file_is_named(tmp_path):
    write_mnist(tmp_path, False)
    path = tmp_path / 't10k-labels-idx1-ubyte'
    path.write_bytes(path.read_bytes()[:-3])
    done = run('--dataset', 'mnist', '--root', tmp_path)
    assert done.returncode != 0
    assert f'{path} is damaged' in done.stderr


@pytest.mark.parametrize(('arguments', 'message'), [
    (['--dataset', 'mnist'], '--dataset mnist needs --root DIR'),
    (['--epoch', '0'], '--epoch must be at least 1'),
    (['--link', '-1'], '--link must be a number of Gbit/s, or 0'),
    (['--communicator', 'fp9'], "no communicator is called 'fp9'"),
])
def test_wrong_arguments_are_explained(arguments, message):
    done = run(*arguments)
    assert done.returncode != 0
    assert message in done.stderr


def test_help_is_printed_once():
    done = run('--help')
    assert done.returncode == 0
    assert done.stdout.count('usage:') == 1
    assert '--communicator' in done.stdout
