"""Trainer extensions: reports, exact snapshots; the model as a whole."""
from .communication_report import CommunicationReport
from .compression_report import CompressionReport
from .pipeline_timeline import PipelineTimeline
from .snapshot import Snapshot, find_snapshots, resume
from .whole_model import save_whole_model

__all__ = ['CommunicationReport', 'CompressionReport', 'PipelineTimeline',
           'Snapshot', 'find_snapshots', 'resume', 'save_whole_model']
