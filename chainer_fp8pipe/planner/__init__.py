"""Measures a job, has :mod:`~chainer_fp8pipe.planning` choose, and carries the
choice out."""
