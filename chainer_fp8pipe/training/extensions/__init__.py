"""Trainer extensions: reports, exact snapshots; averages of weights.

The names are loaded when they are first asked for.
"""
from ..._on_demand import on_demand

_HOMES = {name: f'chainer_fp8pipe.training.extensions.{module}'
          for name, module in (
              ('CommunicationReport', 'communication_report'),
              ('CompressionReport', 'compression_report'),
              ('FollowEpochs', 'follow_epochs'),
              ('MovingAverage', 'moving_average'),
              ('PipelineTimeline', 'pipeline_timeline'),
              ('PredictedTime', 'predicted_time'),
              ('Snapshot', 'snapshot'),
              ('find_snapshots', 'snapshot'),
              ('resume', 'snapshot'),
              ('save_whole_model', 'model_file'))}

__all__ = [*_HOMES]

__getattr__, __dir__ = on_demand(__name__, _HOMES)
