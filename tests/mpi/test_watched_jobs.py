"""Jobs that stand still end and name the rank; healthy ones go on."""
import re

from chainer_fp8pipe.mpi.watch import EXIT_CODE, SECONDS

import pytest

from tests.ranks import environment, run_script

TRAIN = """
import ctypes, os, signal, sys, threading, time
import chainer_fp8pipe
from chainer_fp8pipe.mpi import watch
from mpi4py import MPI
import chainer, chainer.links as L, chainermn, numpy
world = MPI.COMM_WORLD
def fault():
    {fault}
communicator = chainer_fp8pipe.create_communicator(
    'fp8', warmup=1, overlap={overlap!r})
model = L.Classifier(chainer.Sequential(L.Linear(100, 200), L.Linear(200, 9)))
optimizer = chainermn.create_multi_node_optimizer(
    chainer.optimizers.SGD(), communicator).setup(model)
for step in range(6):
    if step == 4 and world.rank in {ranks}:
        fault()
    optimizer.update(model, numpy.ones((4, 100), 'f'),
                     numpy.arange(4, dtype='i'))
os.write(1, b'after all\\n')
"""
STOP = 'os.kill(os.getpid(), signal.SIGSTOP)'
BEHIND = 'behind which others wait'
OTHER = 'in another call than the others'


def script(tmp_path, fault, ranks, overlap=False):
    path = tmp_path / 'script.py'
    path.write_text(TRAIN.format(fault=fault, ranks=ranks, overlap=overlap))
    return path


#: Ranks, what some of them do, which, who is named, and why.
STALLS = {
    'it is stopped': (3, STOP, [1], '1', BEHIND),
    'it calls a barrier more': (3, 'world.Barrier()', [2], '2', OTHER),
    'it loops for ever': (
        2, 'while True: pass', [0], '0', BEHIND),
    'a library holds it': (
        3, 'ctypes.PyDLL(None).sleep(100)', [0], '0', BEHIND),
    'its program has ended': (2, 'os._exit(0)', [1], '1', BEHIND),
    'it left in order': (2, 'raise SystemExit', [1], '1',
                         'which others wait for'),
}


@pytest.mark.parametrize('kind', STALLS)
def test_the_rank_for_which_others_wait_is_named_once(tmp_path, kind):
    ranks, fault, where, who, why = STALLS[kind]
    done = run_script(
        ranks, script(tmp_path, fault, where, kind == 'it is stopped'),
        env={**environment(), SECONDS: '1'})
    if kind == 'its program has ended' and done.returncode != EXIT_CODE:
        return      # what starts ranks has noticed first
    assert done.returncode == EXIT_CODE, done.stderr
    found = re.findall(r'the job stands still: .*; the cause: rank '
                       r'([\d, ]+), (.*):\n', done.stderr)
    assert [one for one, _ in found] == [who], done.stderr
    assert found[0][1] == why
    for rank in range(ranks):
        assert f'  rank {rank} of {ranks}, process ' in done.stderr


#: What two ranks do for longer than the limit, which is 0.3 s.
HEALTHY = {
    'slow data and a long computation': (
        'pass', 'time.sleep(5); all(iter(lambda begin=time.monotonic(): '
        'time.monotonic() < begin + 5, False))'),
    'a library holds it': ('watch._LONGER = 100', 'print(ctypes.PyDLL('
                           'None).sleep(7), "left", flush=True)'),
    'a thread loads': (
        'threading.Thread(target=lambda: (time.sleep(6), '
        'world.Send(bytearray(1), 1))).start()',
        'world.Recv(bytearray(1), 0)'),
}


@pytest.mark.parametrize('kind', HEALTHY)
def test_a_healthy_job_is_not_ended(tmp_path, kind):
    """Its rank works, however many limits it takes."""
    first, second = HEALTHY[kind]
    fault = ('watch._LEAST = 0.3\n    if world.rank == 0:\n        '
             f'{first}\n    else:\n        {second}')
    done = run_script(2, script(tmp_path, fault, [0, 1]),
                      env={name: value for name, value in
                           environment().items() if name != SECONDS})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count('after all') == 2
    if 'library' in kind:
        assert '0 left' in done.stdout      # no signal has cut it short
