"""``run --snapshots`` gives scripts snapshots, and has them go on."""
import os
import re

from chainer_fp8pipe.report.record import read_record

import pytest

from tests.ranks import on_ranks
from tests.runs import run_here

#: What a script without ChainerMN trains; TRAINERS of them.
SERIAL = '''
import os
import chainer, numpy
from mpi4py import MPI
import chainer.functions as F, chainer.links as L
from chainer import training
from chainer.training import extensions
numpy.random.seed(3)
points = numpy.random.RandomState(1).rand(40, 4).astype('f')
data = chainer.datasets.TupleDataset(points, (points.sum(1) > 2).astype('i'))
for number in range(TRAINERS):
    model = L.Classifier(chainer.Sequential(L.Linear(4, 8), F.relu,
                                            L.Linear(8, 2)))
    optimizer = chainer.optimizers.Adam(0.02).setup(model)
    updater = training.StandardUpdater(
        chainer.iterators.SerialIterator(data, 8), optimizer)
    trainer = training.Trainer(updater, (20, 'iteration'),
                               'result' + '2' * number)
    MORE
    @training.make_extension(trigger=(1, 'iteration'))
    def stop(trainer):
        if [number, trainer.updater.iteration] == STOP:
            if MPI.COMM_WORLD.size > 1:
                raise ValueError
            raise SystemExit(7)
    trainer.extend(stop)
    trainer.run()
    print('from', number, first, 'weights',
          [float(p.array.sum()) for p in model.params()])
'''
#: Says at which update a Trainer goes on.
FIRST = '''first = []
    @training.make_extension(trigger=(1, 'iteration'), priority=1000)
    def note(trainer):
        first[:] = first or [trainer.updater.iteration]
    trainer.extend(note)
    '''


#: As scripts under Hydra do, into a new folder at each start.
MOVING = "import os, tempfile; os.chdir(tempfile.mkdtemp(dir='.'))\n"


def script(stop, trainers=1, more=''):
    return (SERIAL.replace('MORE', FIRST + more)
            .replace('STOP', repr(list(stop)))
            .replace('TRAINERS', str(trainers)))


def run(comm, folder, stop, *options, code=0, before='', **given):
    done = run_here(comm, folder, before + script(stop, **given),
                    '--snapshots', 'saved', '--every', '6 iterations',
                    *options)
    assert done.returncode == code, done.stderr
    return done


def ends(done):
    """By Trainer, the first update of this run, and the weights."""
    return re.findall(r'from (\d) \[(\d*)\] weights (\[.*\])', done.stdout)


@on_ranks(1)
def test_each_trainer_goes_on_from_its_own_snapshot(comm, tmp_path):
    """In whatever directory; or begins anew, if all are damaged."""
    whole = run(comm, tmp_path / 'whole', (9, 9), trainers=2)
    assert '; the training begins\n' in whole.stderr
    for folder in (tmp_path / 'whole/saved').iterdir():
        assert re.fullmatch('result2?-[0-9a-f]{8}', folder.name)
        assert sorted(os.listdir(folder)) == [
            'snapshot_iter_18.ranks', 'snapshot_iter_20.ranks']
    moved = tmp_path / 'moved'
    run(comm, moved, (1, 9), trainers=2, code=7, before=MOVING)
    again = run(comm, moved, (9, 9), trainers=2, before=MOVING)
    assert [found[1] for found in ends(again)] == ['', '7']
    assert [found[2] for found in ends(again)] == [
        found[2] for found in ends(whole)]
    assert 'goes on after update 6' in again.stderr
    damaged = tmp_path / 'damaged'
    run(comm, damaged, (0, 9), code=7)
    file, = damaged.glob('saved/*/snapshot_iter_6.ranks/rank0of1.npz')
    file.write_bytes(b'cut off')
    again = run(comm, damaged, (0, 30))
    assert 'snapshot_iter_6.ranks is not whole' in again.stderr
    assert 'the training begins anew\n' in again.stderr
    assert '.py:' not in again.stderr
    assert ends(again) == ends(whole)[:1]


@on_ranks(2)
def test_a_pipeline_goes_on_from_its_snapshot(comm, tmp_path):
    losses = []
    for name, stops in ('whole', [(9, 9)]), ('cut', [(0, 15), (9, 9)]):
        folder = tmp_path / name
        for stop in stops:
            done = run(comm, folder, stop, '--pipeline', '2',
                       '--micro-batches', '2', code=stop == (0, 15), more="""
    class Counts:
        trigger, count = (1, 'iteration'), 0
        def __call__(self, trainer):
            self.count += 1
            if self.count == 20:
                print('counted all')
    trainer.extend(Counts(), 'counts')
    trainer.extend(extensions.snapshot(), trigger=(6, 'iteration'))
    trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))""")
            assert 'in no snapshot' not in done.stderr
        assert 'counted all' in done.stdout     # over both starts
        losses.append(re.findall(r'"main/loss": .*', (
            folder / 'result' / 'log').read_text()))
    assert len(losses[0]) == 20
    assert losses[0] == losses[1]


#: Also has the package train a model, which is no training of the script.
RESUMES_ITSELF = '''
    from chainer_fp8pipe.chains.measure import optimizer_arrays
    optimizer_arrays(optimizer, 'f', chainer.get_device('@numpy'))
    if os.path.exists('mine.npz'):
        chainer.serializers.load_npz('mine.npz', trainer)
    trainer.extend(lambda trainer: chainer.serializers.save_npz(
        'mine.npz', trainer), trigger=(15, 'iteration'), name='save')
    '''


@pytest.mark.parametrize(('stop', 'said', 'first'), [
    (16, 'goes on after update 15, as the script says', '16'),
    (19, 'goes on after update 18', '19')])
@on_ranks(1)
def test_the_newer_of_the_scripts_snapshot_and_the_jobs_counts(
        comm, tmp_path, stop, said, first):
    run(comm, tmp_path, (0, stop), more=RESUMES_ITSELF, code=7)
    again = run(comm, tmp_path, (9, 9), more=RESUMES_ITSELF)
    assert said in again.stderr
    assert ends(again)[0][1] == first


@on_ranks(1)
def test_snapshots_that_no_trainer_goes_on_from_are_named(comm, tmp_path):
    """Of a Trainer that has another out by now; of another version."""
    run(comm, tmp_path, (9, 9))
    kept, = (tmp_path / 'saved').iterdir()
    (tmp_path / 'saved/2/snapshot_iter_5.npz').mkdir(parents=True)
    again = run(comm, tmp_path, (9, 9), more="trainer.out = 'elsewhere'\n    ")
    assert '; the training begins; ' + '; '.join(
        f'those in {name} are of another Trainer (another out, or place in '
        'the script) or version' for name in ('2', kept.name)) in again.stderr


@on_ranks(1)
def test_a_script_of_which_no_snapshot_is_good_is_refused(comm, tmp_path):
    for number, (lines, code, said) in enumerate([
        (phases("""
for name, rate in ('first', 0.5), ('second', 0.01):
    run(name, 'out', rate, 8)""", 99, 'pass'), 2,
         'a second Trainer has out=out at the same place'),
        ('''
import chainer, numpy
model = chainer.links.Classifier(chainer.links.Linear(3, 2))
optimizer = chainer.optimizers.SGD().setup(model)
optimizer.update(model, numpy.ones((4, 3), 'f'), numpy.zeros(4, 'i'))
print('an update')
''', 2, '--snapshots would keep nothing')]):
        done = run_here(comm, tmp_path / str(number), lines, '--snapshots',
                        'saved', '--every', '5m')
        assert done.returncode == code, done.stderr
        assert said in done.stderr
        assert 'an update' not in done.stdout


#: A script whose phases are left out once they are done, and that dies once.
PHASES = '''
import os, chainer, numpy as np
import chainer.links as L
from chainer import training
np.random.seed(0)
data = [(np.random.randn(3).astype('f'), np.int32(n % 2)) for n in range(8)]
def trainer_of(out, rate, last, inner=False):
    np.random.seed(5)
    model = L.Classifier(L.Linear(3, 2))
    mine = [(x * (1 + rate), t) for x, t in data]
    trainer = training.Trainer(training.StandardUpdater(
        chainer.iterators.SerialIterator(mine, 4, shuffle=False),
        chainer.optimizers.SGD(rate).setup(model)), (last, 'iteration'), out)
    def die(trainer):
        if os.path.exists('die') and [rate, trainer.updater.iteration] == [
                0.01, DIES] and not inner:
            os.remove('die')
            raise SystemExit(9)
    trainer.extend(die, trigger=(1, 'iteration'), priority=-900)
    return trainer, model
def run(name, *given):
    name += '.npz'
    if os.path.exists(name):
        return
    trainer, model = trainer_of(*given)
    INSIDE
    trainer.run()
    chainer.serializers.save_npz(name, model)
    print(name, float(abs(model.predictor.W.array).sum()))
PHASES
'''
INSIDE = '''def probe(trainer):
        inner, model = trainer_of('probe', 0.2, 5, inner=True)
        inner.run()
        trainer.updater.get_optimizer('main').target.predictor.b.array[...] = (
            model.predictor.b.array)
    trainer.extend(probe, trigger=(2, 'iteration'))'''
#: By name: the phases, when the second one dies, and lines more.
LEFT_OUT = {
    'before its first snapshot': ("""
for name, rate in ('first', 0.5), ('second', 0.01):
    run(name, name, rate, 8)""", 1, 'pass'),
    'one folder, other lines': ("""
run('first', 'out', 0.5, 8)
run('second', 'out', 0.01, 8)""", 5, 'pass'),
    'a Trainer inside of one': ("""
for name, rate in ('first', 0.5), ('second', 0.01):
    run(name, name, rate, 8)""", 5, INSIDE)}


def phases(lines, stop, inside):
    return (PHASES.replace('PHASES', lines).replace('INSIDE', inside)
            .replace('DIES', str(stop)))


@on_ranks(1)
def test_a_trainer_goes_on_from_none_but_its_own_snapshot(comm, tmp_path):
    for what, case in LEFT_OUT.items():
        def start(name, code=0, what=what, case=case):
            done = run_here(comm, tmp_path / f'{what} {name}', phases(*case),
                            '--snapshots', 'saved', '--every',
                            '2 iterations')
            assert done.returncode == code, done.stderr
            return done
        whole = start('whole').stdout
        (tmp_path / f'{what} parts').mkdir()
        (tmp_path / f'{what} parts/die').touch()
        first, second = start('parts', 9), start('parts')
        assert first.stdout + second.stdout == whole
        assert ('goes on after' in second.stderr) == (case[1] > 1)


@on_ranks(1, 2)
def test_a_report_of_each_trainer_is_where_the_option_says(comm, tmp_path):
    """Also after a warm-up by hand; of no Trainer there is none."""
    trainers = 3 - comm.size
    by_hand = 'optimizer.update(model, points, points.argmax(1) % 2)\n    '
    done = run_here(
        comm, tmp_path, script((-1, 0), trainers, by_hand * (comm.size == 1)),
        '--report', 'said', *['--pipeline', 2] * (comm.size > 1))
    assert done.returncode == 0, done.stderr
    for folder in ('said', 'said/2')[:trainers]:
        assert (tmp_path / folder / 'report.html').exists()
        found = read_record(str(tmp_path / folder)).intervals
        assert {one.rank for one in found} == {*range(comm.size)}
    assert done.stdout.count('page: ') == trainers
    if comm.size == 1:
        done = run_here(comm, tmp_path / 'none', 'print(1)', '--report', 'x')
        assert 'no chainer.training.Trainer, so there is no' in done.stderr


@on_ranks(2)
def test_shares_that_are_drawn_without_a_seed_are_those_of_the_first_start(
        comm, tmp_path):
    said = [run_here(comm, tmp_path, """
import chainermn
comm = chainermn.create_communicator('naive')
shares = [chainermn.scatter_dataset(list(range(50)), comm, shuffle=True)
          for _ in range(2)]
found = comm.mpi_comm.gather([list(share) for share in shares])
if comm.rank == 0:
    print(found)
""", '--snapshots', 'saved').stdout for _ in range(2)]
    assert len(said[0]) > 200
    assert said[0] == said[1]


@on_ranks(2)
def test_what_cannot_be_written_is_refused_once_at_the_start(comm, tmp_path):
    done = run_here(comm, tmp_path, "print('begins')", '--snapshots',
                    'script.py/saved')
    assert done.returncode == 2
    assert done.stderr.count('saved: Not a directory') == 1
    assert 'begins' not in done.stdout
    assert 'Traceback' not in done.stderr
