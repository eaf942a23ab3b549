"""Trains an unmodified Chainer script over several ranks."""
from .launch import launch, only_rank_0_prints
from .refusal import Refusal, refuse_together, refusing
from .replicas import ReplicaJob, initialise
from .script_run import Options, PipelineJob, check_updater

__all__ = ['Options', 'PipelineJob', 'Refusal', 'ReplicaJob',
           'check_updater', 'initialise', 'launch', 'only_rank_0_prints',
           'refuse_together', 'refusing']
