"""Trainer extensions: reports, exact snapshots.

The names are loaded when they are first asked for.
"""
from ..._on_demand import on_demand

_HOMES = {name: f'chainer_fp8pipe.training.{module}'
          for name, module in (
              ('CommunicationReport', 'extensions.reports'),
              ('CompressionReport', 'extensions.reports'),
              ('PipelineTimeline', 'extensions.timeline'),
              ('Snapshot', 'snapshots.snapshot'),
              ('find_snapshots', 'snapshots.snapshot'),
              ('resume', 'snapshots.snapshot'),
              ('save_whole_model', 'snapshots.snapshot'))}

__all__ = [*_HOMES]

__getattr__, __dir__ = on_demand(__name__, _HOMES)
