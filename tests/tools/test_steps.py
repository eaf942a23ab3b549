"""Steps in processes of their own, of which none stops the next."""
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from tests.images.processes import eventually, is_alive
from tools.gpu import steps
from tools.gpu.environment import START_UP
from tools.gpu.steps import Step, run, run_all

#: Seconds of a step that ends by itself; or before, see ``time_over``.
LONG = 300.0


def step(script, seconds=LONG, **options):
    return Step('A step', 'It does something.',
                [sys.executable, '-c', script], seconds, **options)


def start_up(folder, inherited):
    """What a Python with this folder on its path does first."""
    (folder / 'sitecustomize.py').write_text(START_UP)
    (folder / 'inherited.txt').write_text(
        ''.join(f'{place}\n' for place in inherited))


@pytest.fixture
def time_over(monkeypatch, tmp_path):
    """The time of a step is over when it has made the file ``ready``."""
    wait = subprocess.Popen.wait

    def wait_for_file(process, timeout=None):
        if timeout == LONG:
            assert eventually((tmp_path / 'ready').exists)
            raise subprocess.TimeoutExpired(process.args, timeout)
        return wait(process, timeout)
    monkeypatch.setattr(subprocess.Popen, 'wait', wait_for_file)


def outcomes(*steps, seconds=10 * LONG, folder='.'):
    seen = []
    found = run_all(steps, time.monotonic() + seconds, str(folder),
                    os.environ, seen.append)
    assert seen == found
    return found


def test_a_step_that_fails_does_not_stop_the_next():
    failed, missing, done = outcomes(
        step('print("begun"); 1 / 0'),
        Step('Not there', '', ['/no/such/program'], 10),
        step('print("here")'))
    assert (failed.state, failed.why) == ('failed', 'exit status 1')
    assert failed.output == 'begun\n'
    assert 'ZeroDivisionError' in failed.errors
    assert missing.state == 'failed'
    assert 'did not start' in missing.why
    assert (done.state, done.why, done.output) == ('done', '', 'here\n')


def test_a_step_that_crashes_is_told_by_its_signal():
    (outcome,) = outcomes(
        step('import os, signal; os.kill(os.getpid(), signal.SIGSEGV)'))
    assert (outcome.state, outcome.why) == ('failed', 'ended by SIGSEGV')


@pytest.mark.usefixtures('time_over')
def test_a_step_that_is_too_slow_ends_with_its_children(tmp_path):
    slow, done = outcomes(step(
        'import pathlib, subprocess, sys, time\n'
        'child = subprocess.Popen([sys.executable, "-c", '
        '"import time; time.sleep(1000)"])\n'
        'print(child.pid, flush=True)\n'
        'pathlib.Path("ready").touch()\ntime.sleep(1000)'),
        step('pass', LONG - 1), folder=tmp_path)
    assert (slow.state, slow.why) == ('out of time', 'ended after 300 s')
    assert eventually(lambda: not is_alive(int(slow.output)))
    assert done.state == 'done'


def test_what_a_step_leaves_behind_ends_with_it():
    (outcome,) = outcomes(step(
        'import subprocess, sys\nprint(subprocess.Popen([sys.executable, '
        '"-c", "import time; time.sleep(1000)"]).pid)'))
    assert outcome.state == 'done'
    assert eventually(lambda: not is_alive(int(outcome.output)))


@pytest.mark.usefixtures('time_over')
def test_a_step_that_does_not_heed_the_end_is_killed(tmp_path):
    (outcome,) = outcomes(step(
        'import pathlib, signal, time\n'
        'signal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
        'pathlib.Path("ready").touch()\ntime.sleep(1000)'), folder=tmp_path)
    assert outcome.state == 'out of time'


@pytest.mark.usefixtures('time_over')
def test_after_the_end_of_all_steps_none_begins(monkeypatch, tmp_path):
    """The first may take longer than there is time; 4 s are left then."""
    now = [0.0]
    monkeypatch.setattr(steps, 'time', SimpleNamespace(
        monotonic=lambda: now[0]))

    def after(outcome):
        now[0] = LONG - 4
    first, second = run_all(
        [step('import pathlib, time; pathlib.Path("ready").touch(); '
              'time.sleep(1000)', 2 * LONG), step('pass')],
        LONG, str(tmp_path), os.environ, after)
    assert first.state == 'out of time'
    assert (second.state, second.why) == ('left out', 'no time was left')


def test_what_cannot_run_here_says_why():
    (outcome,) = outcomes(step('1 / 0', missing='there is no such thing'))
    assert (outcome.state, outcome.why) == (
        'left out', 'there is no such thing')


def test_before_its_time_is_over_a_python_says_where_it_is(tmp_path):
    start_up(tmp_path, [])
    # The time that it is given passes while it waits.
    path = tmp_path / 'sitecustomize.py'
    path.write_text("""import builtins, faulthandler
later = faulthandler.dump_traceback_later
def note(seconds, exit):
    builtins.time_passes = lambda: (print(seconds, flush=True),
                                    later(.01, exit=exit))
faulthandler.dump_traceback_later = note
""" + path.read_text())
    waiting = step('import time\ndef waiting():\n    time_passes()\n'
                   '    time.sleep(1000)\nwaiting()')
    outcome = run(waiting, time.monotonic() + 2 * LONG, str(tmp_path),
                  {**os.environ, 'PYTHONPATH': str(tmp_path)})
    assert (outcome.state, outcome.output) == ('failed', f'{LONG - 8}\n')
    assert 'in waiting' in outcome.errors


def test_libraries_of_inherited_packages_are_found_as_ones_own(tmp_path):
    start_up(tmp_path, [str(tmp_path / 'inherited')])
    (tmp_path / 'inherited').mkdir()
    (tmp_path / 'inherited' / 'module.py').write_text('name = "found"')
    outcome = run(step('import module, site; print(module.name, '
                       '*site.getsitepackages())'),
                  time.monotonic() + 2 * LONG, str(tmp_path),
                  {**os.environ, 'PYTHONPATH': str(tmp_path)})
    found, *places = outcome.output.split()
    assert found == 'found'
    assert places[-1] == str(tmp_path / 'inherited')
    assert len(places) > 1
