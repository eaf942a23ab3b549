"""Updaters for ``chainer.training.Trainer``."""
from .pipeline_updater import PipelineUpdater

__all__ = ['PipelineUpdater']
