"""Steps in processes of their own, of which none stops the next."""
import os
import sys
import time

from tests.images.processes import eventually, is_alive
from tools.gpu.environment import START_UP
from tools.gpu.steps import Step, run, run_all


def step(script, seconds=30.0, **options):
    return Step('A step', 'It does something.',
                [sys.executable, '-c', script], seconds, **options)


def start_up(folder, inherited):
    """What a Python with this folder on its path does first."""
    (folder / 'sitecustomize.py').write_text(START_UP)
    (folder / 'inherited.txt').write_text(
        ''.join(f'{place}\n' for place in inherited))


def outcomes(*steps, seconds=60.0, folder='.'):
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


def test_a_step_that_is_too_slow_ends_with_its_children(tmp_path):
    slow, done = outcomes(step(
        'import pathlib, subprocess, sys, time\n'
        'child = subprocess.Popen([sys.executable, "-c", '
        '"import time; time.sleep(100)"])\n'
        'print(child.pid, flush=True)\ntime.sleep(100)', 6.0), step('pass'),
        folder=tmp_path)
    assert slow.state == 'out of time'
    assert eventually(lambda: not is_alive(int(slow.output)))
    assert done.state == 'done'


def test_what_a_step_leaves_behind_ends_with_it():
    (outcome,) = outcomes(step(
        'import subprocess, sys\nprint(subprocess.Popen([sys.executable, '
        '"-c", "import time; time.sleep(100)"]).pid)'))
    assert outcome.state == 'done'
    assert eventually(lambda: not is_alive(int(outcome.output)))


def test_a_step_that_does_not_heed_the_end_is_killed():
    (outcome,) = outcomes(step(
        'import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n'
        'time.sleep(100)', 2.0))
    assert outcome.state == 'out of time'


def test_after_the_end_of_all_steps_none_begins():
    first, second = outcomes(step('import time; time.sleep(50)'), step('pass'),
                             seconds=6.0)
    assert first.state == 'out of time'
    assert (second.state, second.why) == ('left out', 'no time was left')


def test_what_cannot_run_here_says_why():
    (outcome,) = outcomes(step('1 / 0', missing='there is no such thing'))
    assert (outcome.state, outcome.why) == (
        'left out', 'there is no such thing')


def test_before_its_time_is_over_a_python_says_where_it_is(tmp_path):
    start_up(tmp_path, [])
    waiting = step('import time\ndef waiting():\n    time.sleep(50)\n'
                   'waiting()', 10.0)
    outcome = run(waiting, time.monotonic() + 60, str(tmp_path),
                  {**os.environ, 'PYTHONPATH': str(tmp_path)})
    assert outcome.state == 'failed'
    assert 'in waiting' in outcome.errors


def test_libraries_of_inherited_packages_are_found_as_ones_own(tmp_path):
    start_up(tmp_path, [str(tmp_path / 'inherited')])
    (tmp_path / 'inherited').mkdir()
    (tmp_path / 'inherited' / 'module.py').write_text('name = "found"')
    outcome = run(step('import module, site; print(module.name, '
                       '*site.getsitepackages())'),
                  time.monotonic() + 60, str(tmp_path),
                  {**os.environ, 'PYTHONPATH': str(tmp_path)})
    found, *places = outcome.output.split()
    assert found == 'found'
    assert places[-1] == str(tmp_path / 'inherited')
    assert len(places) > 1
