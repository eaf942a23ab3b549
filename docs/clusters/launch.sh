#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=2 --time=24:00:00
#SBATCH --requeue --open-mode=append --signal=B:TERM@60
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
MPIEXEC="srun --mpi=pmi2" exec python -m chainer_fp8pipe launch \
    --snapshots saved --every 5m --communicator fp8 train.py
