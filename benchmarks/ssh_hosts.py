"""Runs docs/clusters/hostfile.sh as it stands, on hosts that ssh reaches.

    python -m benchmarks.ssh_hosts
    python -m benchmarks.ssh_hosts --kill

Two hosts, node0 and node1 (network namespaces of this machine, see
benchmarks/network), each with an sshd of its own; the script runs on node0 and
trains the digits example.  Keys, settings and known hosts are made anew, in
file systems of the hosts that are gone with them: neither this machine's sshd
nor anybody's ~/.ssh is touched.  Needs root, iproute2 and openssh-server.
"""
from __future__ import annotations

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import threading
import time

from benchmarks.network import NetworkError, Star
from benchmarks.slurm.script_job import environment, write_training

_SCRIPT = pathlib.Path(__file__).parents[1] / 'docs/clusters/hostfile.sh'
_SSHD = '/usr/sbin/sshd'
_PORT = 2222
#: Mounts are per namespace: root's home, of which ssh knows from /etc/passwd,
#: and /run are the host's own.
_PREPARE = f'''
set -e
mount -t tmpfs tmpfs /run
mkdir -m 755 /run/sshd
mkdir -p -m 700 /run/root/.ssh
sed 's,:/root:,:/run/root:,' /etc/passwd > /run/passwd
mount --bind /run/passwd /etc/passwd
cd /run/root/.ssh
cp "$0"/key id_ed25519
cp "$0"/key.pub authorized_keys
cp "$0"/known_hosts .
printf 'Host node*\\n  Port {_PORT}\\n' > config
chmod 600 *
exec {_SSHD} -D -e -f /dev/null -h "$0"/host -p {_PORT} -o UsePAM=no \
    -o PidFile=none -o PasswordAuthentication=no
'''


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--epochs', type=int, default=4, help='default: 4')
    parser.add_argument('--kill', action='store_true',
                        help='kill a rank of node1 in the middle')
    parser.add_argument('command', metavar='COMMAND', nargs='*',
                        help='run that on node0 instead')
    options = parser.parse_args()
    if not os.path.exists(_SSHD):
        sys.exit(f'{_SSHD} is not there (Debian: openssh-server)')
    with tempfile.TemporaryDirectory() as folder:
        try:
            with Star(2, 1e9) as network:
                _serve(network, pathlib.Path(folder))
                return _run(network, pathlib.Path(folder), options)
        except NetworkError as error:
            sys.exit(str(error))


def _serve(network: Star, folder: pathlib.Path) -> None:
    """Starts an sshd on each host, and waits until node0 reaches both."""
    for name in ('key', 'host'):
        subprocess.run(['ssh-keygen', '-q', '-t', 'ed25519', '-N', '', '-f',
                        str(folder / name)], check=True)
    kind, key, *_ = (folder / 'host.pub').read_text().split()
    (folder / 'known_hosts').write_text(''.join(
        f'[{host}]:{_PORT} {kind} {key}\n' for host in network.hosts))
    for index, host in enumerate(network.hosts):
        with open(folder / f'sshd-{host}', 'w') as log:
            subprocess.Popen(network.inside(
                index, ['sh', '-c', _PREPARE, str(folder)]),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    for host in network.hosts:
        _wait(network, folder, host)


def _wait(network: Star, folder: pathlib.Path, host: str) -> None:
    for _ in range(100):
        said = subprocess.run(
            network.inside(0, ['ssh', '-o', 'BatchMode=yes', host,
                               'hostname']), capture_output=True, text=True)
        if said.stdout.strip() == host:
            return
        time.sleep(0.1)
    raise NetworkError(f'{host} is not reached by ssh: {said.stderr}'
                       + (folder / f'sshd-{host}').read_text())


def _run(network: Star, folder: pathlib.Path,
         options: argparse.Namespace) -> int:
    job = folder / 'job'
    job.mkdir()
    write_training(job, options.epochs)
    shutil.copy(_SCRIPT, job)
    if options.kill:
        threading.Thread(target=_kill, args=(network, job),
                         daemon=True).start()
    began = time.monotonic()
    # The namespaces share a kernel, by which UCX takes them for one host.
    code = subprocess.run(
        network.inside(0, ['sh', '-c', 'cd "$0" && exec "$@"', str(job), *(
            options.command or ['sh', _SCRIPT.name])]),
        env={**os.environ, **environment(), **network.environment(),
             'HOME': '/run/root',
             'OMP_NUM_THREADS': '1',
             'OPENBLAS_NUM_THREADS': '1'}).returncode
    print(f'exit code {code} after {time.monotonic() - began:.1f} s; in the '
          f'folder: {", ".join(sorted(os.listdir(job)))}')
    return code


def _kill(network: Star, job: pathlib.Path) -> None:
    """Kills one rank of node1 when there are snapshots."""
    while len(list(job.glob('result/fp8/snapshot_iter_*'))
              + list(job.glob('saved/*'))) < 2:
        time.sleep(0.1)
    subprocess.run(network.inside(1, ['sh', '-c', (
        'kill -KILL $(pgrep -f "chainer_fp8pip[e] run.*trai[n]" | tail -1)')]))


if __name__ == '__main__':
    sys.exit(main())
