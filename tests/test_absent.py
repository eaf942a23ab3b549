"""Without MPI, or what a C compiler makes, the rest works, and words say why.

Each table runs in one fresh interpreter that does not find some modules, as
where they are not installed.
"""
import json
import re

import pytest

from tests.ranks import environment, run_script

MPI = r"pip install 'chainer_fp8pipe\[mpich\]'"
COMPILED = '--no-binary.*--editable'
HIDE = '''
import importlib.machinery, sys
_find = importlib.machinery.PathFinder.find_spec
importlib.machinery.PathFinder.find_spec = lambda name, *rest: (
    None if name in {gone} else _find(name, *rest))
'''
TRY = '''
import chainer_fp8pipe, json
said = []
for use in json.load(sys.stdin):
    try:
        exec(use, dict(globals()))
        said.append('works')
    except ImportError as error:
        said.append(str(error))
print(json.dumps(said))
'''

MAIN = 'from chainer_fp8pipe.__main__ import main; main()'
TRAIN = '''
import chainer, numpy
model = chainer.links.Classifier(chainer.links.Linear(3, 2))
data = [(numpy.full(3, i, 'f'), numpy.int32(i % 2)) for i in range(8)]
optimizer = chainer.optimizers.Adam().setup(model)
updater = chainer.training.StandardUpdater(
    chainer.iterators.SerialIterator(data, 4), optimizer)
trainer = chainer.training.Trainer(updater, (2, 'epoch'), out='result')
trainer.extend(chainer.training.extensions.LogReport())
trainer.run()
chainer.serializers.save_npz('model.npz', model)
same = chainer.links.Classifier(chainer.links.Linear(3, 2))
chainer.serializers.load_npz('model.npz', same)
assert (same.predictor.W.array == model.predictor.W.array).all()
'''
PIPELINE = '''
import chainer, numpy
from chainer_fp8pipe import PipelineUpdater, partition
from mpi4py import MPI
data = [(numpy.full(3, i, 'f'), numpy.int32(i % 2)) for i in range(8)]
model = partition(
    chainer.links.Classifier(chainer.links.Linear(3, 2)),
    chainer.dataset.concat_examples(data[:4]), MPI.COMM_SELF,
    micro_batches=2)
PipelineUpdater(
    chainer.iterators.SerialIterator(data, 8),
    chainer.optimizers.Adam().setup(model), MPI.COMM_SELF,
    micro_batches=2).update()
'''
NAMES = ('from chainer_fp8pipe import CenterCrop, Divisible, '
         'ImageFolder, RandomResizedCrop, atomic, batch_arrays, deferred, '
         'large_batch, lazy')
ENCODE = ('import numpy; from chainer_fp8pipe import formats; '
          "formats.encode(numpy.ones(3, 'f'), numpy.zeros(3, 'B'))")
FP8 = "chainer_fp8pipe.create_communicator('fp8')"
FORMATS, ENGINE = ('chainer_fp8pipe.formats._formats',
                   'chainer_fp8pipe.allreduce._engine')
WORKS = 'works$'
#: By what is not found, what users do and what comes of it.
USES = {
    ('mpi4py', 'PIL'): {
        TRAIN: WORKS, NAMES: WORKS, ENCODE: WORKS,
        'import chainermn, chainermn.links': WORKS,
        'import importlib.util\n'
        "assert importlib.util.find_spec('mpi4py') is None": WORKS,
        'from mpi4py import MPI': f'mpi4py is not installed.*{MPI}',
        "import chainermn; chainermn.create_communicator('naive')": MPI,
        FP8: MPI,
        **{f'chainer_fp8pipe.{name}': MPI for name in (
            'PipelineUpdater', 'ProcessGrid', 'RunReport',
            'create_grouped_bn_model', 'partition')},
        'from chainer_fp8pipe.training.extensions import Snapshot': MPI,
        'chainer_fp8pipe.ImageFolder(".", chainer_fp8pipe.CenterCrop(8))':
            r"'chainer_fp8pipe\[images\]'"},
    (FORMATS, ENGINE): {
        TRAIN: WORKS, NAMES: WORKS, PIPELINE: WORKS,
        'from chainer_fp8pipe.formats import _formats\n'
        "assert not hasattr(_formats, '__wrapped__')": WORKS,
        'from chainer_fp8pipe.training.extensions import Snapshot': WORKS,
        ENCODE: f'compiled part {FORMATS} is missing.*{COMPILED}',
        FP8: f'compiled part {ENGINE} is missing.*{COMPILED}'},
}


def python(gone, script, cwd, given='', *arguments, **variables):
    """Runs a script where some modules are not found."""
    return run_script(
        0, '-c', HIDE.format(gone=tuple(gone)) + script, *arguments, cwd=cwd,
        input=given, env={**environment(), **variables})


@pytest.mark.parametrize('gone', USES, ids=', '.join)
def test_what_needs_what_is_absent_says_so_and_the_rest_works(gone, tmp_path):
    run = python(gone, TRY, tmp_path, json.dumps([*USES[gone]]))
    assert run.returncode == 0, run.stderr
    for (use, expected), said in zip(
            USES[gone].items(), json.loads(run.stdout), strict=True):
        assert re.search(expected, said), (use, said)


@pytest.mark.parametrize(('gone', 'command', 'said'), [
    ('mpi4py', 'run train.py', f'run: mpi4py is not installed.*{MPI}'),
    ('mpi4py', 'rum train.py', "error: .*invalid choice: 'rum'"),
    ('onnxruntime', 'export model.npz --class nets:Net --example x.npy',
     r"export: onnxruntime is not installed.*'chainer_fp8pipe\[onnx\]'"),
    (ENGINE, 'bench allreduce', f'bench: the compiled part.*{COMPILED}'),
])
def test_a_command_that_needs_what_is_absent_is_refused_in_a_line(
        gone, command, said, tmp_path):
    run = python([gone], MAIN, tmp_path, '', *command.split())
    assert run.returncode == 2
    assert re.search(said, run.stderr)
    assert 'Traceback' not in run.stderr


def test_help_needs_no_mpi(tmp_path):
    run = python(['mpi4py'], MAIN, tmp_path, '', '--help')
    assert run.returncode == 0
    assert 'install-chainer' in run.stdout
