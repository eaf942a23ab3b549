"""Trains an unmodified Chainer script over several ranks.

Its modules are imported one by one, as a script of ChainerMN's own needs no
pipeline.
"""
