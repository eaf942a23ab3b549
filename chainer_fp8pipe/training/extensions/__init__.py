"""Trainer extensions: reports, exact snapshots; averages of weights."""
from .communication_report import CommunicationReport
from .compression_report import CompressionReport
from .follow_epochs import FollowEpochs
from .model_file import save_whole_model
from .moving_average import MovingAverage
from .pipeline_timeline import PipelineTimeline
from .predicted_time import PredictedTime
from .snapshot import Snapshot, find_snapshots, resume

__all__ = ['CommunicationReport', 'CompressionReport', 'FollowEpochs',
           'MovingAverage', 'PipelineTimeline', 'PredictedTime', 'Snapshot',
           'find_snapshots', 'resume', 'save_whole_model']
