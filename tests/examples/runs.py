"""Runs of examples: as users start them, several in one job, interrupted."""
import contextlib
import functools
import gzip
import importlib
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy
import pytest

from tests.ranks import run_script, start_script

EXAMPLES = Path(__file__).parents[2] / 'examples'

# Starts a script again and again in the same ranks: imports take seconds.
_TRY = '''
import json, os, sys
script, name, cases = sys.argv[1:]
sys.path.insert(0, os.path.dirname(script))
module = __import__(name)
for case in json.loads(cases):
    sys.argv[:] = [script, *case]
    try:
        module.main()
    except SystemExit as end:
        print(end.code, flush=True)
'''

# The last rank stays at an update until the run is ended.
_STAY = '''
import os, runpy, sys, time
iteration, reached, script = sys.argv[1:4]
sys.argv[:4] = [script]
sys.path.insert(0, os.path.dirname(script))
import chainer_fp8pipe
from chainer.training import StandardUpdater
from mpi4py import MPI
update = StandardUpdater.update
def update_or_stay(updater):
    if (MPI.COMM_WORLD.rank + 1 == MPI.COMM_WORLD.size
            and updater.iteration == int(iteration)):
        open(reached, 'w').close()
        time.sleep(3600)
    update(updater)
StandardUpdater.update = update_or_stay
runpy.run_path(script, run_name='__main__')
'''


def check_refusals(script, cases, out, ranks=2):
    """Each of these is said once, by all ranks together, and ends them.

    Args:
        script: The example.
        cases: Arguments, and what must be said.
        out: That must not be there afterwards.
        ranks: How many.
    """
    done = run_script(ranks, '-c', _TRY, script, script.stem, json.dumps(
        [[*map(str, arguments), '--out', str(out)]
         for arguments, _ in cases]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.replace('\n', '') == ranks * len(cases) * '2'
    for _, message in cases:
        assert done.stderr.count(message) == 1, (message, done.stderr)
    assert done.stderr.count('error: ') == len(cases)
    assert 'Traceback' not in done.stderr
    assert not out.exists()


def interrupted(number, iteration, script, *arguments, ranks=2):
    """Sends mpiexec a signal after so many updates; returns its code."""
    with tempfile.TemporaryDirectory() as folder:
        reached = os.path.join(folder, 'reached')
        process = start_script(
            ranks, '-c', _STAY, iteration, reached, script, *arguments,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while not os.path.exists(reached) and process.poll() is None:
            time.sleep(0.02)
        assert process.poll() is None       # it did not end by itself
        process.send_signal(number)
        return process.wait()


def arrays(path):
    """The bytes of a file's arrays, by name."""
    with numpy.load(path) as archive:
        return {key: archive[key].tobytes() for key in archive.files}


@functools.cache
def module(example, name):
    """A module of an example's, none of another one of the same name."""
    folder = EXAMPLES / example
    own = {file.partition('.')[0] for file in os.listdir(folder)}

    def take_out():
        return {key: sys.modules.pop(key) for key in list(sys.modules)
                if key.partition('.')[0] in own}
    others = take_out()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.syspath_prepend(folder)
            return importlib.import_module(name)
    finally:
        take_out()
        sys.modules.update(others)


@contextlib.contextmanager
def quick_initial_values():
    """Parameters of large networks keep what their memory has."""
    import chainer
    with pytest.MonkeyPatch.context() as patch:
        for kind in 'Normal', 'HeNormal', 'LeCunNormal':
            patch.setattr(getattr(chainer.initializers, kind), '__call__',
                          lambda initializer, array: None)
        yield


# --- data sets ---------------------------------------------------------------

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
