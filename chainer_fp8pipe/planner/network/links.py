"""Measures the links between the ranks of a job."""
from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from mpi4py import MPI

from ...mpi.agreement import Signature, agree
from ...mpi.groups import nodes_of
from ...planning.job.job_profile import Figure, NetworkFigures
from . import link_findings as findings
from . import link_rounds as rounds
from .link_findings import Rates
from .link_survey import LinkSurvey
from .peers import Peers
from .timed_messages import BETWEEN_HOSTS, INSIDE_HOSTS

# Parts of the budget.  What ends early leaves some of its part.
_COST_PART, _LATENCY_PART, _BURST_PART = 0.08, 0.04, 0.2
_TOGETHER_PART, _ALONE_PART, _LOCAL_PART = 0.33, 0.15, 0.1
_ONE_HOST_PART = 0.5
_MUCH_LONGER = 10       # times the budget: then something is wrong


def measure_network(comm: MPI.Comm, budget: float = 10.0,
                    torus: tuple[int, int] | None = None,
                    patience: float = 30.0) -> NetworkFigures:
    """Measures latencies and rates between all ranks; call it on all of them.

    The first rank of each host sends for the host, in rounds in which all
    hosts are busy in both directions; their number grows as the logarithm of
    that of the hosts.  Then the ranks of each host send to each other.
    Messages are as long as the links' rates make useful.

    A port that is less than half as fast as the median, or a pair of hosts
    that is slower than their ports, is named in ``remarks``.  With two hosts,
    what they share cannot be told from their ports.  Where one rank cannot
    use all that a port passes, ``rate`` is what the rank can.

    Args:
        comm: mpi4py's communicator of all ranks, on which nothing else is
            sent meanwhile.
        budget: Seconds that this may take, about; less time makes fewer
            repeats, at least one.
        torus: Rows and columns, if hosts are wired as a torus and numbered
            row by row: then ports are links between neighbours.
        patience: Seconds after which a rank that does not answer is given
            up.

    Returns:
        The figures, the same bits on all ranks.  Of one rank: no links.

    Raises:
        RuntimeError: A rank does not answer, or failed; on all ranks that can
            be reached.  The message names both ranks and says what to check.
            No messages can be sent on ``comm`` any more.
        ValueError: Arguments are not the same on all ranks, or do not fit the
            hosts; on all ranks.
    """
    peers = Peers(comm, patience, _MUCH_LONGER * budget)
    with peers.failing_together():
        peers.meet()
        hosts = tuple(peers.in_time(lambda: nodes_of(comm)))
    agree(comm, Signature({
        'budget': str(budget), 'patience': str(patience),
        'torus': str(torus)}),
        remedy='Pass the same to measure_network on all ranks.')
    if not (budget > 0 and patience > 0):
        raise ValueError(f'budget={budget} and patience={patience} are '
                         'seconds, more than 0')
    count = max(hosts) + 1
    if torus and (min(torus) < 1 or torus[0] * torus[1] != count):
        raise ValueError(f'torus={torus} is no torus of {count} hosts; pass '
                         'rows and columns whose product that is')
    with peers.failing_together():
        return _figures(LinkSurvey(peers, budget), hosts, torus)


def _figures(survey: LinkSurvey, hosts: tuple[int, ...],
             torus: tuple[int, int] | None) -> NetworkFigures:
    ranks = rounds.ranks_by_host(hosts)
    found: dict[str, Any] = {'remarks': ()}
    if len(hosts) > 1:
        survey.show('what messages cost')
        found['message_cost'], found['byte_cost'] = survey.costs(
            [first for first, *_ in ranks] if len(ranks) > 1 else ranks[0],
            _COST_PART)
    if len(ranks) > 1:
        found |= _between_hosts(survey, ranks, torus, found['message_cost'])
    if len(hosts) > len(ranks):
        inside = _inside_hosts(survey, hosts, found['message_cost'])
        inside['remarks'] += found['remarks']
        found |= inside
    survey.show('')
    return NetworkFigures(hosts, torus=torus, **found)


def _between_hosts(survey: LinkSurvey, ranks: Sequence[Sequence[int]],
                   torus: tuple[int, int] | None, cost: Figure
                   ) -> dict[str, Any]:
    """Figures of the links between hosts, by the ranks of each."""
    speakers = [first for first, *_ in ranks]
    if torus:
        steps = rounds.torus_steps(speakers, *torus)
        everybody = rounds.torus_rounds(speakers, *torus)
        one_way = rounds.torus_one_way(speakers, *torus)
    else:
        steps = everybody = rounds.ring_rounds(speakers)
        one_way = rounds.one_way(speakers)
    survey.show('latency between hosts')
    latency = survey.latency(steps, speakers, _LATENCY_PART, cost)
    survey.show('bursts of links')
    one_direction, burst = survey.bursts(one_way, speakers, _BURST_PART)
    survey.show('rates of all hosts together')
    together = survey.rates(everybody, speakers, _TOGETHER_PART,
                            BETWEEN_HOSTS)
    alone: list[Rates] = []
    if not torus and len(speakers) > 2:
        survey.show('rates of single hosts')
        alone = survey.rates(
            [rounds.pair(findings.fastest_message(rates))
             for rates in together], speakers, _ALONE_PART, BETWEEN_HOSTS)

    def name(rank: int) -> str:
        """A host as users know it: by its ranks."""
        own = next(own for own in ranks if own[0] == rank)
        return (f'the host of rank{"s" if own[1:] else ""} '
                + ', '.join(map(str, own)))
    return {'latency': latency, 'burst': burst,
            **_ports(together, alone, one_direction, name)}


def _ports(together: Sequence[Rates], alone: Sequence[Rates],
           one_direction: Rates, name: Any) -> dict[str, Any]:
    """Rate, trunk and remarks by what was measured between hosts."""
    duplex = findings.half_duplex(one_direction, alone or together)
    if not alone:       # each message has a link of its own
        return {'rate': findings.slowest(findings.messages_of(together)),
                'remarks': duplex + findings.slow_links(together, name)}
    trunk = findings.trunk(together, alone)
    if trunk is not None:
        rate = findings.slowest(findings.messages_of(alone))
        return {'rate': rate, 'trunk': trunk, 'remarks': (
            *duplex, findings.said_trunk(trunk.value, rate.value))}
    ports = findings.ports(together)
    return {'rate': findings.slowest([port.slower for port in ports.values()]),
            'remarks': duplex + findings.slow_ports(ports, name)
            + findings.slow_pairs(together, ports, name)}


def _inside_hosts(survey: LinkSurvey, hosts: Sequence[int], cost: Figure
                  ) -> dict[str, Any]:
    """Figures of messages between ranks of one host."""
    everybody = range(len(hosts))
    local = rounds.local_rounds(hosts)
    part = _LOCAL_PART if max(hosts) else _ONE_HOST_PART
    survey.show('ranks of a host')
    latency = survey.latency(local, everybody, _LATENCY_PART, cost)
    alone, = survey.rates([rounds.local_pairs(hosts)], everybody, part / 3,
                          INSIDE_HOSTS)
    together = survey.rates(local, everybody, part, INSIDE_HOSTS)
    rate = findings.slowest(findings.by_host(together, hosts))
    single = statistics.median(map(statistics.median, alone.values()))
    return {'local_latency': latency, 'local_rate': rate,
            'remarks': findings.said_sharing(single, rate.value)}
