"""The pipeline example, as a user starts it, on few ranks and shortly."""
import json
import os
import re
import shutil

import chainer
import chainer.functions as F
import numpy
import pytest

from tests.ranks import run_script

from .runs import EXAMPLES, arrays, check_refusals, module, write_mnist

SCRIPT = EXAMPLES / 'pipeline' / 'train_pipeline.py'
# Some seconds, most of them for the imports.
SMALL = ('--network', 'mlp', '--depth', '4', '--width', '64', '--epoch', '4')


def run(*arguments, ranks=2):
    return run_script(ranks, SCRIPT, *arguments, timeout=300)


def trained(out, *arguments, ranks=2):
    """Runs the example, and returns the bytes of the model's arrays."""
    done = run(*SMALL, *arguments, '--out', out, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return arrays(out / 'model.npz')


@pytest.fixture(scope='module')
def hybrid(tmp_path_factory):
    """2 stages x 2 replicas; what is printed, and where the results are."""
    out = tmp_path_factory.mktemp('hybrid') / 'out'
    done = run(*SMALL, '--timeline', '20', '--out', out, ranks=4)
    assert done.returncode == 0, done.stderr
    return done.stdout, out


def test_it_shows_where_ranks_and_layers_are_once(hybrid):
    printed, _ = hybrid
    assert printed.count('2 stages x 2 replicas') == 1
    assert printed.count('FullyConnected: ') == 1
    assert 'stage 0 (here): layers 0 to ' in printed
    assert 'total [' in printed             # the progress bar
    assert printed.count('validation/main/accuracy') == 1


def test_it_ends_with_a_table_that_names_its_files(hybrid):
    printed, out = hybrid
    table = printed[printed.index('\ntest accuracy'):]
    for name in ('curves.png', 'timeline.svg', 'timeline.json', 'model.npz'):
        assert table.count(str(out / name)) == 1
        assert (out / name).stat().st_size > 5000
    summary = json.loads((out / 'summary.json').read_text())
    assert summary['final'] > 90
    assert f'{summary["final"]:.2f} %' in table
    assert f'{summary["milliseconds"]:.1f} ms' in table
    idle = summary['idle']
    for share in idle.values():
        assert f'{share:.1f} %' in table
        assert 0 < share < 100
    # A byte for each parameter in the first stage of two replicas.
    assert summary['bytes'] == pytest.approx(
        (64 * 64 + 64) * 2, rel=0.2)


def test_the_model_can_be_loaded_as_a_whole(hybrid):
    _, out = hybrid
    model = module('pipeline', 'models').FullyConnected(
        (1, 8, 8), depth=4, width=64)
    chainer.serializers.load_npz(out / 'model.npz', model)
    _, test = module('digits', 'data').load('digits')
    images, labels = chainer.dataset.concat_examples(test)
    with chainer.using_config('train', False):
        accuracy = F.accuracy(model(images), labels).item()
    summary = json.loads((out / 'summary.json').read_text())
    assert 100 * accuracy == pytest.approx(summary['final'], abs=0.01)


@pytest.mark.slow
def test_the_model_does_not_depend_on_how_it_is_divided(tmp_path):
    """With dropout and recomputation, on 1, 2 and 4 ranks."""
    write_mnist(tmp_path, False)
    network = ('--network', 'conv', '--width', '4', '--epoch', '2',
               '--batchsize', '16', '--dataset', 'mnist', '--root', tmp_path)
    serial = trained(tmp_path / '1', *network, ranks=1)
    for ranks, arguments in ((2, ('--schedule', 'interleaved')),
                             (4, ('--pipeline', '4', '--schedule',
                                  'zero_bubble', '--balance', 'layers')),
                             (2, ('--schedule', 'gpipe', '--balance', 'time',
                                  '--recompute', 'every stage'))):
        assert trained(tmp_path / arguments[-1], *network, *arguments,
                       ranks=ranks) == serial


@pytest.fixture(scope='module')
def two_stages(tmp_path_factory):
    """The results of 2 stages without replicas."""
    out = tmp_path_factory.mktemp('stages') / 'out'
    trained(out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(('stages', 'tolerance'), [
    (4, 0),
    (2, 1e-2)])         # one epoch in fp8, at the end of the rate's decay
def test_it_goes_on_on_four_ranks(two_stages, tmp_path, stages, tolerance):
    out = shutil.copytree(two_stages, tmp_path / 'out')
    last = max(out.glob('snapshot_iter_*.ranks'), key=os.path.getmtime)
    assert last.name == 'snapshot_iter_75.ranks'
    shutil.rmtree(last)
    (out / 'model.npz').unlink()
    trained(out, '--pipeline', stages, '--resume', ranks=4)
    with numpy.load(out / 'model.npz') as found, numpy.load(
            two_stages / 'model.npz') as expected:
        for key in expected:
            numpy.testing.assert_allclose(found[key], expected[key],
                                          atol=tolerance, rtol=0)


def test_a_snapshot_of_another_network_is_refused_and_kept(
        two_stages, tmp_path):
    out = shutil.copytree(two_stages, tmp_path / 'out')
    done = run(*SMALL, '--width', '24', '--resume', '--out', out)
    assert done.returncode == 2
    assert done.stderr.count('error: ') == 1
    assert re.search('parameter /0/[Wb] is float32 .*64.* in the snapshot but '
                     'float32 .*24.* in the model', done.stderr)
    assert sorted(os.listdir(out)) == sorted(os.listdir(two_stages))


@pytest.mark.parametrize(('ranks', 'cases'), [
    (2, [(['--network', 'mlp', '--depth', '1'],
          'has 1 layers, too few for 2 ranks'),
         (['--timeline', '500'], 'there are 225 updates'),
         (['--epoch', '0'], "'0' is not a whole number of at least 1"),
         (['--communicator', 'fp9'], "no communicator is called 'fp9'"),
         (['--communicator', 'naive:x=1'], "'naive' has no option 'x'"),
         (['--dataset', 'mnist'], '--dataset mnist needs --root DIR'),
         (['--root', '.'], '--root is for --dataset mnist and cifar10'),
         (['--dataset', 'cifar10', '--root', 'nowhere'],
          'data_batch_1 is not in nowhere'),
         (['--chunks', '2'], "only 'interleaved' and 'zero_bubble'")]),
    (3, [([], 'pipeline=2 does not divide the 3 ranks; it can be 1 or 3')]),
    (4, [(['--batchsize', '7'],
          'micro-batches (4) x replicas (2) take 8 images')])])
def test_what_is_wrong_is_explained_once_and_ends_all_ranks(
        tmp_path, ranks, cases):
    check_refusals(SCRIPT, cases, tmp_path / 'out', ranks)
