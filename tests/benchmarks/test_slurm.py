"""The job scripts of the documentation, on a real Slurm."""
import pathlib

import pytest

from benchmarks.slurm import ScriptJob, SlurmCluster, missing
from benchmarks.slurm.__main__ import lose_a_node
from benchmarks.slurm.script_job import environment, write_training

_SCRIPTS = pathlib.Path(__file__).parents[2] / 'docs' / 'clusters'


@pytest.fixture(scope='module')
def cluster():
    if missing():
        pytest.skip(missing())
    with SlurmCluster() as cluster:
        yield cluster


@pytest.fixture(scope='module')
def undisturbed(cluster):
    """A job that nothing has happened to."""
    job = ScriptJob(cluster, _SCRIPTS / 'srun.sh', epochs=4)
    assert job.wait() == 'COMPLETED', job.output()
    return job


def test_mpiexec_finds_the_nodes_of_a_job(cluster, undisturbed):
    job = ScriptJob(cluster, _SCRIPTS / 'mpiexec.sh', epochs=4)
    assert job.wait() == 'COMPLETED', job.output()
    assert 'updates on 4 ranks' in job.output()
    assert job.bits() == undisturbed.bits()


def test_salloc_runs_a_command_on_its_nodes(cluster):
    folder = cluster.new_folder('salloc')
    write_training(folder, epochs=1)
    done = cluster.run(
        ['sh', '-c', 'cd "$0" && exec "$1"', str(folder),
         str(_SCRIPTS / 'salloc.sh')], environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    assert 'updates on 4 ranks' in done.stdout


def test_a_job_whose_node_is_lost_ends_with_the_undisturbed_bits(
        cluster, undisturbed):
    job = ScriptJob(cluster, _SCRIPTS / 'launch.sh', epochs=4)
    lost = lose_a_node(cluster, job, 1)
    assert job.wait() == 'COMPLETED', job.output()
    assert job.requeues() == 1
    assert f'Node failure on {lost}' in job.output()
    assert job.bits() == undisturbed.bits()


def test_srun_without_pmi_starts_no_trainings(cluster):
    folder = cluster.new_folder('none')
    write_training(folder, epochs=1)
    done = cluster.run(
        ['srun', '--mpi=none', '--ntasks=2', '--chdir', str(folder),
         'python', 'train.py'], environment(), capture_output=True)
    assert done.returncode == 1
    assert "StartError: Slurm's srun has started 2 processes" in done.stderr
    assert not (folder / 'result').exists()
