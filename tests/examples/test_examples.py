"""The examples, as a user starts them, on few ranks and shortly."""
import json
import re
import shutil
import sys

import chainer
import chainer.functions as F
import numpy
import pytest
from chainer.dataset import concat_examples

from tests.ranks import on_ranks, run_script
from tests.runs import run_python

from .runs import EXAMPLES, module

common = module('common')

# Ranks, arguments, and what the last lines say.
RUNS = {
    'train_digits': (
        2, ['--epoch', '2', '--warmup', '10'],
        r'fp8: (?P<percent>[\d.]+) % of the test images after [\d.]+ s; each '
        r'rank sent 60,\d{3} bytes per update for 60,554 gradients'),
    'train_divisible': (
        4, ['--depth', '4', '--width', '64', '--epoch', '2'],
        r'(?P<percent>[\d.]+) % of the test images; ranks 0 to 3 hold '
        r'([\d,]+), ([\d,]+), \2, \3 parameters\n.*timeline.svg shows .*'),
    'train_large': (
        2, ['--width', '64', '--layers', '5', '--epoch', '3', '--memory',
            # Of Python's own objects 3.10 counts some more.
            '16.2 MB' if sys.version_info >= (3, 11) else '16.3 MB'],
        r'(?P<percent>[\d.]+) % of the test images; ranks 0 to 1 held 0, 0 MB'
        r' of 0 MB of parameters, gradients and momentum .*'),
    'train_images': (
        2, ['--epoch', '3', '--batchsize', '32', '--workers', '1',
            '--group-bn', '2'],
        r'(?P<percent>[\d.]+) % of the test images after 57 updates of 64 '
        r'images at a rate of 4.0 at most: [\d,]+ images per second'),
    'train_language': (
        4, ['--characters', '10000', '--length', '16', '--units', '32',
            '--layers', '1', '--heads', '2', '--lr', '0.01'],
        r'(?P<bits>[\d.]+) bits per character of text that it has not seen '
        r'\(at first 8\), after \d+ s on .*2 stages x 2 replicas.*'),
}
every = pytest.mark.parametrize('name', RUNS)
_made = {}


@on_ranks()
def in_ranks(comm, name, out):
    done = run_python(comm, out.parent, EXAMPLES / f'{name}.py',
                      *RUNS[name][1], '--out', out)
    assert done.returncode == 0, done.stderr
    if comm.rank == 0:
        (out.parent / 'printed').write_text(done.stdout)


@pytest.fixture
def whole(name, tmp_path_factory):
    """What an example prints, and the folder of its results."""
    if name not in _made:
        out = tmp_path_factory.mktemp(name) / 'out'
        in_ranks(ranks=RUNS[name][0], name=name, out=out)
        _made[name] = (out.parent / 'printed').read_text(), out
    return _made[name]


def arrays(path):
    """The bytes of a file's arrays, by name."""
    with numpy.load(path) as archive:
        return {key: archive[key].tobytes() for key in archive.files}


@every
def test_it_says_at_the_end_what_it_showed(name, whole):
    printed, out = whole
    found = re.search(RUNS[name][2] + r'\n\Z', printed)
    assert found, printed
    shown = found.groupdict()
    if 'percent' in shown:
        assert float(shown['percent']) > 30         # chance is 10
    else:
        assert float(shown['bits']) < 6             # chance is 8
    log = json.loads((out / 'log').read_text())
    assert printed.count('\nepoch ') + printed.startswith('epoch ') == len(log)
    assert log[-1]['epoch'] == len(log)


@on_ranks(2)
def test_help_names_every_option_once(comm, tmp_path):
    for name in RUNS:
        done = run_python(comm, tmp_path, EXAMPLES / f'{name}.py', '--help')
        assert done.returncode == 0
        assert done.stdout.startswith('usage: mpiexec -n RANKS python ')
        for option in '--epoch N', '--batchsize N', '--lr RATE', '--resume':
            assert done.stdout.count(f'\n  {option} ') == 1
        # What each is and, but for --resume, its default.
        shown = re.split(r'^  --', done.stdout, flags=re.M)[1:]
        assert len(shown) > 7
        assert [text for text in shown if '(default' not in ' '.join(
            text.split())] == [text for text in shown if text[:6] == 'resume']


@on_ranks(2)
def test_a_wrong_value_ends_all_ranks_with_its_reason(comm, tmp_path):
    for name, arguments, message in (
            ('train_digits', ['--epoch', '0'],
             "'0' is not a whole number of at least 1"),
            ('train_digits', ['--network', 'x'], "invalid choice: 'x'"),
            ('train_digits', ['--communicator', 'fp9'],
             "no communicator is called 'fp9'"),
            ('train_divisible', ['--pipeline', '3'],
             'pipeline=3 does not divide the 2 ranks'),
            ('train_large', ['--width', '64', '--memory', '1 MB'],
             'fits into 1 MB per rank'),
            ('train_images', ['--images', 'nowhere'], 'nowhere')):
        done = run_python(comm, tmp_path, EXAMPLES / f'{name}.py', *arguments)
        assert done.returncode != 0
        assert message in done.stderr


@pytest.mark.parametrize('name', ['train_digits'])
def test_resumed_it_ends_with_the_same_bits(name, whole, tmp_path):
    out = shutil.copytree(whole[1], tmp_path / 'out')
    last = max(out.glob('snapshot_iter_*'), key=lambda path: int(
        re.search(r'\d+', path.name)[0]))
    shutil.rmtree(last)
    (out / 'model.npz').unlink()
    ranks, given, _ = RUNS[name]
    done = run_script(ranks, EXAMPLES / f'{name}.py', *given, '--resume',
                      '--out', out)
    assert 'goes on after iteration 75' in done.stdout, done.stderr
    assert arrays(out / 'model.npz') == arrays(whole[1] / 'model.npz')


# --- models ------------------------------------------------------------------

@pytest.mark.parametrize('name', ['train_divisible'])
def test_the_whole_model_is_as_good_as_its_stages(name, whole):
    model = module(name).Net(4, 64, 0)
    chainer.serializers.load_npz(whole[1] / 'model.npz', model)
    images, labels = concat_examples(common.digits()[1])
    with chainer.using_config('train', False):
        accuracy = F.accuracy(model(images), labels).item()
    assert f'{100 * accuracy:.2f} %' in whole[0]
    assert (whole[1] / 'timeline.svg').stat().st_size > 5000


@pytest.mark.parametrize('name', ['train_large'])
def test_each_rank_holds_its_part_of_a_large_model(name, whole):
    found = json.loads((whole[1] / 'held.json').read_text())
    # Value, gradient and momentum of every parameter, on one rank each.
    assert found['whole'] == sum(found['held']) == 12 * sum(
        (rows + 1) * columns for rows, columns in
        [(64, 64)] * 5 + [(64, 10)])
    assert min(found['held']) > 0.3 * found['whole']


def decoder():
    numpy.random.seed(0)
    return module('train_language').Decoder(11, 6, 8, 2, 2)


def tokens(*shape):
    return numpy.random.RandomState(1).randint(
        0, 11, shape).astype(numpy.int32)


def test_later_tokens_change_nothing_before_them():
    model, x = decoder(), tokens(2, 6)
    before = model.logits(x).array
    for place in range(6):
        other = x.copy()
        other[:, place] = (other[:, place] + 1) % 11
        changed = abs(model.logits(other).array - before).max(axis=(0, 2))
        assert not changed[:place].any()
        assert (changed[place:] > 0).all()
