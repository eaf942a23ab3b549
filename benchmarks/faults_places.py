"""Where jobs run that faults happen to: a small disk, hosts of a network."""
from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator

from chainer_fp8pipe.launcher.virtual_hosts import INTERFACE, VirtualHosts

_RATE = 1e9             # of a link, in bit/s
_SLOW = 50              # times as slow


@contextlib.contextmanager
def small_disk() -> Iterator[str]:
    """A folder on a file system of its own, in memory."""
    folder = tempfile.mkdtemp(prefix='faults-disk-')
    subprocess.run(['mount', '-t', 'tmpfs', '-o', 'size=48M', 'tmpfs',
                    folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(['umount', '--lazy', folder], check=True)
        os.rmdir(folder)


class TwoHosts(VirtualHosts):
    """Two hosts and a link each; the launcher runs beside them.

    Args:
        ranks: Of the job; each host has half of them.
    """

    def __init__(self, ranks: int) -> None:
        super().__init__(2, _RATE)
        self._ranks = ranks

    def launch_options(self, folder: str) -> list[str]:
        """The options of ``launch``; a file of hosts is in the folder."""
        path = os.path.join(folder, 'hosts')
        with open(path, 'w') as file:
            for host in range(2):
                file.write(f'{self.hosts[host]}:{self._ranks // 2}\n')
        return ['--hostfile', path]

    def launcher_environment(self) -> dict[str, str]:
        """Variables of the launcher."""
        words = self.mpiexec(1, [])
        return {**self.environment(),
                'MPIEXEC': shlex.join(words[:words.index('-n')])}

    def set_link(self, host: int, is_up: bool) -> None:
        """Takes a host's cable out, or puts it in."""
        self.ip(None, [f'link set port{host} '
                       + ('up' if is_up else 'down')])

    def slow_down(self, host: int, is_slow: bool) -> None:
        """Gives a link a fiftieth of its rate, or all of it."""
        for place, device in ((self.hosts[host], INTERFACE),
                              (None, f'port{host}')):
            self.shape(place, device, _SLOW if is_slow else 1)

    def lose(self, host: int) -> None:
        """Ends all processes of a host at once."""
        self.end_processes(self.hosts[host])
