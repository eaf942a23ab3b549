"""``run --snapshots`` gives scripts snapshots, and has them go on."""
import re

import pytest

from tests.ranks import run_script

#: What a script without ChainerMN trains; TRAINERS of them.
SERIAL = '''
import os
import chainer, numpy
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
    trainer = training.Trainer(updater, (20, 'iteration'))
    MORE
    @training.make_extension(trigger=(1, 'iteration'))
    def stop(trainer):
        if [number, trainer.updater.iteration] == STOP:
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


def run(folder, stop, *options, ranks=1, trainers=1, more='', code=0,
        body=SERIAL):
    script = folder / 'train.py'
    script.write_text(body.replace('MORE', FIRST + more)
                      .replace('STOP', repr(list(stop)))
                      .replace('TRAINERS', str(trainers)))
    done = run_script(ranks, '-m', 'chainer_fp8pipe', 'run', '--snapshots',
                      folder / 'saved', '--every', '6 iterations', *options,
                      script, cwd=folder)
    assert done.returncode == code, done.stderr
    return done


def ends(done):
    """By Trainer, the first update of this run, and the weights."""
    return re.findall(r'from (\d) \[(\d+)\] weights (\[.*\])', done.stdout)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folders(tmp_path):
    found = tmp_path / 'undisturbed', tmp_path / 'disturbed'
    for folder in found:
        folder.mkdir()
    return found


def test_each_trainer_of_a_script_goes_on_from_its_own_snapshot(folders):
    whole, cut = folders
    first = run(whole, (9, 9), trainers=2)
    assert 'where there is none yet; the training begins' in first.stderr
    assert names(whole / 'saved') == [
        '2', 'snapshot_iter_12.npz', 'snapshot_iter_18.npz']
    run(cut, (1, 9), trainers=2, code=7)
    again = run(cut, (9, 9), trainers=2)
    assert [found[1] for found in ends(again)] == ['19', '7']
    assert [found[2] for found in ends(again)] == [
        found[2] for found in ends(first)]
    assert 'goes on after update 6' in again.stderr


def test_a_pipeline_goes_on_from_its_snapshot(folders):
    whole, cut = folders
    options = '--pipeline', '2', '--micro-batches', '2'
    run(whole, (9, 9), *options, ranks=2, more=(
        "trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))"))
    run(cut, (0, 15), *options, ranks=2, code=7, more=(
        "trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))"))
    run(cut, (9, 9), *options, ranks=2, more=(
        "trainer.extend(extensions.LogReport(trigger=(1, 'iteration')))"))
    losses = [re.findall(r'"main/loss": .*', (
        folder / 'result' / 'log').read_text()) for folder in folders]
    assert len(losses[0]) == 20
    assert losses[0] == losses[1]


def test_a_run_whose_snapshots_are_all_damaged_begins_anew(folders):
    whole, cut = folders
    run(cut, (0, 9), code=7)
    (cut / 'saved' / 'snapshot_iter_6.npz').write_bytes(b'cut off')
    again = run(cut, (0, 30))
    assert 'snapshot_iter_6.npz is not whole' in again.stderr
    assert 'the training begins\n' in again.stderr
    assert ends(again) == ends(run(whole, (0, 30)))
    assert (cut / 'saved' / 'snapshot_iter_6.npz.damaged').exists()


def test_a_snapshot_of_the_scripts_own_is_the_one_that_counts(tmp_path):
    own = '''
    from chainer_fp8pipe.training.extensions import Snapshot
    from mpi4py import MPI
    trainer.extend(Snapshot(MPI.COMM_WORLD), trigger=(4, 'iteration'))
    '''
    run(tmp_path, (0, 15), more=own, code=7)
    assert not (tmp_path / 'saved').exists()
    again = run(tmp_path, (9, 9), more=own)
    assert 'has a Snapshot of its own' in again.stderr
    assert ends(again)[0][1] == '13'


def test_a_script_that_resumes_itself_is_not_resumed_again(tmp_path):
    own = '''
    if os.path.exists('mine.npz'):
        chainer.serializers.load_npz('mine.npz', trainer)
    trainer.extend(lambda trainer: chainer.serializers.save_npz(
        'mine.npz', trainer), trigger=(15, 'iteration'), name='save')
    '''
    run(tmp_path, (0, 16), more=own, code=7)
    again = run(tmp_path, (9, 9), more=own)
    assert 'has resumed its Trainer at update 15 itself' in again.stderr
    assert ends(again)[0][1] == '16'


def test_a_loop_without_trainer_is_refused_before_its_first_update(tmp_path):
    script = tmp_path / 'train.py'
    script.write_text('''
import chainer, numpy
model = chainer.links.Classifier(chainer.links.Linear(3, 2))
optimizer = chainer.optimizers.SGD().setup(model)
optimizer.update(model, numpy.ones((4, 3), 'f'), numpy.zeros(4, 'i'))
print('an update')
''')
    done = run_script(1, '-m', 'chainer_fp8pipe', 'run', '--snapshots',
                      'saved', script, cwd=tmp_path)
    assert done.returncode == 2
    assert 'an update' not in done.stdout
    assert '--snapshots would keep nothing' in done.stderr
def test_a_script_that_changes_its_directory_finds_its_snapshots_again(
        tmp_path):
    """As scripts under Hydra do, into a new one at each start."""
    moving = "import os, tempfile; os.chdir(tempfile.mkdtemp(dir='.'))\n"
    script = tmp_path / 'train.py'
    for stop, code in ((0, 9), 7), ((0, 30), 0):
        script.write_text(moving + SERIAL.replace('MORE', FIRST).replace(
            'STOP', repr(list(stop))).replace('TRAINERS', '1'))
        done = run_script(
            1, '-m', 'chainer_fp8pipe', 'run', '--snapshots', 'saved',
            '--every', '6 iterations', script, cwd=tmp_path)
        assert done.returncode == code, done.stderr
    assert [found[1] for found in ends(done)] == ['7']
    assert names(tmp_path / 'saved') == ['snapshot_iter_12.npz',
                                         'snapshot_iter_18.npz']


@pytest.mark.parametrize(('trainers', 'options', 'said'), [
    (0, (), 'the script has run no chainer.training.Trainer, so --snapshots '
     'has kept nothing'),
    (1, ('--every', '5m'), 'ended before its first snapshot was due')])
def test_a_script_that_leaves_no_snapshot_is_told(tmp_path, trainers, options,
                                                  said):
    done = run(tmp_path, (9, 9), *options, trainers=trainers)
    assert said in done.stderr
    assert not (tmp_path / 'saved').exists()


def test_snapshots_that_cannot_be_written_are_refused_at_the_start(tmp_path):
    (tmp_path / 'file').touch()
    script = tmp_path / 'train.py'
    script.write_text("print('begins')")
    done = run_script(2, '-m', 'chainer_fp8pipe', 'run', '--snapshots',
                      tmp_path / 'file' / 'saved', script)
    assert done.returncode == 2
    assert done.stderr.count('saved: Not a directory') == 1
    assert 'begins' not in done.stdout


def test_a_script_that_is_no_python_is_refused_on_all_ranks(tmp_path):
    script = tmp_path / 'train.py'
    script.write_text('import os\nx = = 1\n')
    done = run_script(2, '-m', 'chainer_fp8pipe', 'run', script)
    assert done.returncode == 2
    assert done.stderr.count('x = = 1') == 1
    assert 'Traceback' not in done.stderr
