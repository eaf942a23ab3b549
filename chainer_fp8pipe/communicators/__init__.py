"""ChainerMN communicators whose gradient exchange is this package's."""
from .codec_communicator import CodecCommunicator
from .factory import create_communicator

__all__ = ['CodecCommunicator', 'create_communicator']
