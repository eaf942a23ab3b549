"""What a job has left behind."""
import os
import signal
import sys
import time
import uuid

from chainer_fp8pipe.launcher import leftovers
from chainer_fp8pipe.launcher.leftovers import (
    end_job,
    is_running,
    kill_rest,
    marked,
    remove_segments,
)

import pytest

from tests.images.processes import eventually
from tests.ranks import run_script, start_script

pytestmark = pytest.mark.skipif(sys.platform != 'linux',
                                reason='processes are found in /proc')

#: A tree of three processes in sessions of their own; the last one is deaf.
TREE = '''
import os, signal, sys, time
for depth in range(2):
    if os.fork():
        break
    os.setsid()
else:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
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
    end_job(mark, 0.1)
    assert marked(mark) == []
    assert process.wait() == -signal.SIGTERM    # it was asked first
    assert other.poll() is None
    end_job(f'{mark}x', 0)
    assert other.wait() == -signal.SIGKILL


def test_what_ends_by_itself_in_time_is_not_killed(mark):
    process = start(mark, 'import time; print("ready", flush=True); '
                    'time.sleep(0.3)')
    kill_rest(mark, 60)
    assert process.wait() == 0


def test_what_cannot_be_killed_is_left_to_the_system(mark, monkeypatch):
    process = start(mark)
    with monkeypatch.context() as patch:
        patch.setattr(leftovers, '_KILLED', 0.1)
        patch.setattr(leftovers, '_send', lambda pid, number: None)
        assert process.pid in kill_rest(mark, 0)
    assert kill_rest(mark, 0) == []
    process.wait()


def test_a_program_runs_as_long_as_it_or_its_fork_does(mark):
    process = start(mark)
    program = process.args
    assert is_running(mark, program)
    assert not is_running(mark, program[:1])
    assert not is_running(f'{mark}x', program)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert is_running(mark, program)
    kill_rest(mark, 0)
    assert not is_running(mark, program)


@pytest.mark.parametrize('says_goodbye', [True, False])
def test_the_guard_ends_the_job_of_a_launcher_that_is_killed(
        mark, says_goodbye):
    process = start(mark)
    run_script(0, '-c', f'''
import os, signal
from chainer_fp8pipe.launcher.leftovers import Guard
guard = Guard({mark!r})
if {says_goodbye}:
    guard.dismiss()
    assert guard._process.returncode == 0
os.kill(os.getpid(), signal.SIGKILL)
''', stdout=None, stderr=None)
    if says_goodbye:
        assert process.poll() is None
    else:
        assert process.wait(60) == -signal.SIGTERM
        eventually(lambda: not marked(mark))
    assert len(marked(mark)) == (3 if says_goodbye else 0)


def test_only_memory_that_is_new_and_unused_is_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(leftovers, '_SEGMENTS', str(tmp_path / 'shm_*'))
    old, used, dead, other = (tmp_path / name for name in (
        'shm_old', 'shm_used', 'shm_dead', 'other'))
    old.touch()
    since = os.stat(old).st_ctime + 0.005
    time.sleep(0.02)
    for path in used, dead, other:
        path.touch()
    with open(used):
        remove_segments(since)
    assert old.exists()
    assert used.exists()
    assert other.exists()
    assert not dead.exists()
