"""Pipeline parallelism: schedules as data, and what carries them out.

Nothing is imported here, so that ``schedules``, which are pure data, can be
used without MPI or Chainer.
"""
