"""Trainer extensions: reports on the exchange, exact snapshots."""
from .communication_report import CommunicationReport
from .compression_report import CompressionReport
from .pipeline_timeline import PipelineTimeline
from .snapshot import Snapshot, find_snapshots, resume

__all__ = ['CommunicationReport', 'CompressionReport', 'PipelineTimeline',
           'Snapshot', 'find_snapshots', 'resume']
