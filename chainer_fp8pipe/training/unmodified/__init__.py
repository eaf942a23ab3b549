"""Trains an unmodified Chainer script as a pipeline."""
from .refusal import Refusal, refuse_all
from .script_run import Options, PipelineJob

__all__ = ['Options', 'PipelineJob', 'Refusal', 'refuse_all']
