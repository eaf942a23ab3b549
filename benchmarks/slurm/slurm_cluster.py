"""A real Slurm on this machine, whose nodes are namespaces."""
from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import string
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.network import NetworkError, Star
from benchmarks.network import missing as missing_network

_TOOLS = {'munged': 'munge', 'slurmctld': 'slurmctld', 'slurmd': 'slurmd',
          'srun': 'slurm-client'}
_RATE = 10e9            # bit/s of each node's link
_TIMEOUT = 5            # seconds until a silent node is down
_PATIENCE = 60.0        # seconds in which daemons start, or a state is reached
_HERE = pathlib.Path(__file__).parent


def missing() -> str | None:
    """Why there can be no such cluster here, in a line; None if it can."""
    if reason := missing_network():
        return reason
    for tool, package in _TOOLS.items():
        if not shutil.which(tool):
            return f'a cluster with Slurm needs {tool} (apt install {package})'
    return None


class SlurmCluster:
    """Nodes ``node0`` and so on, and a host from which jobs are submitted.

    Use it in a ``with`` statement.  Each node has a host name, a network
    device, processes and shared memory of its own; all have this machine's
    files.  When that is left, or this process is killed, all processes are
    gone.

    Args:
        nodes: How many.
        cpus: Of each, as Slurm has it.

    Attributes:
        nodes: Their names.
        submit_host: The name of the host from which jobs are submitted.
        folder: Of Slurm's files, and for those of jobs; removed at the end.

    Raises:
        NetworkError: The cluster cannot be made; the message says why.
    """

    def __init__(self, nodes: int = 4, cpus: int = 2) -> None:
        if reason := missing():
            raise NetworkError(reason)
        self._stack = contextlib.ExitStack()
        try:
            self.folder = pathlib.Path(self._stack.enter_context(
                tempfile.TemporaryDirectory(prefix='slurm-')))
            self._daemons: list[subprocess.Popen] = []
            # They end with the network, which is closed before this.
            self._stack.callback(lambda: [
                daemon.wait() for daemon in self._daemons])
            self._network = self._stack.enter_context(
                Star(nodes, _RATE, switch=True))
            self.nodes = self._network.hosts[:-1]
            self.submit_host = self._network.hosts[-1]
            self._write_configuration(cpus)
            self._start_daemons()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SlurmCluster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends everything and removes the folder."""
        self._stack.close()

    def inside(self, host: str, command: Sequence[str]) -> list[str]:
        """The command for ``subprocess`` that runs ``command`` in a host."""
        return self._network.spaces.inside(host, command)

    def run(self, command: Sequence[str],
            variables: Mapping[str, str] | None = None,
            timeout: float = 300, **options: object
            ) -> subprocess.CompletedProcess:
        """Runs a command where jobs are submitted.

        Args:
            command: It may be ``srun``, ``sbatch`` and so on.
            variables: Of its environment, beside ours.
            timeout: In seconds.
            options: Of ``subprocess.run``.

        Raises:
            subprocess.TimeoutExpired: It has taken longer.
        """
        return subprocess.run(
            self.inside(self.submit_host, command), stdin=subprocess.DEVNULL,
            env={**self.environment(), **(variables or {})},
            timeout=timeout, text=True, **options)

    def ask(self, *command: str) -> str:
        """What a command of Slurm's prints.

        Raises:
            NetworkError: It fails; with what it says.
        """
        done = self.run(command, capture_output=True)
        if done.returncode:
            raise NetworkError(f'{" ".join(command)}: {done.stderr.strip()}')
        return done.stdout.strip()

    def submit(self, *arguments: str,
               variables: Mapping[str, str] | None = None) -> str:
        """Submits a job by ``sbatch`` and returns its number."""
        done = self.run(['sbatch', '--parsable', *arguments], variables,
                        capture_output=True)
        if done.returncode:
            raise NetworkError(f'sbatch: {done.stderr.strip()}')
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol show job`` says, by key: ``JobState`` and so on."""
        words = self.ask('scontrol', '--oneliner', 'show', 'job',
                         number).split()
        return {key: value for key, equals, value in (
            word.partition('=') for word in words) if equals}

    def node_state(self, node: str) -> str:
        """Such as ``idle``, ``allocated`` or ``down*``."""
        return self.ask('sinfo', '--noheader', '--nodes', node, '--format=%T')

    def lose(self, node: str) -> None:
        """A node is lost as by a power failure, without a last word."""
        subprocess.run(self.inside(node, [
            'sh', '-c', f'ip link set {self._network.interface} down; '
            'kill -KILL -1']), capture_output=True)

    def bring_back(self, node: str) -> None:
        """A lost node starts again."""
        subprocess.run(self.inside(node, [
            'ip', 'link', 'set', self._network.interface, 'up']), check=True)
        self._start_node(node)

    def new_folder(self, name: str) -> pathlib.Path:
        """Makes a folder for a job, which is removed at the end."""
        return pathlib.Path(tempfile.mkdtemp(prefix=f'{name}-',
                                             dir=self.folder))

    def environment(self) -> dict[str, str]:
        """Our environment, in which commands of Slurm's find this one."""
        return {**os.environ, 'SLURM_CONF': str(self.folder / 'slurm.conf')}

    def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        """Waits until something is so.

        Raises:
            NetworkError: It is not, after a minute; with the daemons' logs.
        """
        end = time.monotonic() + _PATIENCE
        while True:
            with contextlib.suppress(NetworkError):     # not yet
                if is_so():
                    return
            if time.monotonic() > end:
                raise NetworkError(
                    f'no {what} within {_PATIENCE:g} s:\n' + '\n'.join(
                        path.read_text()[-2000:] for path
                        in sorted(self.folder.glob('*.log'))))
            time.sleep(0.2)

    def _write_configuration(self, cpus: int) -> None:
        for name in 'slurm.conf', 'cgroup.conf':
            (self.folder / name).write_text(string.Template(
                (_HERE / name).read_text()).safe_substitute(
                    controller=self.submit_host, folder=self.folder,
                    timeout=_TIMEOUT, nodes=','.join(self.nodes), cpus=cpus))
        (self.folder / 'state').mkdir()
        key = self.folder / 'munge.key'
        key.touch(0o600)
        key.write_bytes(os.urandom(64))

    def _start_daemons(self) -> None:
        files = {option: str(self.folder / f'munge.{option}') for option in (
            'socket', 'key-file', 'log-file', 'pid-file', 'seed-file')}
        files['key-file'] = str(self.folder / 'munge.key')
        # One for all: hosts share this machine's files, and so its socket.
        self._start(self.submit_host, ['munged', '--foreground', '--force', *(
            word for option, path in files.items()
            for word in (f'--{option}', path))])
        self.wait_for('munged', pathlib.Path(files['socket']).exists)
        self._start(self.submit_host, ['slurmctld', '-D', '-i'])
        for node in self.nodes:
            self._start_node(node)
        self.wait_for('all nodes', lambda: all(
            self.node_state(node) == 'idle' for node in self.nodes))

    def _start_node(self, node: str) -> None:
        (self.folder / f'spool-{node}').mkdir(exist_ok=True)
        self._start(node, ['slurmd', '-D'])

    def _start(self, host: str, command: Sequence[str]) -> None:
        self._daemons.append(subprocess.Popen(
            self.inside(host, command), stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=self.environment(),
            start_new_session=True))        # Ctrl-C is for us
