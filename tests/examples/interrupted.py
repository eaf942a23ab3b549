"""Ends a run of an example in the middle, whatever else the machine does."""
import os
import subprocess
import sys
import tempfile
import time

from tests.ranks import end_with_parent, environment, mpiexec

# One rank dies at an update, or stays there until the run is ended.
_SCRIPT = '''
import os, runpy, signal, sys, time
rank, iteration, reached, script = sys.argv[1:5]
sys.argv[:5] = [script]
sys.path.insert(0, os.path.dirname(script))
import chainer_fp8pipe
from chainer.training import StandardUpdater
from mpi4py import MPI
update = StandardUpdater.update
def update_or_stop(updater):
    if (MPI.COMM_WORLD.rank, updater.iteration) == (int(rank), int(iteration)):
        if not reached:
            os.kill(os.getpid(), signal.SIGKILL)
        open(reached, 'w').close()
        time.sleep(3600)
    update(updater)
StandardUpdater.update = update_or_stop
runpy.run_path(script, run_name='__main__')
'''


def interrupted(how, iteration, script, *arguments, ranks=2):
    """Runs an example up to an iteration; returns the launcher's code.

    Args:
        how: ``'a rank'``: the last rank is killed; or a signal for the
            launcher.
        iteration: Updates that are done.
        script: The example.
        arguments: Of the example.
        ranks: How many.
    """
    with tempfile.TemporaryDirectory() as folder:
        reached = '' if how == 'a rank' else os.path.join(folder, 'reached')
        process = subprocess.Popen(
            [*mpiexec(ranks), sys.executable, '-c', _SCRIPT, str(ranks - 1),
             str(iteration), reached, script, *map(str, arguments)],
            env=environment(), stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, preexec_fn=end_with_parent)
        if reached:
            while not os.path.exists(reached) and process.poll() is None:
                time.sleep(0.02)
            # A run that ended by itself was not interrupted.
            assert process.poll() is None
            process.send_signal(how)
        return process.wait()

