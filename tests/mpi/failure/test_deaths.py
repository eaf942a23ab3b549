"""A rank that dies without a word is named, and nothing else is."""
import re
import signal

import pytest

KILLED = 'was killed by SIGKILL (the system does that when memory is short)'
FORK = """
import warnings
warnings.simplefilter('ignore')     # Python 3.12 has one for such forks
def fork_and_die():
    from chainer_fp8pipe.mpi import finalizing
    if not os.fork():
        finalizing._work()          # says goodbye, which is not its to say
        time.sleep(1000)
    os.kill(os.getpid(), signal.SIGKILL)
watch(world)
die(1, fork_and_die)
"""


def named(output, errors):
    """What was said about whom."""
    found = re.findall('^chainer_fp8pipe: (.*), process (\\d+) on host \\S+, '
                       '(.*) in the middle of the job', errors, re.MULTILINE)
    assert len(found) == 1, errors
    who, pid, how = found[0]
    assert f'{pid} will die\n' in output
    return who, how


@pytest.mark.parametrize(('ranks', 'dying', 'make', 'how', 'who', 'words'), [
    (3, 1, "create_communicator('float32')", 'os.kill(os.getpid(), 9)',
     'rank 1 of 3 (worker)', KILLED),
    (3, 0, "create_communicator('naive')", 'os.kill(os.getpid(), 11)',
     'rank 0 of 3 (worker)', 'was killed by SIGSEGV'),
    (4, 3, "create_communicator('fp8', ProcessGrid(world, pipeline=2).data)",
     'os._exit(7)', 'rank 3 of 4 (stage 1 of replica 1)',
     'ended with exit code 7, without an exception or MPI_Finalize,'),
    (3, 2, "watch(world.Split(world.rank % 2), 'stage 0'); "
     "watch(world, 'stage 1'); watch(world)", 'os.kill(os.getpid(), 40)',
     'rank 2 of 3 (stage 1)', 'was killed by signal 40'),
    # Others are not ended by it, but killed by the launcher then.
    (2, 0, 'watch(world)', 'os.kill(os.getpid(), 15)',
     'rank 0 of 2 (worker)', 'was killed by SIGTERM'),
])
def test_a_dead_rank_is_named_with_what_it_was(job, ranks, dying, make, how,
                                               who, words):
    code, output, errors = job.run(
        ranks, f'{make}\ndie({dying}, lambda: {how})')
    assert code != 0
    assert named(output, errors) == (who, words)


def test_an_aggregator_that_dies_is_named(job):
    _, _, errors = job.run(3, """
if world.rank == 2:
    def die():
        while not is_watched(os.getpid()):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Thread(target=die).start()
create_communicator('fp8', algorithm='aggregator')
wait_for_ever()
""")
    assert 'rank 2 of 3 (aggregator 0), process' in errors


def test_a_rank_is_named_at_once_though_a_fork_of_it_goes_on(job):
    launcher = job.start(2, FORK)
    # The fork has all that the rank had open, so that launchers may wait.
    line = next(filter(None, map(str.strip, launcher.stderr)))
    assert line.startswith('chainer_fp8pipe: rank 1 of 2 (worker), process')
    assert KILLED in line
    job.end()
    launcher.communicate(timeout=300)


@pytest.mark.parametrize(('body', 'code'), [
    ('', 0),
    ('sys.exit(3)', 3),
    ('MPI.Finalize(); os._exit(0)', 0),
    ('world.rank or world.Abort(3); wait_for_ever()', 3),
    ('world.rank and wait_for_ever(); raise KeyError("so it goes")', 1),
])
def test_an_end_that_is_meant_or_explained_is_not_a_death(job, body, code):
    found, _, errors = job.run(
        2, f'abort_on_exception()\nwatch(world)\nuntil_watched()\n{body}')
    assert (found, 'chainer_fp8pipe: ' in errors) == (code, False)
    assert ('KeyError' in body) == ('rank 0 of 2 failed' in errors)


@pytest.mark.parametrize('number', [
    signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_ended_names_nobody_and_leaves_nothing(job, number):
    launcher = job.start(3, """
abort_on_exception()
watch(world)
until_watched()
world.rank or os.write(1, b'ready\\n')
time.sleep(1000)
""")
    assert launcher.stdout.readline() == 'ready\n'
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=300)
    assert launcher.returncode != 0
    assert 'chainer_fp8pipe: ' not in errors
    assert job.leaves_nothing()


@pytest.mark.parametrize(('ranks', 'before'), [
    (1, ''),
    (2, "os.environ['CHAINER_FP8PIPE_WATCHDOG'] = '0'"),
    (2, "sys.executable = '/no/python'"),
])
def test_a_job_without_a_watchdog_runs_as_before(job, ranks, before):
    done = job.run(ranks, f"""
{before}
watch(world, 'stage 0')
print(len([one for one in threading.enumerate() if 'watch' in one.name]))
""")
    code, output, errors = done     # ranks print into each other's lines
    assert (code, sorted(output), errors) == (
        0, sorted('0\n' * ranks), '')


def test_ranks_that_differ_in_the_switch_do_not_wait(job):
    _, output, errors = job.run(3, """
if world.rank != 1:
    os.environ['CHAINER_FP8PIPE_WATCHDOG'] = '0'
watch(world)
if world.rank == 1:
    while not is_watched(os.getpid()):
        time.sleep(0.02)
    os.write(1, f'{os.getpid()} will die\\n'.encode())
    os.kill(os.getpid(), 9)
wait_for_ever()
""")
    assert named(output, errors) == ('rank 1 of 3 (worker)', KILLED)
