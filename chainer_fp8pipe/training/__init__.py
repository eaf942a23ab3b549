"""Iterators, losses, hooks, extensions and updaters for Chainer's Trainer."""
