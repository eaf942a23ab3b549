"""The pipeline example, as a user starts it, on few ranks and shortly."""
import importlib
import json
import os
import re
import shutil
import signal
from types import SimpleNamespace

from chainer_fp8pipe.pipeline.schedules.schedule import make_schedule
from chainer_fp8pipe.planning.schedules.simulator import Costs, simulate
from chainer_fp8pipe.report.events import Event, chrome_trace

import chainer
import chainer.functions as F
import numpy
import pytest

from tests.ranks import run_script

from .digits import digits
from .interrupted import interrupted
from .test_digits import arrays, write_cifar, write_mnist

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
_FOLDER = os.path.join(_ROOT, 'examples', 'pipeline')
SCRIPT = os.path.join(_FOLDER, 'train_pipeline.py')

# Some seconds, most of them for the imports.
SMALL = ('--network', 'mlp', '--depth', '4', '--width', '64', '--epoch', '4')


def run(*arguments, ranks=2):
    return run_script(ranks, SCRIPT, *arguments, timeout=300)


def trained(out, *arguments, ranks=2):
    """Runs the example, and returns the bytes of the model's arrays."""
    done = run(*SMALL, '--root', digits(), *arguments, '--out', out,
               ranks=ranks)
    assert done.returncode == 0, done.stderr
    return arrays(out / 'model.npz')


def module(name, monkeypatch):
    """A module of the example's."""
    monkeypatch.syspath_prepend(_FOLDER)
    return importlib.import_module(name)


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
    assert '=> stage 0 (here): layers 0 to ' in printed
    assert 'total [' in printed             # the progress bar
    assert printed.count('validation/main/accuracy') == 1


def test_it_ends_with_a_table_that_names_its_files(hybrid):
    printed, out = hybrid
    table = printed[printed.index('\ntest accuracy'):]
    for name in ('curves.png', 'timeline.png', 'timeline.json', 'model.npz'):
        assert table.count(str(out / name)) == 1
        assert (out / name).stat().st_size > 5000
    summary = json.loads((out / 'summary.json').read_text())
    assert f'{summary["final"]:.2f} %' in table
    assert f'{summary["milliseconds"]:.1f} ms' in table
    idle = summary['idle']
    for share in idle.values():
        assert f'{share:.1f} %' in table
        assert 0 < share < 100
    # 1f1b: of m + d - 1 = 5 turns of a rank, d - 1 = 1 is idle.
    assert idle['equal_stages'] == pytest.approx(20)
    # A byte for each parameter in the first stage of two replicas.
    assert summary['bytes'] == pytest.approx(
        (64 * 64 + 64) * 2, rel=0.2)


def test_it_learns(hybrid):
    _, out = hybrid
    assert json.loads((out / 'summary.json').read_text())['final'] > 90


def test_the_timeline_is_that_of_all_ranks_in_one_update(hybrid):
    _, out = hybrid
    rows = json.loads((out / 'timeline.json').read_text())['traceEvents']
    events = [row for row in rows if row['ph'] == 'X']
    assert {event['args']['iteration'] for event in events} == {20}
    for rank in range(4):
        count = [event['cat'] for event in events
                 if event['tid'] == rank].count
        assert (count('forward'), count('backward'), count('update')) == (
            4, 4, 1)


def test_what_is_measured_is_what_happened(tmp_path, monkeypatch):
    """A simulated update instead of a measured one."""
    schedule = make_schedule('zero_bubble', 2, 4)
    passes = simulate(schedule, [Costs(1.0, 2.0, 1.5), Costs(2.0, 1.0, 1.0)])
    end = passes.step_time
    trace = chrome_trace([*passes.events, *(
        Event(rank, name, end + start, end + start + 1)
        for rank in range(2)
        for name, start in (('exchange', 0), ('update', 1)))])
    (tmp_path / 'trace').write_text(json.dumps(trace))
    entry = {'epoch': 1, 'iteration': 3, 'elapsed_time': 1.0}
    summary = module('results', monkeypatch).summarise(
        [{**entry, 'validation/main/accuracy': share}
         for share in (0.5, 0.9, 0.8)],
        SimpleNamespace(replicas=1, placement=SimpleNamespace(nodes=(0, 0))),
        schedule, [0.03, 0.5, 0.02], tmp_path / 'trace', 3)
    assert (summary['final'], summary['best'], summary['milliseconds']) == (
        80, 90, 30)
    busy = 4 * (1 + 2 + 1.5 + 2 + 1 + 1)
    assert summary['idle'] == pytest.approx({
        'update': 100 - 100 * (busy + 2) / (2 * (end + 2)),
        'passes': 100 - 100 * busy / (2 * end),
        'measured_stages': 100 - 100 * busy / (2 * end),
        # Of 4 * 3 + 1 turns of a rank, one is idle.
        'equal_stages': 100 / 13})


def test_the_model_can_be_loaded_as_a_whole(hybrid, monkeypatch):
    _, out = hybrid
    model = module('models', monkeypatch).FullyConnected(
        (1, 8, 8), depth=4, width=64)
    chainer.serializers.load_npz(out / 'model.npz', model)
    monkeypatch.syspath_prepend(os.path.join(_ROOT, 'examples', 'digits'))
    _, test = importlib.import_module('data').load('digits')
    images, labels = chainer.dataset.concat_examples(test)
    with chainer.using_config('train', False):
        accuracy = F.accuracy(model(images), labels).item()
    summary = json.loads((out / 'summary.json').read_text())
    assert 100 * accuracy == pytest.approx(summary['final'], abs=0.01)


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


@pytest.mark.parametrize('how', ['a rank', signal.SIGINT])
def test_killed_and_resumed_it_ends_with_the_same_weights(
        hybrid, tmp_path, how):
    _, whole = hybrid
    out = tmp_path / 'out'
    assert interrupted(how, 50, SCRIPT, *SMALL, '--root', digits(), '--out',
                       out, ranks=4) != 0
    assert not (out / 'model.npz').exists()
    assert list(out.glob('snapshot_iter_*.npz'))
    assert trained(out, '--resume', ranks=4) == arrays(whole / 'model.npz')


@pytest.fixture(scope='module')
def two_stages(tmp_path_factory):
    """The results of 2 stages without replicas."""
    out = tmp_path_factory.mktemp('stages') / 'out'
    trained(out)
    return out


@pytest.mark.parametrize(('ranks', 'stages'), [(1, 1), (4, 4)])
def test_it_goes_on_on_other_ranks_to_the_same_weights(
        two_stages, tmp_path, ranks, stages):
    done = resumed(two_stages, tmp_path, ranks, stages)
    assert 'goes on after iteration' in done.stdout
    assert arrays(tmp_path / 'out' / 'model.npz') == arrays(
        two_stages / 'model.npz')


def test_it_goes_on_with_replicas(two_stages, tmp_path):
    resumed(two_stages, tmp_path, 4, 2)
    with numpy.load(tmp_path / 'out' / 'model.npz') as found, numpy.load(
            two_stages / 'model.npz') as expected:
        for key in expected:
            # One epoch in fp8, at the end of the learning rate's decay.
            numpy.testing.assert_allclose(found[key], expected[key],
                                          atol=1e-2)


def resumed(whole, tmp_path, ranks, stages):
    """Does the last epoch of a run again, with other ranks."""
    out = shutil.copytree(whole, tmp_path / 'out')
    last = max(out.glob('snapshot_iter_*.npz'), key=os.path.getmtime)
    assert last.name == 'snapshot_iter_75.npz'
    last.unlink()
    (out / 'model.npz').unlink()
    done = run(*SMALL, '--root', digits(), '--pipeline', stages, '--resume',
               '--out', out, ranks=ranks)
    assert done.returncode == 0, done.stderr
    return done


def test_a_second_run_keeps_the_firsts_results(two_stages, tmp_path):
    out = shutil.copytree(two_stages, tmp_path / 'out')
    trained(out, '--epoch', '1')
    assert arrays(tmp_path / 'out.1' / 'model.npz') == arrays(
        two_stages / 'model.npz')


@pytest.mark.parametrize(('dataset', 'write'), [
    ('mnist', write_mnist), ('cifar10', write_cifar)])
def test_it_reads_files_in_their_original_formats(tmp_path, dataset, write):
    write(tmp_path, True)
    trained(tmp_path / 'out', '--dataset', dataset, '--root', tmp_path,
            '--network', 'conv', '--width', '4', '--epoch', '1',
            '--batchsize', '16')


@pytest.mark.parametrize(('ranks', 'arguments', 'message'), [
    (3, [], 'pipeline=2 does not divide the 3 ranks; it can be 1, 3'),
    (2, ['--network', 'mlp', '--depth', '1'],
     'has 1 layers, too few for 2 ranks'),
    (1, ['--chunks', '2'], "only 'interleaved' and 'zero_bubble'"),
    (4, ['--batchsize', '7'],
     'micro-batches (4) x replicas (2) take 8 images'),
    (1, ['--epoch', '0'], "'0' is not a whole number of at least 1"),
    (2, ['--timeline', '500'], 'there are 225 updates'),
    (2, ['--communicator', 'fp9'], "no communicator is called 'fp9'"),
    (1, ['--communicator', 'naive:x=1'], "'naive' has no option 'x'"),
    (1, ['--dataset', 'mnist'], '--dataset mnist needs --root DIR'),
    (2, ['--dataset', 'cifar10', '--root', 'nowhere'],
     'data_batch_1 is not in nowhere'),
])
def test_wrong_arguments_are_explained_once(tmp_path, ranks, arguments,
                                            message):
    done = run(*arguments, '--out', tmp_path / 'out', ranks=ranks)
    assert done.returncode == 2
    assert done.stderr.count(message) == 1
    assert 'Traceback' not in done.stderr
    assert not (tmp_path / 'out').exists()


def test_a_snapshot_of_another_network_is_refused_and_kept(
        two_stages, tmp_path):
    out = shutil.copytree(two_stages, tmp_path / 'out')
    done = run(*SMALL, '--root', digits(), '--width', '24', '--resume',
               '--out', out)
    assert done.returncode == 2
    assert done.stderr.count('error: ') == 1
    assert re.search('parameter /0/[Wb] is float32 .*64.* in the snapshot but '
                     'float32 .*24.* in the model', done.stderr)
    assert sorted(os.listdir(out)) == sorted(os.listdir(two_stages))


def test_help_is_printed_once():
    done = run('--help')
    assert done.returncode == 0
    assert done.stdout.count('usage:') == 1
    assert '--micro-batches' in done.stdout
