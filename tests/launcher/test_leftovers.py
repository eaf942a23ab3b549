"""What a job has left behind."""
import os
import signal
import sys
import uuid

from chainer_fp8pipe.launcher.attempt import kill_rest, marked

import pytest

from tests.ranks import start_script

pytestmark = pytest.mark.skipif(sys.platform != 'linux',
                                reason='processes are found in /proc')

#: A tree of three processes in sessions of their own.
TREE = '''
import os, time
for depth in range(2):
    if os.fork():
        break
    os.setsid()
else:
    print('ready', flush=True)
time.sleep(1000)
'''


@pytest.fixture
def mark():
    mark = f'TEST_OF_LEFTOVERS={uuid.uuid4()}'
    yield mark
    for pid in marked(mark):
        os.kill(pid, signal.SIGKILL)


def start(mark, code=TREE):
    name, _, value = mark.partition('=')
    process = start_script(0, '-c', code, stderr=None,
                           env={**os.environ, name: value})
    assert process.stdout.readline() == 'ready\n'
    return process


def test_all_processes_of_a_job_end_in_whatever_sessions_they_are(mark):
    process = start(mark)
    other = start(f'{mark}x')
    assert len(marked(mark)) == 3
    kill_rest(mark, 0)
    assert marked(mark) == []
    assert process.wait() == -signal.SIGKILL
    assert other.poll() is None
    kill_rest(f'{mark}x', 0)
    assert other.wait() == -signal.SIGKILL
    # What ends by itself in time is not killed.
    process = start(mark, 'import time; print("ready", flush=True); '
                    'time.sleep(0.3)')
    kill_rest(mark, 60)
    assert process.wait() == 0
