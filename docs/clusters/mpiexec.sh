#!/bin/sh
#SBATCH --nodes=2 --ntasks-per-node=2 --time=1:00:00
export OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
mpiexec -n "$SLURM_NTASKS" \
    python -m chainer_fp8pipe run --communicator fp8 train.py
