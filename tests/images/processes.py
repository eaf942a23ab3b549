"""What processes are there, and which hold memory of this package."""
from __future__ import annotations

import contextlib
import os
import time


def is_alive(pid):
    """Whether a process is there, and is not merely waiting to be reaped."""
    try:
        with open(f'/proc/{pid}/stat') as file:
            return file.read().rpartition(')')[2].split()[0] not in 'ZX'
    except OSError:
        return False


def memory_of(pid):
    """File numbers of the shared memory that a process maps."""
    with contextlib.suppress(OSError), open(f'/proc/{pid}/maps') as lines:
        return {line.split()[4] for line in lines
                if 'memfd:chainer_fp8pipe' in line}
    return set()


def holders(memory):
    """Processes that map, or have open, any of some shared memory."""
    found = set()
    for name in os.listdir('/proc'):
        if name.isdigit() and (memory_of(name) & memory
                               or _open(name) & memory):
            found.add(int(name))
    return found


def _open(pid):
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(f'/proc/{pid}/fd'):
            with contextlib.suppress(OSError):
                path = f'/proc/{pid}/fd/{name}'
                if 'memfd:chainer_fp8pipe' in os.readlink(path):
                    found.add(str(os.stat(path).st_ino))
    return found


def descriptors(of):
    """How many files of this process are so called."""
    paths = [f'/proc/self/fd/{name}' for name in os.listdir('/proc/self/fd')]
    return sum(of in os.readlink(path) for path in paths
               if os.path.islink(path))


def eventually(condition, seconds=200):
    """Whether something becomes true."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True
