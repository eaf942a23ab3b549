"""A real Slurm on this machine, and jobs on it whose nodes fail.

    with SlurmCluster(4) as cluster:
        job = ScriptJob(cluster, 'docs/clusters/srun.sh', epochs=2)
        print(job.wait())

Needs root, and Slurm and munge (:func:`missing` says what is); changes
nothing outside of a temporary folder.  From the command line:
``python -m benchmarks.slurm --help``.
"""
from .script_job import ScriptJob
from .slurm_cluster import SlurmCluster, missing

__all__ = ['ScriptJob', 'SlurmCluster', 'missing']
