#!/bin/sh
# Waits for the nodes, runs there, and gives them back.
salloc --nodes=2 --ntasks-per-node=2 --time=1:00:00 \
    mpiexec -n 4 python -m chainer_fp8pipe run --communicator fp8 train.py
