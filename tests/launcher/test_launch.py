"""``python -m chainer_fp8pipe launch``, with a fake ``mpiexec``."""
import contextlib
import shlex
import signal
import sys
import time
from pathlib import Path

from chainer_fp8pipe.launcher import attempt, hosts, launch_command
from chainer_fp8pipe.launcher.launch_command import _parser, divide, main
from chainer_fp8pipe.report.launch_protocol import (
    DONE,
    EARLIER,
    FAILED,
    LAUNCHED,
    RANK,
    UPDATED,
)

import pytest

from tests.images.processes import eventually
from tests.ranks import end_with_parent, environment, start_script

FAKE = Path(__file__).parent / 'fake_mpiexec.py'
DIES = 'raise SystemExit(9)'
#: Ranks have raised an exception whose text is another each time.
RAISES = f'''
import os, sys
sys.exit(f"{FAILED}rank 1 of 2: KeyError: 'process {{os.getpid()}}'")
'''
KILLED = ('rank 1 of 2, process 7 on host h, was killed by SIGTERM')
WITNESSED = f'''
import sys
sys.stderr.write("{RANK}rank 1 of 2 = PID 7 on h\\n")
sys.stderr.flush()
sys.stderr.write("mpirun noticed that process rank 1 with PID 7 on node h "
                 "exited on signal 15 (Terminated).\\n")
sys.stderr.flush()
'''


@pytest.fixture
def launch(tmp_path, capfd):
    """Launches a job of scripts; returns the exit code and what is said."""
    def launch(*scripts, options=('-n', '2')):
        prepare(tmp_path, scripts)
        code = main([*options, str(tmp_path / 'train.py')],
                    environment_for(tmp_path))
        return code, capfd.readouterr().err
    return launch


def prepare(tmp_path, scripts):
    (tmp_path / 'starts').mkdir()
    for number, script in enumerate(scripts):
        (tmp_path / 'starts' / f'{number}.py').write_text(script)
    (tmp_path / 'train.py').touch()


def environment_for(tmp_path):
    return {**environment(),
            'MPIEXEC': shlex.join([sys.executable, str(FAKE),
                                   str(tmp_path / 'starts')])}


def commands(tmp_path):
    return (tmp_path / 'starts' / 'commands').read_text().splitlines()


# --- command lines -----------------------------------------------------------

@pytest.mark.parametrize(('own', 'of_run'), [
    ('-n 8', 'train.py -n 4'), ('-n8 --ranks=8', '--cpu train.py'),
    ('--restarts 3 -n 2', '--communicator fp8 --warmup=5 a -n 3'),
    ('--help', ''), ('-n', ''), ('', '--snapshots saved -n 4')])
def test_a_line_is_divided_between_launcher_and_run(own, of_run):
    words = own.split(), of_run.split()
    assert divide(_parser({}), words[0] + words[1]) == words


@pytest.mark.parametrize(('line', 'message'), [
    ('-n 2', 'there is no script'),
    ('--communicator fp8 -n 2 {}', 'arguments are required: -n/--ranks'),
    ('-n 0 x', "-n/--ranks: '0' is not 1 or more"),
    ('-n 2 --hostfile /nowhere {}', '--hostfile /nowhere: No such'),
])
def test_a_wrong_command_line_is_explained(tmp_path, capsys, monkeypatch,
                                           line, message):
    prepare(tmp_path, [''])
    monkeypatch.chdir(tmp_path)
    words = [word.replace('{}', 'train.py') for word in line.split()]
    with pytest.raises(SystemExit) as exit:
        main(words, environment_for(tmp_path))
    assert exit.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'starts' / 'commands').exists()


def test_ranks_run_the_script_by_the_command_run(launch, tmp_path):
    code, said = launch('', options=(
        '-n', '2', '--snapshots', 'saved', '--communicator', 'fp8'))
    assert code == 0
    assert 'no rank has come to the end of the script' in said
    assert commands(tmp_path) == [shlex.join([
        '-print-all-exitcodes', '-n', '2', sys.executable, '-m',
        'chainer_fp8pipe', 'run', '--snapshots', 'saved', '--communicator',
        'fp8', f'{tmp_path}/train.py'])]


# --- starting again ----------------------------------------------------------

def test_a_job_that_dies_starts_again_until_it_ends_in_order(
        launch, tmp_path):
    """Ranks are told of how many starts before."""
    note = f"""
import os
open('ended', 'a').write(os.environ[{EARLIER!r}])
"""
    code, said = launch(note + WITNESSED + DIES, note + DIES, note)
    assert code == 0
    assert len(commands(tmp_path)) == 3
    table = said.partition('done, after 3 starts\n')[2].splitlines()
    assert table[0].split() == ['start', 'at', 'updates', 'ran', 'ended', 'by']
    assert [line.partition('s  ')[2] for line in table[1:]] == [
        KILLED, 'exit code 9', 'its end, in order']
    assert (tmp_path / 'starts' / 'ended').read_text() == '012'


LATER = [f'import sys; sys.stderr.write("{UPDATED}{update}\\n"); '
         'sys.exit(9)' for update in (1, 5, 9)]


@pytest.mark.parametrize(('scripts', 'restarts', 'code', 'starts', 'said'), [
    # Restarts without progress; to go on at a later update is some.
    ([WITNESSED + DIES], 3, 9, 3, ['starts again in 1 s', f's  {KILLED}']),
    ([*LATER, ''], 2, 0, 4, ['trains: update 9 is done']),
    # The same exception again is the end, whatever its text.
    ([RAISES], 20, 1, 3, ['3 starts in a row have failed in the',
                          "s  rank 1 of 2: KeyError: 'process "]),
    # A command line that ranks refuse is not tried again.
    (['raise SystemExit(2)'], 20, 2, 1, ['is refused']),
])
def test_only_what_may_help_is_tried_again(
        launch, tmp_path, scripts, restarts, code, starts, said):
    found, printed = launch(*scripts, options=(
        '-n', '2', '--restarts', str(restarts)))
    assert (found, len(commands(tmp_path))) == (code, starts)
    assert [words for words in said if words not in printed] == [], printed


@pytest.mark.parametrize(('scripts', 'words'), [
    # Hydra hangs while a fork of a dead rank lives.
    ([WITNESSED + '''
import subprocess, time
subprocess.Popen(['sleep', '1000'], start_new_session=True)
time.sleep(1000)
''', ''], KILLED),
    # And while a child of a rank that is done has the rank's output open.
    ([f'''
import sys, time
sys.stderr.write(2 * "{DONE}\\n")
sys.stderr.flush()
time.sleep(1000)
'''], ''),
])
def test_what_hangs_after_ranks_have_ended_is_ended(
        launch, monkeypatch, scripts, words):
    monkeypatch.setattr(attempt, '_PATIENCE', 0.1)
    monkeypatch.setattr(attempt, '_DONE', 0.1)
    code, said = launch(*scripts)
    assert code == 0
    assert words in said
    assert DONE not in said


# --- hosts -------------------------------------------------------------------

@pytest.mark.parametrize(('comes_back', 'seconds', 'code', 'words'), [
    (False, 1, 1, 'gives up: hosts have not answered'),
    (True, 100, 0, 'start 1: 4 ranks by MPICH\n')])
def test_a_job_starts_as_soon_as_all_hosts_answer(
        launch, tmp_path, monkeypatch, comes_back, seconds, code, words):
    (tmp_path / 'hosts').write_text('localhost:2\n127.0.0.1:2\n')
    asked = []
    monkeypatch.setattr(hosts, '_is_up', lambda host: (
        asked.append(host) or host == 'localhost'
        or comes_back and len(asked) > 2))
    monkeypatch.setattr(launch_command, '_ASK', 0.1)
    monkeypatch.setattr(launch_command, '_HOSTS', seconds)
    found, said = launch('', options=(
        '-n', '4', '--hostfile', str(tmp_path / 'hosts')))
    assert found == code
    assert words in said
    assert said.count('without an answer: 127.0.0.1; asking again') == 1
    assert (tmp_path / 'starts' / 'commands').exists() == (code == 0)


# --- signals -----------------------------------------------------------------

LISTENS = '''
import os, signal, subprocess, time
before = [signal.getsignal(number) for number in (2, 15)]
child = subprocess.Popen(['sleep', '1000'], start_new_session=True)
open('child', 'w').write(str(child.pid))
def note(number, frame):
    with open('signals', 'a') as file:
        file.write(f'{number} ')
for number in signal.SIGINT, signal.SIGTERM:
    signal.signal(number, note)
open('ready', 'w').close()
while not STOP:
    WAIT
assert before == [signal.default_int_handler, 0], before
raise SystemExit(9)
'''


@pytest.fixture
def started(tmp_path):
    """A launcher whose job listens to signals."""
    processes = []

    def started(stop='False', wait='time.sleep(0.01)', head='',
                inherits=lambda: None):
        prepare(tmp_path, [LISTENS.replace('STOP', stop).replace(
            'WAIT', wait)])
        process = start_script(0, '-c', f'''
import sys
from chainer_fp8pipe.launcher import attempt
from chainer_fp8pipe.launcher.launch_command import main
{head}
sys.exit(main(sys.argv[1:]))
''', '-n', '2', tmp_path / 'train.py', env=environment_for(tmp_path),
            stdout=None, preexec_fn=lambda: (end_with_parent(), inherits()))
        processes.append(process)
        assert eventually((tmp_path / 'starts' / 'ready').exists)
        return process
    yield started
    for process in processes:       # nothing of the job is left
        assert process.poll() is not None
    child = int((tmp_path / 'starts' / 'child').read_text())
    with contextlib.suppress(OSError):      # or it is not waited for
        assert LAUNCHED.encode() not in Path(
            f'/proc/{child}/environ').read_bytes()


BOTH = signal.SIGINT, signal.SIGTERM


def ignore():
    """As a shell does for SIGINT, where it starts in the background."""
    for number in *BOTH, signal.SIGQUIT:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize(('number', 'inherits'), [
    (signal.SIGTERM, lambda: None), (signal.SIGINT, ignore),
    (signal.SIGINT, lambda: signal.pthread_sigmask(signal.SIG_BLOCK, BOTH))])
def test_a_signal_is_handed_on_once_and_ends_the_launcher(
        tmp_path, started, number, inherits):
    launcher = started('os.path.exists("signals")', inherits=inherits)
    launcher.send_signal(number)
    said = launcher.communicate(timeout=300)[1]
    assert launcher.returncode == 128 + number, said
    assert f'ended by {number.name}' in said
    assert 'AssertionError' not in said
    assert (tmp_path / 'starts' / 'signals').read_text() == f'{number:d} '
    assert len(commands(tmp_path)) == 1


def test_a_job_that_does_not_heed_a_signal_is_killed(started):
    launcher = started(head='attempt._GRACE = 0.1')
    launcher.send_signal(signal.SIGTERM)
    launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize('wait', [
    'time.sleep(0.01)', 'os.write(2, b"x" * 9999)'])
def test_a_second_signal_ends_everything(tmp_path, started, wait):
    """Also while the terminal takes no output."""
    launcher = started(wait=wait)
    time.sleep(0.5)             # pipes are full by now, or will be
    launcher.send_signal(signal.SIGTERM)
    assert eventually((tmp_path / 'starts' / 'signals').exists)
    launcher.send_signal(signal.SIGINT)
    # Before its output is read.
    assert eventually(lambda: not job_of(launcher), 300)
    launcher.communicate(timeout=300)
    assert launcher.returncode == 128 + signal.SIGINT
    assert (tmp_path / 'starts' / 'signals').read_text() == '15 '


def job_of(launcher):
    """Whether what starts ranks still runs."""
    with open(f'/proc/{launcher.pid}/task/{launcher.pid}/children') as file:
        children = file.read().split()
    found = [Path(f'/proc/{pid}/cmdline') for pid in children]
    return any(str(FAKE) in path.read_text() for path in found
               if path.exists())
