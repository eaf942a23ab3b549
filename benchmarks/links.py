"""What measure_network finds on links whose rates and bursts are known.

    python benchmarks/links.py
    python benchmarks/links.py --only uplink "slow host"

Hosts are network namespaces of this machine (see benchmarks/network), so this
needs root and iproute2.  Known are the rates that a probe of one link at a
time finds, and the size of the token buckets, less Ethernet's, IP's and TCP's
headers.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from environment import RANKS, describe, write_json
from network import NetworkError, Star, Torus

_RANKS = pathlib.Path(__file__).with_name('links_ranks.py')


class Case(NamedTuple):
    """A network, what is changed in it, and which rates follow.

    Attributes:
        build: Makes the network.
        each: Ranks per host.
        change: Of the network, before ranks start.
        rate: Of the slowest port, relative to that of all links.
        trunk: Of all hosts together, relative to that of a link.
    """

    build: Callable[[], Any]
    each: int = 1
    change: Callable[[Any], None] = lambda network: None
    rate: float = 1.0
    trunk: float | None = None


def slow_host(network):
    """Gives the port of host 2 a fifth of the rate, in both directions."""
    for host, device in (('node2', 'eth0'), (None, 'port2')):
        shape(network, host, device, network.rate / 5)


def uplink(network):
    """Divides the hosts over two switches, joined by one more such link."""
    for line in ('link add eth1 type bridge stp_state 0 forward_delay 0',
                 'link add up0 type veth peer name up1',
                 'link set up0 master eth0', 'link set up1 master eth1',
                 'link set port2 master eth1', 'link set port3 master eth1',
                 'link set eth1 up', 'link set up0 up', 'link set up1 up'):
        network.spaces.call(None, 'ip', *line.split())
    for device in ('up0', 'up1'):
        shape(network, None, device, network.rate)


def shape(network, host, device, rate):
    """Gives what a device sends this rate, in bit/s."""
    network.spaces.call(
        host, 'tc', 'qdisc', 'replace', 'dev', device, 'root', 'tbf', 'rate',
        f'{rate:.0f}bit', 'burst', str(network.burst), 'latency', '100ms')


CASES = {
    '100 Mbit/s': Case(lambda: Star(4, 100e6)),
    '500 Mbit/s': Case(lambda: Star(4, 500e6)),
    '1 Gbit/s': Case(lambda: Star(4, 1e9)),
    'two-level': Case(lambda: Star(4, 500e6), each=2),
    'torus': Case(lambda: Torus(3, 3, 200e6)),
    'slow host': Case(lambda: Star(4, 500e6), change=slow_host, rate=1 / 5),
    # Two hosts send to the other two, who send back: twice a link's rate.
    'uplink': Case(lambda: Star(4, 500e6), change=uplink, trunk=2.0),
}


def main() -> None:
    options = _arguments()
    print(describe(), flush=True)
    print(f'{"network":<11} {"figure":<19}{"measured":>10}{"+-":>8}'
          f'{"known":>10}  measured / known')
    found = {}
    for name in options.only or CASES:
        case = CASES[name]
        try:
            with case.build() as network:
                payload = network.payload()
                case.change(network)
                found[name] = {
                    'payload': payload, 'bucket': network.burst,
                    'wire_rate': network.rate, **_run(network, case)}
        except NetworkError as error:
            sys.exit(str(error))
        print('\n'.join(_lines(name, case, found[name])), flush=True)
    if options.json:
        write_json(options.json, found)


def _run(network, case):
    with tempfile.TemporaryDirectory() as folder:
        result = pathlib.Path(folder, 'result.json')
        shape = getattr(network, 'shape', ())
        done = network.run(
            [sys.executable, str(_RANKS), str(result), *map(str, shape)],
            case.each, env=RANKS, timeout=300)
        if done.returncode:
            sys.exit(f'the ranks ended with exit code {done.returncode}')
        return json.loads(result.read_text())


def _lines(name, case, found):
    payload = found['payload'] / 1e6
    trunk = case.trunk and case.trunk * payload
    rows = [
        ('rate [Mbit/s]', _scaled(found['rate'], 8e-6),
         case.rate * payload),
        ('trunk [Mbit/s]', _scaled(found['trunk'], 8e-6), trunk),
        ('burst [KiB]', (found['burst'] / 1024, 0.0),
         found['bucket'] * found['payload'] / found['wire_rate'] / 1024),
        ('latency [us]', _scaled(found['latency'], 1e6), None),
        ('message cost [us]', _scaled(found['message_cost'], 1e6), None),
        ('byte cost [ns]', _scaled(found['byte_cost'], 1e9), None)]
    if case.each > 1:
        rows += [
            ('local [GB/s]', _scaled(found['local_rate'], 1e-9), None),
            ('local latency [us]', _scaled(found['local_latency'], 1e6),
             None)]
    rows.append(('seconds', (found['seconds'], 0.0), None))
    return [_line(name, *row) for row in rows
            if row[1] is not None or row[2] is not None] + [
        f'{"":<11} {remark}' for remark in found['remarks']]


def _line(name, figure, measured, known):
    if measured is None:
        return f'{name:<11} {figure:<19}{"none":>10}{"":>8}{known:>10.4g}'
    value, spread = measured
    line = f'{name:<11} {figure:<19}{value:>10.4g}'
    line += f'{100 * spread:>6.1f} %' if spread else ' ' * 8
    if known is None:
        return line
    return f'{line}{known:>10.4g}  {value / known:.3f}'


def _scaled(figure, factor):
    return figure and (figure[0] * factor, figure[1])


def _arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--only', nargs='+', choices=list(CASES),
                        metavar='NETWORK', help=', '.join(CASES))
    parser.add_argument('--json', metavar='FILE', help='write raw data')
    return parser.parse_args()


if __name__ == '__main__':
    main()
