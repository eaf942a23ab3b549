"""A network of several hosts on this machine, whose links have a rate.

    with Star(4, 500e6) as network:
        print(network.describe())
        network.run(['python', 'benchmark.py'], ranks_per_host=2)

Needs root and iproute2; :func:`missing` says what is.  From the command
line: ``python -m benchmarks.network --help``.
"""
from .namespaces import NetworkError, missing
from .network import Network
from .speed import Speed, table
from .star import Star
from .torus import Torus

__all__ = ['Network', 'NetworkError', 'Speed', 'Star', 'Torus', 'missing',
           'table']
