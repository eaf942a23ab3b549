"""The ImageNet example, as a user starts it, on a very small set."""
import json
import re
import shutil
from types import SimpleNamespace

from chainer_fp8pipe import CenterCrop, ImageFolder

import chainer
import numpy
import pytest

from tests.ranks import on_ranks, run_script

from .runs import EXAMPLES, arrays, check_refusals
from .test_imagenet_models import NETWORKS, module

SCRIPT = EXAMPLES / 'imagenet' / 'train_imagenet.py'
SMALL = ('--arch', 'small', '--insize', '16', '--batchsize', '6', '--epoch',
         '3', '--workers', '1', '--prefetch', '2')


def run(*arguments, ranks=2):
    return run_script(ranks, SCRIPT, *arguments, timeout=300)


def trained(root, out, *arguments, ranks=2):
    """Runs the example; returns what it prints."""
    done = run(root, *SMALL, *arguments, '--out', out, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done


def log(out):
    return json.loads((out / 'log').read_text())


@pytest.fixture(scope='module')
def root(tmp_path_factory):
    """38 training and 22 validation images of 6 classes."""
    root = tmp_path_factory.mktemp('images') / 'set'
    done = run_script(
        0, SCRIPT.with_name('make_images.py'), root, '--train', '38', '--val',
        '22', '--classes', '6', '--scale', '0.1')
    assert done.returncode == 0, done.stderr
    assert '38 training images and 22 validation images' in done.stdout
    return root


@pytest.fixture(scope='module')
def spoilt(root, tmp_path_factory):
    """The same with one training image that is none."""
    copy = tmp_path_factory.mktemp('images') / 'spoilt'
    shutil.copytree(root, copy)
    next((copy / 'train' / 'china_1').iterdir()).write_bytes(b'no image')
    return copy


# --- one run, looked at from all sides ---------------------------------------

WHOLE = ('--communicator', 'fp8:overlap=true,warmup=5', '--group-bn', '2',
         '--mixed-precision', '--snapshot', '3', '--log', '3')


@pytest.fixture(scope='module')
def whole(spoilt, tmp_path_factory):
    """3 epochs of 4 updates; what is printed, and where the results are."""
    out = tmp_path_factory.mktemp('whole') / 'out'
    return trained(spoilt, out, *WHOLE), out


def test_it_says_once_what_it_does(whole):
    printed = whole[0].stdout
    for text in ('small: 24,086 parameters, images of 16 x 16',
                 'ranks: 2, with 6 images each in 4 updates per epoch',
                 'gradients: fp8:overlap=true,warmup=5',
                 'batch normalisation: over 2 ranks', 'val/top5'):
        assert printed.count(text) == 1
    assert 'total [' in printed             # the progress bar


def test_it_ends_with_accuracies_and_names_its_files(whole):
    done, out = whole
    last = log(out)[-1]
    end = done.stdout[done.stdout.index('\nvalidation'):]
    assert f'top 1: {100 * last["val/top1"]:.2f} %' in end
    assert f'top 5: {100 * last["val/top5"]:.2f} %' in end
    for name in 'model.npz', 'curves.png', 'log':
        assert end.count(str(out / name)) == 1
    assert (out / 'curves.png').stat().st_size > 10000


def test_the_log_has_all_columns_at_the_interval_and_after_each_epoch(whole):
    entries = log(whole[1])
    assert [entry['iteration'] for entry in entries] == [3, 4, 6, 8, 9, 12]
    for entry in entries:
        assert {'main/loss', 'main/top1', 'lr', 'loss_scale', 'images/s',
                'input_s', 'skipped', 'comm/bytes', 'epoch_detail',
                'elapsed_time'} <= set(entry)
        assert ('val/top1' in entry) == (entry['iteration'] % 4 == 0)
        assert entry['images/s'] > 0
        assert 0 < entry['input_s'] < entry['elapsed_time']
    # Of 4 updates each; and the first only broadcasts.
    assert entries[0]['loss_scale'] == 2 ** 2
    assert entries[-1]['epoch_detail'] == 3


def test_an_image_that_cannot_be_used_is_counted_and_named(whole, spoilt):
    done, out = whole
    counts = [entry['skipped'] for entry in log(out)]
    assert sum(counts[:2]) == 1
    assert sum(counts[2:4]) == 1
    assert sum(counts) == 3
    assert 'no image' not in done.stdout
    name = str(spoilt / 'train' / 'china_1')
    # Once by each rank that it comes to.
    assert 1 <= done.stderr.count(f'skipped {name}') <= 2


def test_the_accuracies_are_those_of_the_saved_weights_on_all_images(
        whole, root):
    _, out = whole
    folder = ImageFolder(root / 'val', CenterCrop(16, normalise=None))
    with chainer.using_config('dtype', chainer.mixed16):
        network = NETWORKS['small'](6, 16)
        chainer.serializers.load_npz(out / 'model.npz', network)
        model = module('classifier').Classifier(network, 0)
        assert network.conv0.W.dtype == numpy.float16
        with chainer.using_config('train', False):
            loss, *hits = model.score(*chainer.dataset.concat_examples(
                [folder[number] for number in range(22)]))
    last = log(out)[-1]
    assert [22 * last['val/top1'], 22 * last['val/top5']] == pytest.approx(
        hits)
    assert last['val/loss'] == pytest.approx(loss / 22, rel=1e-3)


@pytest.mark.slow
def test_resumed_in_mid_epoch_it_ends_with_the_same_bits(
        whole, spoilt, tmp_path):
    """Neither workers nor cache are part of the state."""
    out = shutil.copytree(whole[1], tmp_path / 'out')
    shutil.rmtree(out / 'snapshot_iter_12.ranks')
    (out / 'model.npz').unlink()
    done = trained(spoilt, out, *WHOLE, '--resume', '--workers', '2',
                   '--cache', 'none')
    assert 'goes on after iteration 9' in done.stdout
    assert arrays(out / 'model.npz') == arrays(whole[1] / 'model.npz')
    for name in 'iteration', 'val/loss', 'val/top1', 'skipped', 'lr':
        assert [entry.get(name) for entry in log(out)] == [
            entry.get(name) for entry in log(whole[1])]


# --- other ways --------------------------------------------------------------

@pytest.mark.slow
@pytest.mark.parametrize(('ranks', 'arguments'), [
    (2, ('--communicator', 'torus2d:shape=1x2', '--bn-tile', '1x2',
         '--cache-bytes', '200k')),
    (3, ('--communicator', 'float16:algorithm=aggregator', '--base-batch',
         '4', '--prefetch', '0', '--average', '0')),
])
def test_it_trains_in_other_ways(root, tmp_path, ranks, arguments):
    done = trained(root, tmp_path, '--epoch', '1', *arguments, ranks=ranks)
    assert done.stdout.count('ranks: 2,') == 1
    assert numpy.isfinite(log(tmp_path)[-1]['val/loss'])
    # Both ranks were evaluated with the mean of their running statistics,
    # or one group has had the same all the time.
    found = []
    for path in (tmp_path / 'snapshot_iter_4.ranks').iterdir():
        with numpy.load(path) as archive:
            found.append({key: archive[key].tobytes() for key in archive.files
                          if key.endswith('/avg_mean')})
    assert found[0]
    assert found == found[:1] * ranks


@on_ranks(1, 2)
def test_running_statistics_become_the_mean_of_the_ranks(comm):
    model = NETWORKS['small'](2, 8)
    for number in range(3):
        link = model[f'bn{number}']
        link.avg_mean[...] = numpy.arange(link.avg_mean.size) + comm.rank
        link.avg_var[...] = number + 10 * comm.rank
    module('evaluation').share_statistics(
        model, SimpleNamespace(mpi_comm=comm, size=comm.size))
    middle = (comm.size - 1) / 2
    for number in range(3):
        link = model[f'bn{number}']
        assert (link.avg_mean == numpy.arange(link.avg_mean.size) + middle
                ).all()
        assert (link.avg_var == number + 10 * middle).all()


# --- bad input ---------------------------------------------------------------

def test_what_is_wrong_is_explained_once_and_ends_all_ranks(root, tmp_path):
    folders = {}
    for name in 'other', 'empty', 'missing':
        folders[name] = shutil.copytree(root, tmp_path / name)
    other = folders['other'] / 'val' / 'china_0'
    other.rename(other.with_name('other'))
    (folders['empty'] / 'train' / 'empty').mkdir()
    shutil.rmtree(folders['missing'] / 'train')
    cases = [
        ([root, '--group-bn', '3'],
         'group_size=3 does not divide the 2 ranks; it can be 1 or 2'),
        ([root, '--communicator', 'torus2d:shape=2x1', '--bn-tile', '1x2'],
         'tile=(1, 2) does not fit into the torus of 2 x 1 ranks'),
        ([root, '--arch', 'googlenet', '--group-bn', '2', '--insize', '79'],
         'googlenet has no batch normalisation for --group-bn'),
        ([root, '--batchsize', '1'],
         '--batchsize 1 leaves batch normalisation'),
        ([root, '--communicator', 'fp9'],
         "no communicator is called 'fp9'"),
        ([root, '--communicator', 'fp8:warmup=x'],
         'warmup must be of type int'),
        ([root, '--lr', 'nan'], 'base_lr must be a finite number'),
        ([root, '--decoder', 'x'], "no decoder 'x'"),
        ([folders['other']], f'class china_0 is in {folders["other"]}/train '
         f'but not in {folders["other"]}/val'),
        ([folders['empty']], "no images (.jpeg, .jpg, .png) in 'empty'"),
        ([folders['missing']], "train' is not a folder"),
    ]
    check_refusals(SCRIPT, [
        ([arguments[0], *SMALL, *arguments[1:]], message)
        for arguments, message in cases], tmp_path / 'out')


@pytest.mark.slow
@pytest.mark.parametrize(('arguments', 'message'), [
    (('--on-error', 'raise'),
     r'china_1/\d+\.JPEG: .*\(rank \d\)'),
    (('--no-lars', '--lr', '1e30', '--communicator', 'float32'),
     'the gradient of /predictor/.* is not finite'),
    (('--no-lars', '--lr', '1e30', '--communicator', 'naive'),
     "parameters in optimizer 'main' diverge"),
])
def test_a_training_that_fails_ends_all_ranks(spoilt, tmp_path, arguments,
                                              message):
    done = run(spoilt, *SMALL, *arguments, '--out', tmp_path)
    assert done.returncode not in (0, 2)
    assert 'failed, ending all' in done.stderr
    assert re.search(message, done.stderr)


@pytest.mark.parametrize('argument', [
    ('--average', '1'), ('--label-smoothing', '-0.1'), ('--epoch', '0'),
    ('--cache-bytes', '1T'), ('--bn-tile', '2'), ('--workers', '0'),
    ('--group-bn', '2', '--bn-tile', '1x2'),
    ('--cache', 'none', '--cache-bytes', '1G')])
def test_some_values_are_refused_at_once(argument):
    arguments = module('arguments')
    parser = arguments.make_parser('')
    with pytest.raises((SystemExit, ValueError)):
        arguments.check(parser.parse_args(['root', *argument]))


# --- the page ----------------------------------------------------------------

def rows(title):
    """The rows of one of the page's tables, as lists of text."""
    page = (EXAMPLES.parent / 'docs' / 'images.rst').read_text()
    _, _, rest = page.partition(f'.. list-table:: {title}\n')
    table = re.split(r'\n(?=\S)', rest)[0]
    return [[' '.join(cell.split()) for cell in row.split('\n     - ')]
            for row in re.split(r'\n   \* - ', table)[2:]]


def test_the_pages_table_has_the_networks_sizes():
    documented = {name.strip('`'): (size.split()[0], parameters)
                  for name, size, parameters, _ in rows('Networks')}
    assert set(documented) == set(NETWORKS)
    for name, network in NETWORKS.items():
        assert documented[name][0] == str(network.insize)
    assert documented['small'][1] == f'{NETWORKS["small"]().count_params():,}'
