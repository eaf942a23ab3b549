"""The digits example as a job of Slurm's, by a script as users write it."""
from __future__ import annotations

import os
import pathlib
import sys
import time

import numpy

from .slurm_cluster import SlurmCluster

_ROOT = pathlib.Path(__file__).parents[2]
_TRAIN = '''
import runpy, sys
sys.argv[1:] = ['--communicator', 'fp8', '--link', '0', '--resume',
                '--epoch', '{epochs}']
sys.path.insert(0, {folder!r})
runpy.run_path({folder!r} + '/train_digits.py', run_name='__main__')
'''
#: A job has one of these at its end.
_ENDED = {'COMPLETED', 'FAILED', 'CANCELLED', 'NODE_FAIL', 'TIMEOUT'}


class ScriptJob:
    """Submits a script, in a folder that has a ``train.py``.

    ``python`` in the script is this interpreter, and ``train.py`` is the
    digits example with fp8, which writes a snapshot after each epoch.

    Args:
        cluster: Where it runs.
        script: Path of a file for ``sbatch``.
        epochs: Of the training.
        variables: Of the job's environment, beside ours.

    Attributes:
        folder: In which it runs.
        number: Of the job.
    """

    def __init__(self, cluster: SlurmCluster, script: str | os.PathLike,
                 epochs: int, variables: dict[str, str] | None = None
                 ) -> None:
        self._cluster = cluster
        self.folder = cluster.new_folder(pathlib.Path(script).stem)
        write_training(self.folder, epochs)
        self.number = cluster.submit(
            '--chdir', str(self.folder), '--output',
            str(self.folder / 'output'), str(script),
            variables={**environment(), **(variables or {})})

    def state(self) -> str:
        """Such as ``RUNNING``."""
        return self._cluster.job(self.number)['JobState']

    def requeues(self) -> int:
        """How often Slurm has put it back into its queue."""
        return int(self._cluster.job(self.number)['Restarts'])

    def nodes(self) -> list[str]:
        """Of the job, as long as it runs."""
        return self._cluster.ask(
            'scontrol', 'show', 'hostnames',
            self._cluster.job(self.number)['NodeList']).split()

    def output(self) -> str:
        """What it has printed so far."""
        path = self.folder / 'output'
        return path.read_text() if path.exists() else ''

    def snapshots(self) -> int:
        """How many there are."""
        return len(list(self.folder.glob('result/fp8/snapshot_iter_*')))

    def wait(self, seconds: float = 240) -> str:
        """Waits for the job's end and returns its state.

        A job that a failed node has put back into the queue would wait there
        for two minutes, which Slurm has fixed; it may start now.

        Raises:
            TimeoutError: It has not ended in time; with its output.
        """
        end = time.monotonic() + seconds
        while (state := self.state()) not in _ENDED:
            if time.monotonic() > end:
                raise TimeoutError(f'job {self.number} is {state} after '
                                   f'{seconds:g} s:\n{self.output()}')
            if state == 'PENDING' and self.requeues():
                self._cluster.ask('scontrol', 'update',
                                  f'JobId={self.number}', 'StartTime=now')
            time.sleep(0.5)
        return state

    def bits(self) -> dict[str, bytes]:
        """The trained model's arrays."""
        with numpy.load(self.folder / 'result' / 'fp8' / 'model.npz'
                        ) as archive:
            return {name: archive[name].tobytes() for name in archive.files}


def write_training(folder: pathlib.Path, epochs: int) -> None:
    """Writes the ``train.py`` of a job."""
    (folder / 'train.py').write_text(_TRAIN.format(
        epochs=epochs, folder=str(_ROOT / 'examples' / 'digits')))


def environment() -> dict[str, str]:
    """The variables of a shell in which this interpreter is ``python``."""
    return {'PATH': os.pathsep.join([os.path.dirname(sys.executable),
                                     os.environ.get('PATH', '')]),
            'PYTHONPATH': str(_ROOT), 'MPIR_CVAR_ENABLE_HEAVY_YIELD': '1'}
