"""A rank enters its job, or is refused; one that fails ends all, and is heard.
"""
import contextlib
import os
import re
import time

import chainer_fp8pipe
from chainer_fp8pipe.__main__ import main
from chainer_fp8pipe.mpi import ALONE, world
from chainer_fp8pipe.mpi.agreement import raise_together
from chainer_fp8pipe.mpi.world import StartError, enter_world
from chainer_fp8pipe.report.quantities import parse_bytes

import pytest
from mpi4py import MPI

from tests.ranks import on_ranks, run_script, start_script

SCRIPT = """
import os, sys
class Fault(Exception):
    def __str__(self):
        return self.args[3]         # wrong, as such methods are
def hook(*of_exception):
    print('the hook of the user', flush=True)
    1 / 0
def fails(place):
    if rank in {ranks} and place == {place!r}:
        {how}
rank = int(os.environ.get('PMI_RANK') or os.environ['OMPI_COMM_WORLD_RANK'])
{first}
import chainer_fp8pipe
fails('before')
comm = chainer_fp8pipe.create_communicator('fp8')
fails('after')
comm.mpi_comm.Barrier()             # the others wait for ever
print('through', flush=True)
"""
#: What rank 1 of 2 does, or both do, the exit code, and what is said once.
ENDS = {
    'an exception before any communicator': (
        'raise FileNotFoundError("no data")', 1,
        r'(?s)rank 1 of 2 failed.*FileNotFoundError: no data'),
    'of all': ('raise ValueError("so it goes")', 1,
               'ValueError: so it goes'),
    'exit before any communicator': ('sys.exit("no data here")', 1,
                                     'no data here'),
    'exit with a code': ('sys.exit(3)', 3, ''),
    'a wish to exit': ('raise SystemExit("no data here")', 1, 'no data here'),
    'closed': ('sys.stderr.close(); raise KeyError("a")', 1,
               "rank 1 of 2 failed, ending all:\nTrace(?s:.*)KeyError: 'a'"),
    'cannot be printed': ('raise Fault("a")', 1, 'rank 1 of 2 failed'),
    'an earlier hook': ('1 / 0', 1, 'the hook of the user'),
    'a later hook': ('sys.excepthook = hook; 1 / 0', 1,
                     'the hook of the user'),
    # What is caught, or of a process of its own, ends nothing.
    'caught': ("""try: sys.exit(3)
        except SystemExit: pass
        import subprocess
        subprocess.run([sys.executable, '-c',
                        'import chainer_fp8pipe; 1 / 0'])""", 0, ''),
    'all leave in order with a code': ('sys.exit(2)', 2, ''),
}


@pytest.mark.parametrize('kind', ENDS)
def test_whatever_ends_a_rank_ends_all_and_is_said(tmp_path, kind):
    how, code, said = ENDS[kind]
    path = tmp_path / 'script.py'
    path.write_text(SCRIPT.format(
        how=how, ranks=[0, 1] if 'all' in kind else [1],
        place='before' if 'before' in kind else 'after',
        first='sys.excepthook = hook' if 'earlier' in kind else ''))
    done = run_script(2, path, timeout=100)
    assert done.returncode == code, done.stderr
    assert len(re.findall(said, done.stdout + done.stderr)) == 1 or not said
    ends = 2 * (code == 0 and 'leave' not in kind)
    assert done.stdout.count('through') == ends


@pytest.mark.parametrize(('action', 'kind', 'traces', 'shown'), [
    # What the script has raised, and a check of the package's own.
    (lambda: int('x'), ValueError, 2, "int('x')"),
    (lambda: parse_bytes('much'), type(None), 1,
     "ValueError: 'much' is no size; write it as in 300 MB or 2 GiB\n")])
def test_the_users_own_code_is_shown_and_nothing_that_leads_there(
        action, kind, traces, shown):
    with pytest.raises(RuntimeError) as raised:
        raise_together(MPI.COMM_SELF, action)
    assert type(world.of_the_user(raised.value)) is kind
    said = world.shown(raised.value)
    assert said.count('Traceback') == traces
    assert shown in said
    assert 'agreement.py' not in said
    raised.value.is_shown = True
    assert 'Traceback' not in world.shown(raised.value)


@pytest.mark.parametrize(('step', 'code', 'said'), [
    # The launcher forgets what is in its pipes when a job ends.
    ('world.end_all_ranks("so it goes", 3)', 3, 'so it goes'),
    # It reads in any order what several ranks have printed meanwhile.
    ('meetings.show_traceback(types.SimpleNamespace(rank=1, size=2))', 0,
     '\nrank 1 of 2 failed:\n')])
def test_nothing_goes_on_before_the_launcher_has_read_why(step, code, said):
    with start_script(0, '-c', f'''import os, types
from chainer_fp8pipe.mpi import world
from chainer_fp8pipe.pipeline import meetings
world._PATIENCE = 1e9
print("ready", flush=True)
try:
    1 / 0
except ZeroDivisionError:
    {step}
os._exit(0)''') as rank:
        assert rank.stdout.readline() == 'ready\n'
        time.sleep(2)
        assert rank.poll() is None
        _, printed = rank.communicate(timeout=300)
    assert rank.returncode == code
    assert said in printed


# --- several processes, each of which is alone as far as MPI knows -----------

_STEP = {'SLURM_NTASKS': '4', 'SLURM_PROCID': '2', 'SLURM_STEP_ID': '0',
         'SLURM_STEP_NUM_TASKS': '4'}
_TWO = {'SLURM_NTASKS': '2', 'SLURM_STEP_NUM_TASKS': '2'}
_NAMES = ('SLURM_', 'PMI', 'OMPI_', 'MPI_LOCAL', 'CHAINER_FP8PIPE_')


@contextlib.contextmanager
def started_with(variables):
    """As if a starter of ranks had set these variables, and no others."""
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if name.startswith(_NAMES):
                patch.delenv(name)
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.mark.parametrize(('vendor', 'remedy'), [
    ('Open MPI', 'srun --mpi=pmix'), ('MPICH', 'srun --mpi=pmi2'),
    ('Intel MPI', 'srun --mpi=pmi2')])
@pytest.mark.parametrize(('variables', 'words'), [
    (_STEP, ["Slurm's srun", 'number 2', 'SLURM_STEP_NUM_TASKS=4']),
    ({'PMI_SIZE': '3', 'PMI_RANK': '0'}, ['PMI', 'number 0', 'PMI_SIZE=3']),
    ({'OMPI_COMM_WORLD_SIZE': '2', 'OMPI_COMM_WORLD_RANK': '1'},
     ["Open MPI's mpirun", 'number 1', 'OMPI_COMM_WORLD_SIZE=2']),
    # MPICH's mpiexec starts one process on each node by srun.
    ({**_STEP, 'SLURM_STEP_NUM_TASKS': '1', 'SLURM_NTASKS': '1',
      'PMI_SIZE': '3', 'PMI_RANK': '2'}, ['number 2', 'PMI_SIZE=3']),
    ({**_STEP, ALONE: '0'}, ['SLURM_STEP_NUM_TASKS=4']),
])
def test_one_of_several_processes_is_not_alone(variables, words, vendor,
                                               remedy, monkeypatch):
    monkeypatch.setattr(MPI, 'get_vendor', lambda: (vendor, (1, 0, 0)))
    with started_with(variables), pytest.raises(StartError) as caught:
        enter_world()
    for word in [*words, vendor, remedy, 'rank 0 of 1', ALONE]:
        assert word in str(caught.value)


@pytest.mark.parametrize('variables', [
    {},
    # salloc's shell
    {'SLURM_NTASKS': '4', 'SLURM_JOB_ID': '1', 'SLURM_TASKS_PER_NODE': '4'},
    # a batch script
    {'SLURM_NTASKS': '4', 'SLURM_JOB_ID': '1', 'SLURM_PROCID': '0'},
    # salloc's shell on a node (use_interactive_step)
    {**_STEP, 'SLURM_PROCID': '0', 'SLURM_STEP_ID': '4294967290',
     'SLURM_STEP_NUM_TASKS': '1'},
    # a batch script that was submitted from a step of 4 tasks
    {**_STEP, 'SLURM_PROCID': '0', 'SLURM_NTASKS': '2'},
    # srun -n 1
    {**_STEP, 'SLURM_NTASKS': '1', 'SLURM_STEP_NUM_TASKS': '1'},
    # mpiexec -n 1 of MPICH's, in a step of two nodes
    {**_TWO, 'PMI_SIZE': '1', 'PMI_RANK': '0'},
    # mpirun -n 1 of Open MPI's
    {**_TWO, 'OMPI_COMM_WORLD_SIZE': '1', 'OMPI_COMM_WORLD_RANK': '0'},
    {**_STEP, ALONE: '1'},
    {**_STEP, 'SLURM_STEP_NUM_TASKS': 'many', 'SLURM_NTASKS': 'many'},
])
def test_a_process_that_was_started_alone_may_be(variables):
    with started_with(variables):
        enter_world()


@on_ranks(2)
def test_ranks_may_be_more_and_what_they_start_is_no_rank(comm):
    with started_with({**_STEP, 'PMI_SIZE': '7'}):
        enter_world()       # they know of each other
    with started_with(_TWO):
        enter_world()
        # It has the rank's variables; without PMI's it comes through.
        done = run_script(
            0, '-c', 'from chainer_fp8pipe.mpi.world import enter_world; '
            'enter_world()', env=os.environ)
    assert done.returncode == 0, done.stderr


# What a script begins with, on all its ranks.
@pytest.mark.parametrize('first', [
    "chainer_fp8pipe.create_communicator('fp8')",
    "chainer_fp8pipe.create_communicator('naive', MPI.COMM_SELF)",
    'chainer_fp8pipe.ProcessGrid(MPI.COMM_WORLD, pipeline=4)',
    'chainer_fp8pipe.partition(None, None, MPI.COMM_WORLD)',
    'chainer_fp8pipe.PipelineUpdater(None, None, MPI.COMM_WORLD)',
    'chainer_fp8pipe.create_grouped_bn_model(None, MPI.COMM_WORLD)',
])
def test_nothing_that_works_on_all_ranks_works_on_each_alone(first):
    with started_with(_STEP), pytest.raises(StartError):
        eval(first, {'MPI': MPI, 'chainer_fp8pipe': chainer_fp8pipe})


def test_a_command_refuses_in_a_line(capsys):
    with started_with(_STEP), pytest.raises(SystemExit) as exit:
        main(['plan', __file__])
    assert exit.value.code == 2
    line, = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m chainer_fp8pipe plan: Slurm's srun has")
