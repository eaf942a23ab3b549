"""Trains an unmodified Chainer script over several ranks."""
