"""Starts a job again when its ranks die: the command ``launch``.

The launcher is no rank: it imports neither MPI nor Chainer, so that it starts
quickly, and outlives every death of the job.
"""
