"""Measures a job and carries out what :mod:`~chainer_fp8pipe.planning` chose.
"""
