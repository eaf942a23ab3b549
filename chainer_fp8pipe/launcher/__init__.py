"""Starts a job again when its ranks die, without MPI and Chainer."""
