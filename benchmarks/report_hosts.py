"""Is what RunReport says of clocks, links and ranks true on several hosts?

    python benchmarks/report_hosts.py
    python benchmarks/report_hosts.py links --runs 40

4 hosts around a switch, a rank each (network namespaces of this machine, see
benchmarks/network: root and iproute2), and many short trainings with a record.
``clocks``: each rank has a time namespace of its own, so that its clock is
ahead by a number of seconds that is known; the error of the aligned clock
beside that which the record claims.  ``links``: one host's port, or what goes
from one host to one other, gets a part of the rate; how often the diagnosis
names just that.  ``ranks``: one rank computes more than the others.  All
ranks share the cores of this machine: a rank that works alone while others
wait gets more of them, so that it takes less longer than it computes more.
"""
from __future__ import annotations

import argparse
import json
import pathlib
import statistics
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

from chainer_fp8pipe.report.diagnosis import SLOW_LINK, SLOW_RANK, diagnose
from chainer_fp8pipe.report.records.clock_line import clock_lines
from chainer_fp8pipe.report.records.record_reader import read_record

from environment import RANKS, describe, write_json
from links import shape
from network import NetworkError, Star

_RANKS = pathlib.Path(__file__).with_name('report_hosts_ranks.py')
_HOSTS = 4
_RATES = 500e6, 2e9
_AHEAD = 1000       # seconds that a rank's clock is ahead of the one before
#: The number of a rank, as mpiexec tells it, is known before it starts.
_SHIFTED = ('exec unshare --time --monotonic $(($0 * PMI_RANK)) -- "$@"')
_WORK = 60          # products of matrices, some 10 ms
_PARTS = 'clocks', 'links', 'ranks'


class Case(NamedTuple):
    """Something slow in the network, for each host in turn.

    Attributes:
        name: In the table.
        slow: Makes it so; gets the network and the host's number.
        named: Ranks that a right diagnosis names, by the host's number.
        rates: Of the links, in bit/s.
    """

    name: str
    slow: Callable[[Star, int], None]
    named: Callable[[int], tuple[int, ...]]
    rates: tuple[float, ...] = _RATES[:1]


def port(part, out=True, back=True):
    """Gives a host's port a part of the rate, in one direction or both."""
    def slow(network, host):
        for device_of, device, is_slow in (
                (f'node{host}', 'eth0', out), (None, f'port{host}', back)):
            if is_slow:
                shape(network, device_of, device, network.rate * part)
    return slow


def one_way(part):
    """Gives what a host sends to the next one a part of the rate."""
    def slow(network, host):
        rates = {'1:1': network.rate, '1:2': network.rate * part}
        address = network.address((host + 1) % _HOSTS)
        for line in (
                'qdisc replace dev eth0 root handle 1: htb default 1', *(
                    f'class add dev eth0 parent 1: classid {number} htb rate '
                    f'{rate:.0f}bit burst {network.burst} cburst '
                    f'{network.burst}' for number, rate in rates.items()),
                'filter add dev eth0 parent 1: protocol ip u32 match ip dst '
                f'{address}/32 flowid 1:2'):
            network.spaces.call(f'node{host}', 'tc', *line.split())
    return slow


def _cases():
    yield Case('no slow link', lambda network, host: None, lambda host: (),
               _RATES)
    for said, part in (('1/5', 0.2), ('1/3', 1 / 3), ('1/2', 0.5)):
        rates = _RATES[:1] if said == '1/3' else _RATES
        yield Case(f'a host at {said}', port(part), lambda host: (host,),
                   rates)
        yield Case(f'a host sends at {said}', port(part, back=False),
                   lambda host: (host,), _RATES[:1])
        yield Case(f'a host receives at {said}', port(part, out=False),
                   lambda host: (host,), _RATES[:1])
    for said, part in (('0.3', 0.3), ('1/2', 0.5)):
        yield Case(f'to one other at {said}', one_way(part), lambda host: (
            host, (host + 1) % _HOSTS), _RATES[:1])


def main() -> None:
    options = _arguments()
    found: dict[str, Any] = {}
    print(describe(), flush=True)
    try:
        for part in options.what or _PARTS:
            print(flush=True)
            found[part] = {'clocks': _clocks, 'links': _links,
                           'ranks': _ranks}[part](options.runs)
    except NetworkError as error:
        sys.exit(str(error))
    if options.json:
        write_json(options.json, found)


def _train(network, ahead=None, **settings):
    """Records of so many trainings, which one start of the ranks makes."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(_RANKS), folder, json.dumps(settings)]
        if ahead is not None:
            command = ['sh', '-c', _SHIFTED, str(ahead), *command]
        done = network.run(command, env=RANKS, timeout=600)
        if done.returncode:
            sys.exit(f'the ranks ended with exit code {done.returncode}')
        return [read_record(str(path))
                for path in sorted(pathlib.Path(folder).iterdir())]


# --- clocks ------------------------------------------------------------------

def _clocks(runs):
    rows = []
    print('microseconds; a line aligns a clock between two readings\n'
          f'{"links":<12}{"clocks":<14}{"gradients":<13}{"readings":>8}'
          f'{"claimed: median":>16}{"most":>7}{"error: median":>15}{"most":>7}'
          f'{"most of line":>14}  above claim')
    for rate in _RATES:
        with Star(_HOSTS, rate) as network:
            for ahead in (0, _AHEAD):
                for overlap in ('', 'next_forward'):
                    records = _train(network, ahead, runs=max(2, runs // 4),
                                     width=1024, overlap=overlap)
                    row = {'rate': rate, 'ahead': ahead, 'overlap': overlap,
                           **_clock_errors(records, ahead)}
                    rows.append(row)
                    print(_clock_line(row), flush=True)
    return rows


def _clock_errors(records, ahead):
    """Seconds; of lines, where the events are that were kept."""
    readings = [one for record in records for one in record.clocks]
    lines = []
    for record in records:
        by_rank = clock_lines(record.clocks)
        lines += [
            abs(by_rank[event.rank].offset(event.start + ahead * event.rank)
                - ahead * event.rank) for update in record.updates
            for event in update.events if event.rank]
    return {'claimed': [one.error for one in readings],
            'errors': [abs(one.offset - ahead * one.rank)
                       for one in readings], 'line': max(lines)}


def _clock_line(row):
    claimed, errors = row['claimed'], row['errors']
    above = sum(error > bound for error, bound in zip(errors, claimed,
                                                      strict=True))
    cells = [1e6 * figure for figure in (
        statistics.median(claimed), max(claimed), statistics.median(errors),
        max(errors), row['line'])]
    return (f'{_rate(row["rate"]):<12}'
            + (f'{row["ahead"]} s apart' if row['ahead'] else 'equal'
               ).ljust(14) + ('travel' if row['overlap'] else 'wait'
                              ).ljust(13)
            + '{:>8}{:>16.1f}{:>7.1f}{:>15.2f}{:>7.1f}{:>14.1f}  '.format(
                len(errors), *cells) + str(above))


# --- links and ranks ---------------------------------------------------------

_HEAD = (f'{"links":<12}{"case":<26}{"runs":>5}{"right":>7}{"missed":>8}'
         f'{"other named":>13}{"figure":>8}  {"least - most":<13}')


def _links(runs):
    rows = []
    print(_HEAD + 'ranks named')
    for case in _cases():
        for rate in case.rates:
            found = []
            for host in range(_HOSTS):
                with Star(_HOSTS, rate) as network:
                    case.slow(network, host)
                    found += [_judge(record, SLOW_LINK, case.named(host))
                              for record in _train(
                                  network, runs=_share(runs, host), epochs=2)]
            rows.append(_row(rate, case.name, found))
            print(_diagnosis_line(rows[-1]), flush=True)
    _print_sum(rows)
    return rows


def _ranks(runs):
    rows = []
    print(_HEAD + 'links named')
    with Star(_HOSTS, _RATES[0]) as network:
        for factor in (1.0, 1.5, 2.0, 3.0):
            found = []
            for host in range(_HOSTS):
                is_slow = factor > 1
                found += [
                    _judge(record, SLOW_RANK, (host,) if is_slow else ())
                    for record in _train(
                        network, runs=_share(runs, host), epochs=4,
                        work=_WORK, slow=host, factor=factor)]
            rows.append(_row(
                _RATES[0], f'computes {factor:g} times as much' if is_slow
                else 'no slow rank', found))
            print(_diagnosis_line(rows[-1]), flush=True)
    _print_sum(rows)
    return rows


def _share(runs, host):
    """Of all runs, those in which this host is the slow one."""
    return runs // _HOSTS + (host < runs % _HOSTS)


def _judge(record, kind, wanted):
    """What was named in one run, and whether that is what is slow."""
    findings = diagnose(record)
    named = [finding.ranks for finding in findings if finding.kind == kind]
    return {'right': named == ([wanted] if wanted else []),
            'missed': bool(wanted) and wanted not in named,
            'other': any(ranks != wanted for ranks in named),
            'another_kind': any(
                finding.kind in (SLOW_LINK, SLOW_RANK)
                and finding.kind != kind for finding in findings),
            'figures': [finding.figure for finding in findings
                        if finding.kind == kind and finding.ranks == wanted],
            'said': [finding.text for finding in findings]}


def _row(rate, name, found):
    return {'rate': rate, 'name': name, 'runs': found}


def _diagnosis_line(row):
    found = row['runs']
    figures = [figure for run in found for figure in run['figures']]
    right, missed, other, another = (
        sum(run[name] for run in found)
        for name in ('right', 'missed', 'other', 'another_kind'))
    return (f'{_rate(row["rate"]):<12}{row["name"]:<26}{len(found):>5}'
            f'{right:>7}{missed:>8}{other:>13}' + (
                f'{statistics.median(figures):>8.2f}  '
                + f'{min(figures):.2f} - {max(figures):.2f}'.ljust(13)
                if figures else ' ' * 23) + f'{another:>11}')


def _print_sum(rows):
    found = [run for row in rows for run in row['runs']]
    print(f'right in {sum(run["right"] for run in found)} of {len(found)}',
          flush=True)


def _rate(rate):
    return f'{rate / 1e6:g} Mbit/s'


def _arguments():
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', nargs='*', metavar='PART',
                        help='clocks, links or ranks (default: all)')
    parser.add_argument('--runs', type=int, default=20, metavar='N',
                        help='trainings of each case (default: 20)')
    parser.add_argument('--json', metavar='FILE', help='write raw data')
    options = parser.parse_args()
    if {*options.what} - {*_PARTS}:
        parser.error(f'parts are {", ".join(_PARTS)}')
    if options.runs < _HOSTS:
        parser.error(f'at least {_HOSTS} runs, one for each host')
    return options


if __name__ == '__main__':
    main()
