"""The main job, as a user starts it, on few ranks and for few epochs."""
import json
import shutil
import signal

import numpy
import pytest
from chainer.dataset import concat_examples

from tests.ranks import run_script

from .runs import (
    EXAMPLES,
    arrays,
    check_refusals,
    interrupted,
    module,
    write_cifar,
    write_mnist,
)

SCRIPT = EXAMPLES / 'digits' / 'train_digits.py'
SHORT = '--epoch', '2', '--warmup', '10'
data = module('digits', 'data')


def run(*arguments, ranks=2):
    done = run_script(ranks, SCRIPT, *arguments, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    """What a run prints, and its results."""
    out = tmp_path_factory.mktemp('whole')
    return run(*SHORT, '--out', out), out


def test_it_compares_communicators_in_a_table_and_a_picture(whole):
    printed, out = whole
    table = printed[printed.index('communicator'):]
    for name in ('float32', 'fp8', 'fp8_paper'):
        assert f'\n{name} ' in table
        assert f'{name} on 2 ranks, a point per epoch ..' in printed
        assert (out / name / 'model.npz').exists()
    assert not set(printed) & set('\r\x1b')
    assert (out / 'curves.png').stat().st_size > 10000
    assert (out / 'fp8' / 'compression.json').exists()
    runs = {one['name']: one for one in
            json.loads((out / 'summary.json').read_text())}
    assert runs['fp8']['best'] > 60         # chance is 10
    assert runs['fp8']['bytes'] <= 0.26 * runs['float32']['bytes']
    # All start from the same weights with a warm-up in float32.
    assert runs['fp8']['losses'][0] == pytest.approx(
        runs['float32']['losses'][0], rel=0.1)


def test_interrupted_and_resumed_it_ends_with_the_same_weights(
        whole, tmp_path):
    options = (*SHORT, '--communicator', 'fp8', '--no-report', '--out',
               tmp_path)
    assert interrupted(signal.SIGINT, 80, SCRIPT, *options) != 0
    assert not (tmp_path / 'fp8' / 'model.npz').exists()
    # 80 updates into 150: of two epochs, the first is through.
    assert 'goes on after iteration 75 .' in run(*options, '--resume')
    assert arrays(tmp_path / 'fp8' / 'model.npz') == arrays(
        whole[1] / 'fp8' / 'model.npz')


@pytest.mark.slow
def test_a_second_run_keeps_the_first_ones_results(whole, tmp_path):
    out = shutil.copytree(whole[1], tmp_path / 'out')
    assert 'fp8.1' in run(*SHORT, '--communicator', 'fp8', '--out', out)
    for name in 'fp8', 'fp8.1':
        assert arrays(out / name / 'model.npz') == arrays(
            whole[1] / 'fp8' / 'model.npz')



# --- data sets ---------------------------------------------------------------

@pytest.mark.parametrize(('dataset', 'write', 'shape', 'count'), [
    ('mnist', write_mnist, (1, 28, 28), 60),
    ('cifar10', write_cifar, (3, 32, 32), 60)])
@pytest.mark.parametrize('variant', [False, True])
def test_it_reads_files_in_their_original_formats(
        tmp_path, dataset, write, shape, count, variant):
    write(tmp_path, variant)
    train, _ = data.load(dataset, tmp_path)
    images, labels = concat_examples(train[:])
    assert images.shape == (count, *shape)
    assert images.dtype == numpy.float32
    assert 0.9 < images.max() <= 1
    assert set(labels) <= set(range(10))


@pytest.mark.parametrize(('dataset', 'write', 'variant', 'name', 'keep'), [
    ('mnist', write_mnist, True, 'train-images-idx3-ubyte.gz', 200),
    ('mnist', write_mnist, False, 't10k-labels-idx1-ubyte', -3),
    ('cifar10', write_cifar, False, 'cifar-10-batches-py/data_batch_1', 200),
    ('mnist', None, False, 'train-images-idx3-ubyte', 0),
    ('cifar10', None, False, 'data_batch_1', 0)])
def test_a_damaged_or_missing_file_is_named(
        tmp_path, dataset, write, variant, name, keep):
    if write:
        write(tmp_path, variant)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:keep])
    with pytest.raises((OSError, ValueError)) as error:
        data.load(dataset, tmp_path)
    assert str(tmp_path) in str(error.value)
    assert name.rpartition('/')[2] in str(error.value)


# --- bad input ---------------------------------------------------------------

def test_what_is_wrong_is_explained_once_and_ends_all_ranks(tmp_path):
    check_refusals(SCRIPT, [
        (['--communicator', 'float32', 'fp9'],
         "no communicator is called 'fp9'"),
        (['--communicator', 'fp8:period=x'],
         "period must be of type int, not 'x'"),
        (['--dataset', 'mnist'], '--dataset mnist needs --root DIR'),
        (['--root', '.'], '--root is for --dataset mnist and cifar10'),
        (['--epoch', '0'], '--epoch must be at least 1'),
    ], tmp_path / 'out')
