"""``run --pipeline``, with scripts that know nothing of ranks."""
import json
import os
import re

from chainer_fp8pipe.chains import deferred

import chainer
import numpy as np
import pytest

from tests.digits_runs import SCRIPT, check_log, check_run, log_of
from tests.ranks import on_ranks, run_script
from tests.runs import run_alone, run_here


def test_the_log_and_the_files_are_those_of_a_serial_run(tmp_path, serial):
    arguments = '--seed', '1', '--hooks'
    done = run_script(
        4, '-m', 'chainer_fp8pipe', 'run', '--pipeline', '2',
        '--micro-batches', '3', SCRIPT, *arguments, '--plot', cwd=tmp_path)
    check_run(done, tmp_path, serial(*arguments), ['loss.png'])
    for output, text in ((done.stdout, '5 iter, 0 epoch'),
                         (done.stderr, '2 stages x 2 replicas'),
                         (done.stderr, 'DumpGraph needs the whole model')):
        assert output.count(text) == 1


# --- small scripts, in the processes of the tests ----------------------------

_HEAD = '''
import chainer, chainermn, numpy as np, sys
import chainer.functions as F
import chainer.links as L
from chainer import training
from chainer.training import extensions
data = [(np.full(3, n, 'f') / 16, np.int32(n % 2)) for n in range(16)]
model = L.Classifier(chainer.Sequential(
    L.Linear(3, 8), F.relu, L.Linear(8, 8), F.relu, L.Linear(8, 2)))
optimizer = chainer.optimizers.MomentumSGD(0.1).setup(model)
iterator = chainer.iterators.SerialIterator(data, 6)
def evaluator(target=model, **given):
    return extensions.Evaluator(chainer.iterators.SerialIterator(
        data, 5, repeat=False, shuffle=False), target, **given)
'''
_UPDATER = '''
updater = training.StandardUpdater(iterator, optimizer)
trainer = training.Trainer(updater, (4, 'iteration'))
'''


def run_stages(comm, folder, script, *options, micro_batches=3):
    """As a pipeline of two stages, or one."""
    return run_here(comm, folder, script, '--pipeline', min(comm.size, 2),
                    '--micro-batches', micro_batches, *options)


def ran(*given, **options):
    """As :func:`run_stages`, if the script has succeeded."""
    done = run_stages(*given, **options)
    assert done.returncode == 0, done.stderr
    return done


OWN_LOSS = """
import chainer, numpy
from chainer import functions as F, links as L, training
from chainer.training import extensions
numpy.random.seed(0)
data = [(numpy.full(4, n % 3, 'f'), numpy.int32(n % 3)) for n in range(12)]
model = chainer.Sequential(L.Linear(4, 5), F.tanh, L.Linear(5, 3))
for _ in range(3):
    model.insert(0, L.Linear(4, 4))
def loss(x, t):
    found = F.softmax_cross_entropy(model(x), t)
    chainer.report({'loss': found}, model)
    return found
optimizer = chainer.optimizers.SGD(.5).setup(model)
trainer = training.Trainer(training.StandardUpdater(
    chainer.iterators.SerialIterator(data, 6, shuffle=False), optimizer,
    loss_func=loss), (3, 'epoch'))
for name, function in ('shared', loss), ('whole', lambda x, t: loss(x, t)):
    test = chainer.iterators.SerialIterator(data, 6, False, False)
    trainer.extend(extensions.Evaluator(test, model, eval_func=function),
                   name=name)
trainer.extend(extensions.LogReport())
trainer.run()
"""


@on_ranks(2, 4)
def test_a_loss_function_of_the_updater_is_cut_with_its_model(comm, tmp_path):
    ran(comm, tmp_path, OWN_LOSS, '--schedule', 'interleaved', '--memory',
        '1 GiB')
    if comm.rank == 0:
        run_alone(tmp_path / 'serial', OWN_LOSS)
        check_log(log_of(tmp_path), log_of(tmp_path / 'serial'))


#: Trains from a file, if there is one, for 5 updates, and writes others.
CROSSES = _UPDATER + '''
import os
trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))
trainer.extend(extensions.PlotReport(['main/loss'], trigger=(9, 'epoch')))
trainer.extend(extensions.DumpGraph('main/loss'))
trainer.extend(extensions.snapshot(n_retains=2, autoload=AUTO),
               trigger=training.triggers.ManualScheduleTrigger(
                   [1, 3, 5], 'iteration'))
trainer.extend(extensions.snapshot_object(model, 'model'),
               trigger=(5, 'iteration'))
if os.path.exists('../FROM/result/snapshot_iter_3') and not AUTO:
    chainer.serializers.load_npz('../FROM/result/snapshot_iter_3', trainer)
trainer.stop_trigger = training.get_trigger((5, 'iteration'))
trainer.run()
print(trainer.get_extension('LogReport').log)
'''


@on_ranks(2)
def test_the_scripts_own_snapshots_cross_between_one_process_and_stages(
        comm, tmp_path):
    def losses(name, begin='', auto=False, alone=False):
        folder = tmp_path / name
        script = 'import numpy\nnumpy.random.seed(3)\n' + _HEAD + (
            CROSSES.replace('FROM', begin).replace('AUTO', str(auto)))
        if not alone:
            said = ran(comm, folder, script).stdout
        elif comm.rank == 0:
            said = run_alone(folder, script)['stdout']
        if comm.rank == 0:
            assert not (folder / 'result/snapshot_iter_1').exists()
            with np.load(folder / 'result/model') as model, np.load(
                    folder / 'result/snapshot_iter_5') as trainer:
                np.testing.assert_array_equal(
                    model['predictor/2/W'],
                    trainer['updater/model:main/predictor/2/W'])
            found.append(re.findall("'main/loss': ([0-9.]+)", said))
    found = []
    losses('serial', alone=True)
    losses('stages')
    losses('there', 'serial')
    losses('back', 'stages', alone=True)
    if comm.rank == 0:
        for folder in 'serial', 'stages':
            os.remove(tmp_path / folder / 'result/snapshot_iter_5')
    losses('serial', auto=True)
    losses('stages', auto=True)
    for one in found:
        assert len(one) == 5
        assert [*map(float, one)] == pytest.approx([*map(float, found[0])],
                                                   rel=1e-4)


#: By the number of ranks: lines of a script, and what is said.
REFUSED = {1: [
    ('training.updaters.ParallelUpdater(iterator, optimizer, devices={})',
     'trains with a ParallelUpdater'),
    ('class Mine(training.Updater):\n'
     '    get_all_optimizers = dict\n'
     "training.Trainer(Mine(), (1, 'epoch')).run()",
     'trains with a Mine'),
    ("training.StandardUpdater(iterator, {'a': optimizer, 'b': optimizer})",
     'has the optimizers a, b;'),
    ("training.StandardUpdater({'main': iterator, 'x': iterator}, optimizer)",
     'has the iterators main, x;'),
    ("comm = chainermn.create_communicator('naive')\n"
     'chainermn.create_multi_node_optimizer(optimizer, comm)\n'
     'training.StandardUpdater(iterator, chainermn.'
     'create_multi_node_optimizer(optimizer, comm))',
     'run it without --pipeline'),
    ('training.StandardUpdater(chainer.dataset.Iterator(), optimizer)',
     'data come from a Iterator'),
    ('training.StandardUpdater(iterator, chainer.optimizers.SGD())',
     'call optimizer.setup(model)'),
    ('training.StandardUpdater(chainer.iterators.SerialIterator(data, 2), '
     'optimizer)', 'lower --micro-batches'),
    (_UPDATER + 'trainer.extend(extensions.snapshot(snapshot_on_error=True))\n'
     'trainer.run()', 'snapshot_on_error=True, when'),
    (_UPDATER + "chainer.serializers.save_hdf5('x', model)",
     'saved by save_npz only'),
    ('print(1)', 'without a chainer.training.StandardUpdater'),
    ('optimizer.update(model, *chainer.dataset.concat_examples(data))\n'
     'raise SystemExit("days later")', 'let a loop of its own'),
    ('class Net(L.Classifier):\n'
     '    def forward(self, x, t): return self.predictor(x)\n'
     'optimizer.setup(Net(model.predictor))\n'
     'training.StandardUpdater(iterator, optimizer)',
     'must return its loss'),
    ('class Looks(L.Classifier):\n'
     '    def forward(self, x, t):\n'
     '        float(self.predictor(x).array.max())\n'
     'optimizer.setup(Looks(model.predictor))\n'
     'training.StandardUpdater(iterator, optimizer)',
     'script.py:17: __float__ needs the value'),
], 2: [
    ('from mpi4py import MPI\nif MPI.COMM_WORLD.rank: model.disable_update()\n'
     + _UPDATER, 'update of parameter /predictor/0/W is (True'),
    ('def norm(optimizer): pass\n'
     "optimizer.add_hook(norm, 'norm', 'pre')" + _UPDATER,
     "the hook 'norm', a function, would see"),
    (_UPDATER + '''
from mpi4py import MPI
if MPI.COMM_WORLD.rank == 0:
    chainer.serializers.load_npz('snapshot', trainer)
trainer.run()
''', 'load on rank 0, run_trainer on rank 1; let no clock'),
], 4: [
    (_UPDATER + 'training.StandardUpdater(iterator, optimizer)',
     'a second updater'),
    ('''
class Columns(chainer.iterators.SerialIterator):
    def next(self):
        return (*map(np.stack, zip(*super().next())),)
iterator = Columns(data, 6)''' + _UPDATER, 'Columns gives a tuple'),
]}


@on_ranks(*REFUSED)
def test_what_cannot_be_done_is_refused_in_one_line_for_all_ranks(
        comm, tmp_path):
    for lines, message in REFUSED[comm.size]:
        done = run_stages(comm, tmp_path, _HEAD + lines)
        check_refusal(done, message)


def check_refusal(done, message):
    assert done.returncode == 2, done.stderr
    said = [line for line in done.stderr.splitlines()
            if line.startswith('chainer_fp8pipe run: ')]
    assert len(said) == 1, done.stderr
    assert message in said[0]
    assert 'Traceback' not in done.stderr


@pytest.mark.parametrize(('look', 'message'), [
    ('lambda _: [p.grad for p in model.params()]',
     'the gradient is on another rank'),
    ('in_a_thread', 'a thread of the script sees a part')])
@on_ranks(2)
def test_a_look_that_would_see_a_part_is_an_error(comm, tmp_path, look,
                                                  message):
    done = run_stages(comm, tmp_path, _HEAD + _UPDATER + f'''
import threading
failed = []
threading.excepthook = lambda given: failed.append(given.exc_value)
def in_a_thread(trainer):
    thread = threading.Thread(target=lambda: list(model.params()))
    thread.start()
    thread.join()
    raise failed[0]
trainer.extend({look}, name='look', trigger=(1, 'iteration'))
trainer.run()
''')
    assert done.returncode == 1
    assert done.stderr.count(f': {message}') >= 2


def test_a_refusal_on_one_rank_ends_all(tmp_path):
    (tmp_path / 'script.py').write_text(_HEAD + '''
from chainer_fp8pipe.training.unmodified import launch
from mpi4py import MPI
launch._PATIENCE = 1   # second, for those that will not refuse
if MPI.COMM_WORLD.rank == 1:
    class Mine(training.StandardUpdater): pass
    Mine(iterator, optimizer)
''' + _UPDATER)
    done = run_script(2, '-m', 'chainer_fp8pipe', 'run', '--pipeline', '2',
                      'script.py', cwd=tmp_path)
    assert done.returncode != 0
    assert 'trains with a Mine' in done.stderr


IN_ONE_PROCESS = '''
import threading
import chainer, numpy as np
import chainer.functions as F, chainer.links as L
from chainer import training
np.random.seed(7)
class Lazy:             # of which only the converter makes arrays
    def __init__(self, number):
        self.number, self.lock = number, threading.Lock()
@chainer.dataset.converter()
def convert(batch, device):
    return (np.array([np.arange(5) * one.number for one in batch], 'f') / 80,
            np.array([one.number % 3 for one in batch], 'i'))
data = [Lazy(number) for number in range(24)]
model = L.Classifier(chainer.Sequential(
    L.Linear(5, 6), F.relu, L.Linear(6, 6, initialW=np.eye(6, dtype='f')),
    L.Linear(None, 6), F.relu, *L.Linear(6, 6).repeat(2),
    L.Linear(6, 3, initialW=chainer.initializers.Orthogonal())))
drawn = np.random.rand()
chainer.serializers.load_npz('part.npz', model.predictor[0])
'''
TRAINS = '''
updater = training.StandardUpdater(
    chainer.iterators.SerialIterator(data, 12, shuffle=False),
    chainer.optimizers.SGD(.5).setup(model), converter=convert)
trainer = training.Trainer(updater, (4, 'iteration'))
class Silent(training.extensions.PrintReport):
    def __call__(self, trainer):
        pass
trainer.extend(Silent([]), trigger=(1, 'iteration'))
trainer.run()
'''


MAKES = '''
import glob, logging, os, pathlib, shutil, sys, time
from mpi4py import MPI
rank, first = MPI.COMM_WORLD.rank, not MPI.COMM_WORLD.rank
def late():
    time.sleep(.2 * first)  # in whatever order ranks come
''' + IN_ONE_PROCESS + '''
os.mkdir('again')
late()
shutil.rmtree('again')
late()
os.makedirs('again')
try:
    os.mkdir('again')
except FileExistsError:
    print('is there')
late()
if os.path.exists('exists') or 'exists' in [
        *os.listdir('.'), *os.listdir(), *glob.glob('exist*')]:
    sys.exit('on one rank only')
os.mkdir('exists')
run = pathlib.Path(f'at {time.time_ns()} {rank}')
late()
run.mkdir()
late()
with open(run / 'new', 'x') as file:
    file.write('once')
np.savetxt(run / 'numbers', [1, 2])
late()
shutil.copy(run / 'new', 'exists')
assert (run / 'new').read_text() == open('exists/new').read() == 'once'
assert np.loadtxt(run / 'numbers').sum() == 3
log = logging.getLogger('made')
log.addHandler(logging.FileHandler(run / 'log'))
for _ in range(2):
    late()
    log.warning('logged')
(run / 'log').rename('exists/log')
(run / 'done').touch()
shutil.copytree('exists', 'copied')
assert [open(one).read() for one in os.scandir('copied')
        if one.name == 'new'] == ['once']
found = {}
for name in ['new', 'log'][::1 if first else -1]:   # as a set's order differs
    with open(f'exists/{name}') as file:
        found[name] = file.read()
assert 'logged' in found['log']
with open('exists/new', 'r+') as file:
    once = file.read()
    file.write(' and again')
assert once == 'once'
os.symlink('log', 'exists/latest')
shutil.move(run / 'new', 'exists/moved')
os.makedirs('made/here')
if not os.path.exists('made/there'):
    os.mkdir('made/there')
open('old', 'w').close()
chainer.serializers.save_npz('made/waits.npz', {})
os.rename('old', 'new')
os.remove('new')
try:
    chainer.serializers.save_npz('lost/here.npz', model)
except ValueError:
    os.rmdir('made/there')
try:
    chainer.serializers.load_npz('lost/here.npz', model)
except FileNotFoundError:
    print('lost')
chainer.serializers.save_npz('made/here/drawn.npz', {'drawn': drawn})
chainer.serializers.save_npz('made/here/first.npz', model.predictor[0])
''' + TRAINS + '''
chainer.serializers.save_npz('last.npz', model.predictor[6])
for one in 0, 6:        # of which each is on one rank
    model.predictor[one].W.array
    seen = f'looked {time.time_ns()} {rank}'
    os.makedirs(seen)
    late()
    assert os.listdir(seen) == []
model.predictor[6].W.array[...] = 0
chainer.serializers.load_npz('last.npz', model.predictor[6])
chainer.serializers.save_npz('model.npz', model)
chainer.serializers.save_npz('other.npz', L.Linear(2, 2))
'''


@on_ranks(2)
def test_a_script_makes_files_and_values_as_in_one_process(comm, tmp_path):
    """Directories, files, warnings, and values that are drawn later."""
    if comm.rank == 0:
        np.random.seed(1)
        chainer.serializers.save_npz(tmp_path / 'part.npz',
                                     chainer.links.Linear(5, 6))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(deferred, '_SMALL', 0)
        done = ran(comm, tmp_path, MAKES)
    if comm.rank:
        return
    assert done.stdout == 'is there\nlost\n'
    assert sorted(os.listdir(tmp_path / 'made')) == ['here', 'waits.npz']
    assert sorted(os.listdir(tmp_path / 'exists')) == [
        'latest', 'log', 'moved', 'new']
    assert (tmp_path / 'exists/log').read_text().count('logged') == 2
    assert (tmp_path / 'exists/new').read_text() == 'once and again'
    assert len([*tmp_path.glob('at *')]) == 1
    assert len([*tmp_path.glob('looked *')]) == 2
    serial = run_alone(tmp_path, IN_ONE_PROCESS + TRAINS)
    model = serial['model']
    with np.load(tmp_path / 'made/here/drawn.npz') as found:
        assert found['drawn'] == serial['drawn']
    for name, expected in (('made/here/first.npz', 'part.npz'),
                           ('model.npz', None)):
        with np.load(tmp_path / name) as found:
            values = (np.load(tmp_path / expected) if expected else
                      chainer.serializers.npz.serialize(model))
            assert found.keys() == values.keys()
            for key, value in values.items():
                np.testing.assert_allclose(found[key], value, 1e-4, 1e-6)
    assert (tmp_path / 'other.npz').exists()


LOOKS = '''
import copy
np.random.seed(3)
class Counting(L.Classifier):
    def forward(self, x, t):
        loss = super().forward(x, t)
        if not chainer.config.train:    # reads values
            chainer.report({'right': sum(map(
                int, self.y.array.argmax(1) == t))}, self)
        return loss
model = Counting(chainer.Sequential(
    L.Linear(3, 8), F.relu, L.BatchNormalization(8), L.Linear(8, 8), F.relu,
    L.Linear(8, 2)))
optimizer.setup(model)
iterator = chainer.iterators.SerialIterator(data, 6, shuffle=False)
before = model.copy()
seen = []
''' + _UPDATER + '''
averages = copy.deepcopy(model), model.copy('copy')
inputs = np.array([x for x, _ in data])
labels = np.array([t for _, t in data])
def look(name, value):
    value = getattr(value, 'array', value)
    seen.append((name, np.asarray(value, 'd').ravel().tolist()))
def infer(function, *args):
    with chainer.using_config('train', False):
        return function(*args)
class Own(extensions.Evaluator):
    name = 'own'
    def evaluate(self):
        found = {}
        target = self.get_target('main')
        with chainer.reporter.report_scope(found):
            chainer.report({'mean': F.mean(target(inputs)).array}, target)
        return found
class OneLayer(training.Extension):
    trigger = 2, 'iteration'
    def initialize(self, trainer):
        look('at the beginning', model.predictor[0].W)
    def __call__(self, trainer):
        look('the first layer', model.predictor[0](inputs))
        look('the last layer', model.predictor[-1].b)
    def finalize(self):
        look('at the end', sum(float((p.array ** 2).sum())
                               for p in model.params()))
@training.make_extension(trigger=(1, 'iteration'))
def whole(trainer):
    look('loss', infer(model, inputs, labels))
@training.make_extension(trigger=(2, 'iteration'))
def several(trainer):
    look('norm', sum(float((p.array ** 2).sum()) for p in model.params()))
    chainer.serializers.save_npz('inside.npz', model)
    look('a copy', infer(model.copy().predictor, inputs))
    for average in averages:
        for p, mean in zip(model.params(), average.params()):
            mean.array[...] = (mean.array + p.array) / 2
        look('an average', infer(average.predictor, inputs))
    look('an older copy', infer(before.predictor, inputs))
    look('evaluated', trainer.get_extension('validation')()[
        'validation/main/loss'])
    look('statistics', model.predictor[2].avg_mean)
@training.make_extension(trigger=(3, 'iteration'), priority=400)
def assign(trainer):
    for p in model.params():
        p.array = np.full(p.shape, .125, p.dtype)
trainer.extend(evaluator(model), trigger=(4, 'iteration'))
trainer.extend(evaluator(before), name='b', trigger=(2, 'iteration'))
trainer.extend(evaluator(model, eval_func=lambda x, t: chainer.report(
    {'sum': F.sum(model.predictor(x))}, model)), name='f',
    trigger=(2, 'iteration'))
trainer.extend(Own(chainer.iterators.SerialIterator(
    data, 4), model.predictor), name='own', trigger=(2, 'iteration'))
for one in OneLayer(), whole, several, assign:
    trainer.extend(one)
trainer.extend(extensions.LogReport(trigger=(2, 'iteration')))
look('before', infer(model.predictor, inputs))
trainer.run()
look('after', infer(model.predictor, inputs))
before.to_cpu()
updater.update()
whole(trainer)
'''


@on_ranks(2)
def test_what_a_script_does_with_its_model_is_done_with_the_whole(
        comm, tmp_path):
    """In extensions, evaluators of its own, and outside of the training."""
    done = ran(comm, tmp_path, _HEAD + LOOKS
               + 'import json\nprint(json.dumps(seen))', micro_batches=1)
    assert done.stderr.count('each rank has the whole model') == 1
    if comm.rank:
        return
    found, alone = json.loads(done.stdout), tmp_path / 'serial'
    serial = run_alone(alone, _HEAD + LOOKS)
    assert len(found) == len(serial['seen']) > 15
    for (name, values), (expected, others) in zip(
            found, serial['seen'], strict=True):
        assert name == expected
        np.testing.assert_allclose(values, others, 1e-4, 1e-6, err_msg=name)
    check_log(log_of(tmp_path), log_of(alone), 1e-4)
    assert log_of(tmp_path)[-1]['validation/main/right'] > 0
    inside = np.load(tmp_path / 'inside.npz')
    for key, value in np.load(alone / 'inside.npz').items():
        np.testing.assert_allclose(inside[key], value, 1e-4, 1e-6)


@on_ranks(4)
def test_a_loop_asks_the_scripts_own_iterator_how_far_it_is(comm, tmp_path):
    """On all ranks, of which one reads."""
    done = ran(comm, tmp_path, _HEAD + '''
updater = training.StandardUpdater(iterator, optimizer)
while iterator.epoch < 3:
    updater.update()
    if iterator.is_new_epoch:
        x, t = chainer.dataset.concat_examples(data)
        print('loss', float(model(x, t).array), iterator.epoch_detail)
print('end', type(iterator).__name__, updater.epoch)
used = updater.get_iterator('main')
assert (used.dataset is data) and used.batch_size == 6
print('codec', updater.get_optimizer('main').communicator.name)
''', '--communicator', 'fp8', '--warmup', '2')
    assert 'codec fp8' in done.stdout
    assert done.stdout.count('loss') == 3
    assert 'end SerialIterator 3' in done.stdout


@on_ranks(1)
def test_an_error_of_the_model_is_shown_where_it_came_up(comm, tmp_path):
    for line, error in (
            ('raise ValueError("of my own")', 'ValueError: of my own'),
            ('return F.linear(x, np.ones((3, 7), "f"))', 'Actual: 2 != 7')):
        done = run_stages(comm, tmp_path, f'{_HEAD}def mine(x):\n    {line}\n'
                          f'model.predictor.append(mine){_UPDATER}')
        assert done.returncode == 1
        assert done.stderr.count('Traceback') == 1
        assert error in done.stderr
        assert 'in mine' in done.stderr
        assert os.path.join('chainer_fp8pipe', '') not in done.stderr


@on_ranks(4)
def test_a_script_without_a_seed_sees_every_sample_once(comm, tmp_path):
    done = ran(comm, tmp_path, _HEAD + '''
import logging, os, warnings
np.random.seed(os.getpid())     # whatever the launcher does
class Data(chainer.dataset.DatasetMixin):
    def __len__(self):
        return 12
    def get_example(self, place):
        return np.full(3, place, 'f'), np.int32(place % 2)
class Loss(L.Classifier):
    def forward(self, x, t):
        chainer.report({'mean': F.mean(x)}, self)
        return super().forward(x, t)
model = Loss(model.predictor)
optimizer.setup(model)
iterator = chainer.iterators.SerialIterator(Data(), 6)
''' + _UPDATER + '''
train, test = chainer.datasets.split_dataset_random(Data(), 6)
trainer.extend(extensions.Evaluator(chainer.iterators.SerialIterator(
    test, 4, repeat=False, shuffle=False), model), trigger=(2, 'iteration'))
seen = []
@training.make_extension(trigger=(1, 'iteration'))
def note(trainer):
    seen.append([float(trainer.observation[key].array) for key in (
        'main/loss', 'main/mean')] + [float(trainer.observation.get(
            'validation/main/loss', 0))])
trainer.extend(note, priority=0)
trainer.run()
sys.stderr.write('said\\n')
logging.warning('logged')
warnings.warn('warned')
from mpi4py import MPI
print(*MPI.COMM_WORLD.gather('%s %s %s' % (
    seen, trainer.updater.epoch, updater.epoch_detail)) or [], sep='\\n')
''')
    for text, times in (('said\n', 1), ('logged', 1),
                        ('UserWarning: warned', comm.size)):
        assert done.stderr.count(text) == times, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == comm.size
    assert len(set(lines)) == 1
    seen = json.loads(lines[0].rpartition(']')[0] + ']')
    assert seen[0][1] + seen[1][1] == pytest.approx(2 * 5.5)
    assert seen[2][1] + seen[3][1] == pytest.approx(2 * 5.5)
    assert lines[0].endswith(' 2 2.0')


def test_iterators_that_read_ahead_and_all_writers_are_taken(tmp_path):
    """And an evaluator that is older than the updater."""
    (tmp_path / 'script.py').write_text(_HEAD + f'''
from chainer.training.extensions import snapshot_writers
class Own(snapshot_writers.Writer):
    def __call__(self, name, out, target):
        self.save(name, out, target, chainer.serializers.npz.save_npz)
if __name__ == '__main__':
    np.random.seed(0)
    validation = evaluator(eval_func=model)
    first = validation()['main/loss']
    iterator = chainer.iterators.MultiprocessIterator(data, 6)
    before = iterator.epoch_detail
{_UPDATER.replace(chr(10), chr(10) + '    ')}
    assert type(updater).__name__ == 'PipelineUpdater'
    assert isinstance(updater, training.StandardUpdater)
    trainer.extend(validation, trigger=(1, 'iteration'))
    trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))
    for number, writer in enumerate([
            snapshot_writers.ThreadQueueWriter(), Own(), snapshot_writers.
            SimpleWriter(), snapshot_writers.ThreadWriter(),
            snapshot_writers.ProcessWriter(),
            lambda name, out, target: np.savez(out + '/' + name, **target)]):
        trainer.extend(extensions.snapshot(
            writer=writer, filename='of_%d.npz' % number),
            'snapshot %d' % number)
    trainer.run()
    print('at', updater.epoch_detail, 'was', before)
    print('losses', first, validation()['validation/main/loss'])
''')
    done = run_script(
        2, '-m', 'chainer_fp8pipe', 'run', '--pipeline', '2',
        '--micro-batches', '3', 'script.py', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 'at 1.5 was 0.0' in done.stdout
    losses = re.search(r'^losses (\S+) (\S+)$', done.stdout, re.MULTILINE)
    assert 0 < abs(float(losses[1]) - float(losses[2])) < 1
    found = {path.name: len(np.load(path, allow_pickle=True).files)
             for path in (tmp_path / 'result').glob('of_*')}
    assert found.keys() == {f'of_{number}.npz' for number in range(6)}
    assert set(found.values()) == {max(found.values())}


@on_ranks(2)
def test_what_a_clock_says_is_what_rank_0_says(comm, tmp_path):
    """Rank 1's clock is late; PlotReport is on rank 0 only."""
    done = ran(comm, tmp_path, _HEAD + '''
import os
from chainer.training import triggers
from mpi4py import MPI
fired = []
class Late(triggers.TimeTrigger):
    def __call__(self, trainer):
        late = 10 * MPI.COMM_WORLD.rank
        if trainer.updater.iteration + late < self._next_time:
            return False
        self._next_time += self._period
        return True
trigger = Late(2)
folder = 'at%d' % MPI.COMM_WORLD.rank
os.makedirs(folder)
''' + _UPDATER + '''
trainer.out = folder
trainer.extend(evaluator(), trigger=trigger)
trainer.extend(extensions.PlotReport(["main/loss"]), trigger=trigger)
trainer.extend(lambda _: fired.append(updater.iteration), name="note",
               trigger=Late(3))
trainer.stop_trigger = Late(7)
trainer.run()
chainer.serializers.save_npz(folder + '/model', model)
chainer.serializers.load_npz(folder + '/model', model)
print(*MPI.COMM_WORLD.gather('%d %s' % (updater.iteration, fired)) or [])
''')
    assert done.stdout == ' '.join(['7 [3, 6]'] * comm.size) + '\n'
    assert [path.name for path in tmp_path.glob('at*')] == ['at0']


@pytest.mark.parametrize(('samples', 'updates', 'said'), [
    ('data[:12]', 2, 'by StopIteration'),
    ('Data(data)', 1, "rank 0: KeyError: 'no such sample'")])
@on_ranks(4)
def test_data_that_end_or_fail_end_the_training_on_all_replicas(
        comm, tmp_path, samples, updates, said):
    done = ran(comm, tmp_path, _HEAD + f'''
class Data(list):
    def __getitem__(self, place):
        if place > 6:
            raise KeyError('no such sample')
        return super().__getitem__(place)
iterator = chainer.iterators.SerialIterator({samples}, 6, repeat=False,
                                            shuffle=False)
{_UPDATER}
try:
    trainer.run()
except Exception as error:
    from mpi4py import MPI
    print(*MPI.COMM_WORLD.gather('at %d by %s %s' % (
        updater.iteration, type(error).__name__, error)) or [], sep='\\n')
''')
    ended = done.stdout.splitlines()
    assert len(ended) == comm.size
    for one in ended:
        assert one.startswith(f'at {updates} '), done.stderr
        assert said in one
