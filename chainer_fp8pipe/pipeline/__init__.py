"""Pipeline parallelism: schedules as data, and what carries them out.

Nothing is imported here, so that the modules that are pure data (schedule,
checker, simulator, events, partition) can be used without MPI or Chainer.
"""
