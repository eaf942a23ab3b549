"""A launched job that faults happen to, as seen from outside."""
from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from chainer_fp8pipe.launcher.leftovers import marked

import numpy
from faults_places import TwoHosts

_ROOT = Path(__file__).parent.parent
_INSIDE = _ROOT / 'benchmarks' / 'faults_inside'
_MARK = 'BENCHMARK_OF_FAULTS'


class FaultyJob(NamedTuple):
    """What is launched.

    ``{out}`` stands for the folder of results, and ``#12`` for 12 times how
    long the campaign's jobs are.

    Attributes:
        ranks: Of the job.
        arguments: Of ``launch``, after ``-n``.
        snapshots: The folder of the snapshots.
    """

    ranks: int
    arguments: list[str]
    snapshots: str


JOBS = {
    'digits': FaultyJob(4, [
        'examples/train_digits.py', '--resume', '--epoch', '#12', '--out',
        '{out}'],
        '{out}'),
    'pipeline': FaultyJob(4, [
        'examples/train_divisible.py', '--pipeline', '2', '--resume',
        '--epoch', '#16', '--depth', '4', '--width', '128', '--out', '{out}'],
        '{out}'),
    'script': FaultyJob(4, [
        '--every', '20 iterations', '--communicator', 'fp8', '--warmup',
        '50', 'benchmarks/faults_inside/unmodified.py', '--updates', '#400',
        '--out', '{out}'],
        '{out}/saved'),
}


class Line(NamedTuple):
    """A line of the launcher's output."""

    at: float       # time.monotonic()
    text: str


class FaultyRun:
    """Launches a job in a folder of its own, and watches it.

    Args:
        job: What is launched.
        parent: Where the folder is made.
        options: More options of ``launch``.
        network: On which the ranks are; None: here.
        length: How many times as long the job is as usual.

    Attributes:
        folder: With ``out``, where the results are, and ``tmp``.
        lines: What the launchers have said so far.
        has_ended: Whether the launcher has.
    """

    def __init__(self, job: FaultyJob, parent: str | None = None,
                 options: Sequence[str] = (),
                 network: TwoHosts | None = None, length: int = 1) -> None:
        self.job, self.network, self.length = job, network, length
        self.folder = Path(tempfile.mkdtemp(prefix='faults-', dir=parent))
        (self.folder / 'tmp').mkdir()
        self.mark = f'{_MARK}={uuid.uuid4().hex}'
        self.lines: list[Line] = []
        self.has_ended = False
        self._ended_at = 0.0
        self._options = [*options, *(
            network.launch_options(str(self.folder)) if network else ())]
        self._more = threading.Condition()
        self.launch()

    def launch(self) -> None:
        """Starts a launcher, the first one or after the last has ended."""
        self.has_ended = False
        out = str(self.folder / 'out')
        name, _, value = self.mark.partition('=')
        command = [
            sys.executable, '-m', 'chainer_fp8pipe', 'launch', '-n',
            str(self.job.ranks), '--snapshots', self.snapshots,
            *self._options,
            *(word.replace('{out}', out) if word[0] != '#' else
              str(int(word[1:]) * self.length)
              for word in self.job.arguments)]
        self.launcher = subprocess.Popen(
            command, cwd=_ROOT, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            errors='replace', env={
                'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1',
                'MPIR_CVAR_ENABLE_HEAVY_YIELD': '1', **os.environ,
                'PYTHONPATH': f'{_INSIDE}:{_ROOT}',
                'TMPDIR': str(self.folder / 'tmp'), name: value,
                **(self.network.launcher_environment() if self.network
                   else {})})
        threading.Thread(target=self._read, args=[self.launcher],
                         daemon=True).start()

    @property
    def snapshots(self) -> str:
        """The folder of the snapshots."""
        return self.job.snapshots.replace('{out}', str(self.folder / 'out'))

    def newest(self) -> Path | None:
        """The newest snapshot with all ranks' files; None: there is none."""
        found = {int(match[1]): path for path in Path(self.snapshots).glob(
            '*') if (match := re.fullmatch(r'snapshot_iter_(\d+)\.ranks',
                                           path.name))
            and len([*path.glob('rank*of*.npz')]) == self.job.ranks}
        return found[max(found)] if found else None

    def ranks(self) -> dict[int, int]:
        """The processes of ranks, by their numbers."""
        found = {}
        for pid in marked(self.mark):
            with contextlib.suppress(OSError):
                words = Path(f'/proc/{pid}/cmdline').read_text().split('\0')
                rank = re.search('(?:PMI|OMPI_COMM_WORLD)_RANK=(\\d+)', Path(
                    f'/proc/{pid}/environ').read_text())
                if words[1:4] == ['-m', 'chainer_fp8pipe', 'run'] and rank:
                    found[int(rank[1])] = pid
        return found

    def wait(self, pattern: str, after: int, seconds: float
             ) -> tuple[int, Line, re.Match] | None:
        """The next line with a pattern, from a place in the lines on.

        Returns:
            The place after it, the line and the match; None if there is
            none in time, or the launcher has ended without.
        """
        end = time.monotonic() + seconds
        with self._more:
            while True:
                for place in range(after, len(self.lines)):
                    line = self.lines[place]
                    if match := re.search(pattern, line.text):
                        return place + 1, line, match
                after = max(after, len(self.lines))
                left = end - time.monotonic()
                if left <= 0 or self.has_ended:
                    return None
                self._more.wait(min(left, 1.0))

    def wait_for_the_end(self, seconds: float) -> bool:
        """Waits for the launcher's end; False if it does not come in time."""
        with self._more:
            return self._more.wait_for(lambda: self.has_ended, seconds)

    def seconds(self) -> float:
        """From the first update to the launcher's end."""
        return next((self._ended_at - line.at for line in self.lines
                     if ': update' in line.text), 0.0)

    def bits(self) -> dict[str, bytes] | None:
        """The model's arrays at the end, by rank; None: no snapshot."""
        folder = self.newest()
        if folder is None:
            return None
        found = {}
        for path in folder.iterdir():
            with numpy.load(path) as archive:
                found.update({
                    f'{path.name} {name}': archive[name].tobytes()
                    for name in archive.files
                    if name.startswith('updater/model:')})
        return found

    def left(self) -> list[str]:
        """Processes and temporary files that are left."""
        return [*(f'process {pid}' for pid in marked(self.mark)),
                *map(str, (self.folder / 'tmp').iterdir())]

    def close(self) -> None:
        """Ends everything and removes the folder."""
        with contextlib.suppress(OSError):
            self.launcher.kill()
        self.launcher.wait()
        while found := marked(self.mark):
            for pid in found:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.05)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _read(self, launcher: subprocess.Popen) -> None:
        assert launcher.stderr
        for text in launcher.stderr:
            with self._more:
                self.lines.append(Line(time.monotonic(), text))
                self._more.notify_all()
        launcher.wait()
        with self._more:
            self.has_ended, self._ended_at = True, time.monotonic()
            self._more.notify_all()
