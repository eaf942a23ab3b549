"""Trainer extensions: reports on the exchange, exact snapshots."""
from .communication_report import CommunicationReport
from .compression_report import CompressionReport
from .snapshot import Snapshot, find_snapshots, resume

__all__ = ['CommunicationReport', 'CompressionReport', 'Snapshot',
           'find_snapshots', 'resume']
