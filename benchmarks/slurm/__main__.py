"""The command line: ``python -m benchmarks.slurm --help``."""
from __future__ import annotations

import argparse
import contextlib
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from benchmarks.network import NetworkError

from .script_job import ScriptJob, environment
from .slurm_cluster import SlurmCluster

_SCRIPTS = pathlib.Path(__file__).parents[2] / 'docs' / 'clusters'
_DESCRIPTION = '''
Starts a real Slurm on this machine, with 4 nodes, and trains the digits
example on it by the job scripts of docs/clusters: by srun, by launch
undisturbed, and by launch while a node is lost, its first one (on which
launch runs) and then its other one.  Slurm puts these jobs back into its
queue, and they must end with the undisturbed bits.  Needs root, Slurm and
munge.

With COMMAND: runs that on the host from which jobs are submitted; bash gives
a shell with srun, sbatch and so on.
'''


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog='python -m benchmarks.slurm', description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--nodes', type=int, default=4, help='default: 4')
    parser.add_argument('--epochs', type=int, default=12,
                        help='of the digits example (default: 12)')
    parser.add_argument('command', metavar='COMMAND', nargs='*')
    options = parser.parse_args(arguments)
    # So that nothing is left when this is ended.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    try:
        began = time.monotonic()
        with SlurmCluster(options.nodes) as cluster:
            if options.command:
                return subprocess.run(
                    cluster.inside(cluster.submit_host, options.command),
                    env={**cluster.environment(), **environment()}).returncode
            print(f'{cluster.ask("srun", "--version")}, {options.nodes} nodes '
                  f'after {time.monotonic() - began:.1f} s', flush=True)
            return _demonstrate(cluster, options.epochs)
    except (NetworkError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1


def _demonstrate(cluster: SlurmCluster, epochs: int) -> int:
    """Prints a line for each job; 1 if one has not its bits."""
    bits, code = None, 0
    for script, lost in (('srun', None), ('launch', None), ('launch', 0),
                         ('launch', 1)):
        began = time.monotonic()
        job = ScriptJob(cluster, _SCRIPTS / f'{script}.sh', epochs)
        what = 'undisturbed'
        if lost is not None:
            what = f'{lose_a_node(cluster, job, lost)} lost'
        state = job.wait()
        if state != 'COMPLETED':
            print(f'{script}.sh, {what}: {state}\n{job.output()}')
            return 1
        bits = bits or job.bits()
        same = job.bits() == bits
        code = code or not same
        print(f'{script}.sh, {what}: {state}, {job.requeues()} times back in '
              f'the queue, {time.monotonic() - began:.0f} s, '
              f'{"the same bits" if same else "OTHER BITS"}', flush=True)
    return int(code)


def lose_a_node(cluster: SlurmCluster, job: ScriptJob, number: int) -> str:
    """Waits for two snapshots, and loses a node of the job; its name."""
    cluster.wait_for('snapshots', lambda: job.snapshots() > 1)
    node = job.nodes()[number]
    cluster.lose(node)
    return node


if __name__ == '__main__':
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
