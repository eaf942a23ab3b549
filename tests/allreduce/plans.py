"""Plans to test with, and an interpreter that carries them out on arrays."""
import collections

from chainer_fp8pipe.allreduce.frames import piece_bounds
from chainer_fp8pipe.allreduce.plan import (
    Opcode,
    aggregator,
    compose,
    direct,
    ring,
    torus2d,
)

import numpy
from hypothesis import strategies as st


class Stuck(Exception):
    """Ranks wait for each other, or for a message of another size."""


def interpret(plan, vectors):
    """What every worker has in the end, given the workers' vectors (float64).

    Blocks whose result a worker does not get are NaN.
    """
    ranks = [_Rank(plan, rank, vectors) for rank in range(plan.ranks)]
    messages = collections.defaultdict(collections.deque)
    while any([rank.advance(messages) for rank in ranks]):
        pass
    if any(rank.actions for rank in ranks):
        raise Stuck(ranks)
    return [rank.result for rank in ranks[:plan.workers]]


class _Rank:
    def __init__(self, plan, rank, vectors):
        size = len(vectors[0])
        self.rank = rank
        self.bounds = piece_bounds(0, size, plan.blocks)
        self.total = (vectors[rank].copy() if rank < plan.workers
                      else numpy.zeros(size))
        self.result = numpy.full(size, numpy.nan)
        self.actions = [
            (action, index >= len(plan.reduce[rank]))
            for index, action in enumerate(plan.actions(rank))]

    def advance(self, messages):
        """Whether anything could be done."""
        before = len(self.actions)
        while self.actions and self.step(*self.actions[0], messages):
            del self.actions[0]
        return len(self.actions) < before

    def step(self, action, final, messages):
        kind, peer, start, stop = action
        where = slice(self.bounds[start], self.bounds[stop])
        if kind is Opcode.ENCODE:
            self.total[where] /= peer
            if final:
                self.result[where] = self.total[where]
        elif kind is Opcode.SEND_PARTIAL:
            messages[self.rank, peer].append(self.total[where].copy())
        elif kind is Opcode.SEND_RESULT:
            messages[self.rank, peer].append(self.result[where].copy())
        else:
            return self.receive(kind, where, messages[peer, self.rank])
        return True

    def receive(self, kind, where, queue):
        if not queue:
            return False
        message = queue.popleft()
        if len(message) != where.stop - where.start:
            raise Stuck(self.rank)
        if kind is Opcode.RECEIVE_PARTIAL:
            self.total[where] += message
        else:
            self.result[where] = message
        return True


@st.composite
def plans(draw, ranks=16):
    """A plan of at most so many ranks."""
    kind = draw(st.sampled_from(['one', 'torus', 'two', 'three']))
    if kind == 'one':
        return draw(simple(ranks))
    rows = draw(st.integers(1, max(1, ranks // 2)))
    columns = draw(st.integers(1, max(1, ranks // rows)))
    if kind == 'torus':
        return draw(st.sampled_from(torus2d(rows, columns)))
    servers = draw(st.integers(0, ranks - rows * columns))
    outer = (aggregator(columns, servers) if servers
             else draw(st.sampled_from([direct, ring]))(columns))
    inner = draw(st.sampled_from([direct, ring]))(rows)
    plan = compose(inner, outer, lambda member, group: group * rows + member,
                   draw(st.booleans()))
    if kind == 'three' and not servers and 2 * plan.ranks <= ranks:
        plan = compose(plan, ring(2),
                       lambda member, group: 2 * member + group,
                       draw(st.booleans()))
    return plan


@st.composite
def simple(draw, ranks):
    """``direct``, ``ring`` or ``aggregator``."""
    make = draw(st.sampled_from([direct, ring, aggregator]))
    if make is not aggregator or ranks == 1:
        return draw(st.sampled_from([direct, ring]))(
            draw(st.integers(1, ranks)))
    workers = draw(st.integers(1, ranks - 1))
    return aggregator(workers, draw(st.integers(1, ranks - workers)))
