"""Is what the planner chooses the fastest, and how long does it plan?

    python benchmarks/planning.py --json planning.json
    python benchmarks/planning.py --only memory

In each of 12 jobs (4 models; shared memory, 100 Mbit/s and 1 Gbit/s; 2 and 4
ranks; one whose data are read slowly, one with a slow rank) the planner
chooses, and then every way that it had tried is run again, in turns, for
longer.  ``choice`` is the time of the choice over that of the fastest, and
``script`` that over one process, which is what a script without ChainerMN is.
The aim: within 3 % of the fastest in 11 of 12, never slower than the script,
planned in 30 s.

Networks are virtual ones of this machine (Linux, iproute2).
"""
from __future__ import annotations

import contextlib
import sys
from typing import NamedTuple

from environment import describe, parser, ranks_of, write_json
from network import Star, begin


class Job(NamedTuple):
    """A model on some ranks; ``slow`` is a rank's number, or -1."""

    model: str
    ranks: int
    rate: float = 0.0       # bit/s of a link; 0: shared memory
    reading: float = 0.0    # seconds of a sample
    slow: int = -1

    @property
    def name(self) -> str:
        """For tables and ``--only``."""
        return (f'{self.model}, {self.ranks} ranks, '
                + (f'{self.rate / 1e6:g} Mbit/s' if self.rate else 'memory')
                + ', slow data' * (self.reading > 0)
                + ', slow rank' * (self.slow >= 0))


JOBS = [
    Job('mlp', 2), Job('convolutions', 2), Job('recurrent', 2),
    Job('wide', 2), Job('mlp', 4), Job('convolutions', 2, reading=2e-3),
    Job('mlp', 2, 1e8), Job('wide', 4, 1e8), Job('recurrent', 2, 1e9),
    Job('convolutions', 4, 1e9), Job('wide', 2, 1e9),
    Job('mlp', 4, 1e8, slow=3)]


def main() -> None:
    given = parser(__doc__)
    given.add_argument('--only', default='', metavar='TEXT',
                       help='jobs with this in their names')
    given.add_argument('--short', action='store_true',
                       help='plan and measure for less time: a try')
    options = given.parse_args()
    begin()
    lengths = (dict(budget=4.0, turns=1, seconds=0.3) if options.short else
               dict(budget=16.0, turns=3, seconds=1.5))
    print(describe(), flush=True)
    print(f'{"job":<44}{"planned":>8}{"choice":>8}{"script":>8}  the choice',
          flush=True)
    found = []
    for job in JOBS:
        if options.only not in job.name:
            continue
        one = _run(job, lengths)
        found.append(one)
        _judge(one)
        print(f'{job.name:<44}{one["planning"]:>6.1f} s{one["near"]:>8.2f}'
              f'{one["script"]:>8.2f}  {one["choice"]}', flush=True)
        if options.json:
            write_json(options.json, {'jobs': found})
    if not found:
        sys.exit('no job was run')
    print(f'of {len(found)} choices {_count(found, "near")} are within 3 % '
          f'of the fastest, {_count(found, "script")} no slower than the '
          'script as it was; the slowest plan took '
          f'{max(one["planning"] for one in found):.0f} s')


def _judge(one):
    """Adds what the table says of a job."""
    ways = dict(one['ways'])
    chosen = ways[one['choice']]
    one['near'] = chosen / min(ways.values())
    one['script'] = chosen / ways['one process']


def _count(found, name):
    return sum(one[name] <= 1.03 for one in found)


def _run(job, lengths):
    given = {**job._asdict(), **lengths, 'name': job.name,
             'pinned': job.rate > 0}
    with Star(job.ranks, job.rate) if job.rate else (
            contextlib.nullcontext()) as network:
        return ranks_of('planning_ranks.py', given, job.ranks, network)


if __name__ == '__main__':
    main()
