"""All-reduce algorithms as data: which rank sends which blocks where, when."""
# A bucket is a vector of entries of the wire.  It is cut like this:
#
#     bucket = blocks, as many as the plan has, in one rank's care each
#     block  = frames of a fixed number of bytes; the last may be shorter
#     chunk  = the frames of one number of all blocks: they go through the plan
#              together, and several chunks are under way at a time
#
# A plan is one list of instructions per rank: a reduce-scatter, after which
# every block's sum lies with its owner, and an all-gather that brings it back
# to everybody.  Nothing here knows MPI or compiled code: _engine.c runs steps
# of any plan.  So an algorithm is a function of ten lines and a row of
# ALGORITHMS.  Plans can be put together: `compose` runs one inside groups of
# ranks and another between them, `beside` two at the same time.  Two levels of
# a cluster are the first, and a 2D torus is both.
#
# `steps_of` works out what a message holds: a rank's own contribution or a
# mean, in the wire's format, or a sum, in the form that the framing says.
from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ..mpi import torus_shape

#: Contributions that are summed and encoded in one pass, at most.
MOST_GATHERED = 15

@dataclasses.dataclass(frozen=True)
class Framing:
    """How a vector is cut, and in which form it is summed.

    Attributes:
        frame_bytes: Bytes of a frame on the wire.
        frames_in_flight: Chunks of a plan that are under way at a time.
        form: What partial sums travel in, ``'float16'`` or ``'float32'``.
        shared_memory: Ranks of a node read each other's memory.
    """

    frame_bytes: int = 3 << 14
    frames_in_flight: int = 3
    form: str = 'float32'
    shared_memory: bool = True


class Opcode(enum.Enum):
    """Kinds of actions of a rank on some blocks."""

    SEND_PARTIAL = 'send a partial sum'
    RECEIVE_PARTIAL = 'receive a partial sum and add it'
    ENCODE = 'encode the mean'
    SEND_RESULT = 'send the result'
    RECEIVE_RESULT = 'receive the result'


class Instruction(NamedTuple):
    """One step of one rank.

    ``SEND_PARTIAL`` sends what the rank has received of these blocks so far
    and its own contribution.  ``ENCODE`` makes the sum of ``peer``
    contributions their mean; what is sent from then on is that.
    """

    kind: Opcode
    peer: int           # the other rank; for ENCODE, how many were summed
    start: int          # first block
    stop: int           # last block plus one


Actions = tuple[Instruction, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """An all-reduce of ``ranks`` ranks.

    Attributes:
        name: For messages and tables.
        ranks: How many ranks take part.
        workers: How many of them, the first ones, have a contribution and
            want the result.
        blocks: Into how many equal parts the vector is cut.
        reduce: Per rank, its part of the reduce-scatter; it ends with the
            encoding of the means of the blocks that are in the rank's care.
        gather: Per rank, its part of the all-gather.
    """

    name: str
    ranks: int
    workers: int
    blocks: int
    reduce: tuple[Actions, ...]
    gather: tuple[Actions, ...]

    def actions(self, rank: int) -> Actions:
        """All that ``rank`` does, in this order, with every frame."""
        return (*self.reduce[rank], *self.gather[rank])


class Step(NamedTuple):
    """An instruction, and what its message is.

    Attributes:
        summed: The message is a partial sum of several ranks.  If not, it is
            one rank's contribution or a result.
        fresh: Nothing has been added to these blocks on this rank before.
        is_last: What is received is a result that is not sent on.
        gathered: Of ENCODE, how many contributions were received just before
            it, with nothing else in its sums: they stay where they are until
            then.  Of such a receive: 1.
    """

    action: Instruction
    summed: bool
    fresh: bool
    is_last: bool = False
    gathered: int = 0


def steps_of(plan: Plan, rank: int) -> list[Step]:
    """All that ``rank`` does, in this order, with every chunk."""
    steps = []
    # By sender, whether each of its messages is a sum.
    incoming = {peer: iter([
        bool(added) for action, added in _with_sums(plan, peer)
        if action.kind is Opcode.SEND_PARTIAL and action.peer == rank])
        for peer in {action.peer for action in plan.actions(rank)
                     if action.kind is Opcode.RECEIVE_PARTIAL}}
    for action, added in _with_sums(plan, rank):
        summed = (next(incoming[action.peer])
                  if action.kind is Opcode.RECEIVE_PARTIAL else bool(added))
        steps.append(Step(action, summed, not added))
    return _looked_ahead(steps)


def _looked_ahead(steps: list[Step]) -> list[Step]:
    found = []
    for place, step in enumerate(steps):
        kind, _, start, stop = step.action
        is_last = kind is Opcode.RECEIVE_RESULT and not any(
            action.kind is Opcode.SEND_RESULT
            and action.start < stop and start < action.stop
            for action, *_ in steps[place + 1:])
        found.append(step._replace(is_last=is_last))
        # Compiled code sums so many and a rank's own at once.
        for count in range(1, min(place, MOST_GATHERED) + 1):
            before = steps[place - count]
            if (kind is not Opcode.ENCODE or before.summed
                    or before.action != (Opcode.RECEIVE_PARTIAL,
                                         before.action.peer, start, stop)):
                break
            if before.fresh:
                found[place - count:] = [
                    *(one._replace(gathered=1)
                      for one in found[place - count:place]),
                    step._replace(gathered=count)]
                break
    return found


def _with_sums(plan: Plan, rank: int
               ) -> Iterator[tuple[Instruction, set[int]]]:
    """A rank's actions, each with those of its blocks that hold a sum."""
    sums: set[int] = set()
    for action in plan.actions(rank):
        blocks = range(action.start, action.stop)
        yield action, sums.intersection(blocks)
        if action.kind is Opcode.RECEIVE_PARTIAL:
            sums.update(blocks)
        elif action.kind is Opcode.ENCODE:
            sums.difference_update(blocks)


def cut(start: int, stop: int, parts: int) -> list[int]:
    """Where ``[start, stop)`` is cut into parts, ends included.

    Sizes differ by one at most.
    """
    return [start + (stop - start) * part // parts
            for part in range(parts + 1)]


# --- algorithms --------------------------------------------------------------

def direct(ranks: int) -> Plan:
    """Everybody sends block j to rank j, which adds up and sends the mean.

    2 (P - 1) / P of the vector leaves each rank, as in a ring, in 2 steps
    instead of 2 (P - 1), and no partial sum travels.  It wants a switch.
    """
    reduce, gather = [], []
    for rank in range(ranks):
        # Rotated, so that no rank is everybody's target at the same time.
        after = [(rank + step) % ranks for step in range(1, ranks)]
        before = after[::-1]    # in the order in which they send to us
        reduce.append((
            *(_block(Opcode.SEND_PARTIAL, peer, peer) for peer in after),
            *(_block(Opcode.RECEIVE_PARTIAL, peer, rank) for peer in before)))
        gather.append((
            *(_block(Opcode.SEND_RESULT, peer, rank) for peer in after),
            *(_block(Opcode.RECEIVE_RESULT, peer, peer) for peer in before)))
    return _one_block_each('direct', reduce, gather)


def ring(ranks: int) -> Plan:
    """Partial sums go round: each rank talks to its two neighbours only.

    Block b starts at rank b + 1 and arrives, summed, at rank b (Patarasuk
    and Yuan 2009; the notes on paper 002 count the steps alike).
    """
    reduce, gather = [], []
    for rank in range(ranks):
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        partial, result = [], []
        for step in range(ranks - 1):
            partial += [
                _block(Opcode.SEND_PARTIAL, after, (before - step) % ranks),
                _block(Opcode.RECEIVE_PARTIAL, before,
                       (before - 1 - step) % ranks)]
            result += [
                _block(Opcode.SEND_RESULT, after, (rank - step) % ranks),
                _block(Opcode.RECEIVE_RESULT, before, (before - step) % ranks)]
        reduce.append(tuple(partial))
        gather.append(tuple(result))
    return _one_block_each('ring', reduce, gather)


def aggregator(workers: int, aggregators: int) -> Plan:
    """The last ranks only add up (in-network computing, paper 003).

    A worker sends the vector once and receives it once: half of what a ring
    of many ranks needs.  An aggregator's link carries workers / aggregators
    times as much.
    """
    every = range(workers)
    reduce = [tuple(
        _block(Opcode.SEND_PARTIAL, workers + block, block)
        for block in _rotated(aggregators, worker)) for worker in every]
    gather = [tuple(
        _block(Opcode.RECEIVE_RESULT, workers + block, block)
        for block in _rotated(aggregators, worker)) for worker in every]
    for block in range(aggregators):
        reduce.append((
            *(_block(Opcode.RECEIVE_PARTIAL, worker, block)
              for worker in every), _block(Opcode.ENCODE, workers, block)))
        gather.append(tuple(
            _block(Opcode.SEND_RESULT, worker, block) for worker in every))
    return Plan('aggregator', workers + aggregators, workers, aggregators,
                tuple(reduce), tuple(gather))


def compose(inner: Plan, outer: Plan, rank_of: Callable[[int, int], int],
            encode_between: bool) -> Plan:
    """``inner`` within groups of ranks, then ``outer`` between the groups.

    Args:
        inner: A plan whose ranks are all workers.
        outer: Any plan; ranks of it that are no workers are the last ones
            of the whole, and serve all members.
        rank_of: Gives the rank of (member of the group, group).
        encode_between: Encode the groups' means before they go on, so that
            they cross in the wire's format whatever form sums travel in, at
            the price of one more rounding.

    Raises:
        ValueError: ``inner`` has ranks that are no workers; or ``outer``
            encodes on its way and would take a group's sum for one
            contribution.
    """
    if inner.workers != inner.ranks:
        raise ValueError(f'{inner.name!r} cannot be the inner plan: of its '
                         f'{inner.ranks} ranks {inner.workers} are workers')
    if not encode_between and any(
            action.kind is Opcode.ENCODE for actions in outer.reduce
            for action in _last_encoding(actions)[0]):
        raise ValueError(f'{outer.name!r} encodes means on its way; what it '
                         'is given must be means too (encode_between=True)')
    workers = inner.ranks * outer.workers
    servers = outer.ranks - outer.workers
    reduce: list[list[Instruction]] = [[] for _ in range(workers + servers)]
    gather: list[list[Instruction]] = [[] for _ in reduce]

    def rank(member: int, group: int) -> int:
        if group >= outer.workers:
            return workers + group - outer.workers
        return rank_of(member, group)

    for member in range(inner.ranks):
        before, (mean,) = _last_encoding(inner.reduce[member])
        first = mean.start * outer.blocks
        between = functools.partial(rank, member)
        for group in range(outer.ranks):
            me = rank(member, group)
            inside = functools.partial(rank, group=group)
            if group < outer.workers:
                reduce[me] += _moved(
                    (*before, mean) if encode_between else before,
                    outer.blocks, 0, inside)
            reduce[me] += _moved(outer.reduce[group], 1, first, between,
                                 1 if encode_between else mean.peer)
            gather[me] += _moved(outer.gather[group], 1, first, between)
            if group < outer.workers:
                gather[me] += _moved(inner.gather[member], outer.blocks, 0,
                                     inside)
    for actions in reduce[workers:]:        # servers have some of each member
        actions.sort(key=lambda action: action.kind is Opcode.ENCODE)
    return Plan(f'{inner.name}, then {outer.name}', len(reduce), workers,
                inner.blocks * outer.blocks, tuple(map(tuple, reduce)),
                tuple(map(tuple, gather)))


def beside(one: Plan, other: Plan) -> Plan:
    """Two plans of as many steps, action by action, on a half of the vector.
    """
    def woven(first: Sequence[Actions], second: Sequence[Actions]
              ) -> tuple[Actions, ...]:
        return tuple(tuple(itertools.chain(*zip(
            mine, _moved(theirs, 1, one.blocks, int), strict=True)))
            for mine, theirs in zip(first, second, strict=True))
    return Plan(f'{one.name} | {other.name}', one.ranks, one.workers,
                one.blocks + other.blocks, woven(one.reduce, other.reduce),
                woven(one.gather, other.gather))


def torus2d(rows: int, columns: int, ranks: Sequence[int] | None = None
            ) -> Plan:
    """Rings along rows and columns at the same time.

    One half goes along the rows first and then along the columns, the other
    the other way, so that the links of both dimensions are busy all the time
    (paper 002, the two stages of its 2D algorithm; Ying et al. 2018).
    Partial sums are not encoded between the dimensions.

    Args:
        rows: How many.
        columns: How many.
        ranks: In the order of the torus, row by row; by default counted.
    """
    def rank(row: int, column: int) -> int:
        place = row * columns + column
        return place if ranks is None else ranks[place]

    along_rows, along_columns = ring(columns), ring(rows)
    return beside(compose(along_rows, along_columns,
                          lambda column, row: rank(row, column), False),
                  compose(along_columns, along_rows, rank, False))


def torus_of(nodes: Sequence[Sequence[int]], shape: tuple[int, int]
             ) -> Plan:
    """The torus of the ranks of these nodes, or the ring that it is.

    Args:
        nodes: The ranks of every node.
        shape: Rows and columns; (0, 0): see :func:`.torus_shape`.

    Raises:
        ValueError: The shape is one of another number of ranks.
    """
    ranks = [rank for node in nodes for rank in node]
    rows, columns = shape
    if (rows, columns) == (0, 0):
        sizes = {len(node) for node in nodes}
        rows, columns = torus_shape(
            len(ranks), sizes.pop() if len(sizes) == 1 else 0)
    if rows * columns != len(ranks):
        raise ValueError(
            f'a torus of shape {rows}x{columns} has {rows * columns} ranks, '
            f'not {len(ranks)}; pass a shape whose product is the number of '
            'ranks, or none')
    if 1 in (rows, columns):
        return ring(len(ranks))
    return torus2d(rows, columns, ranks)


# --- the table ---------------------------------------------------------------

class Algorithm(NamedTuple):
    """A row of :data:`ALGORITHMS`.

    Attributes:
        name: As the option ``algorithm`` has it.
        about: What it does, for ``--help``.
        plan: Makes its plan, for the ranks of every node; for two levels
            each node is one.  None: it has none, MPI's own all-reduce adds up
            in the wire's format.
        options: Options that ``plan`` is given, too, and no other has.
        two_level: It can go between nodes whose own ranks have added up.
        has_servers: The last ranks only add up for the others.
        differs: Whether it sends something else than the rows before for so
            many ranks; only then it is tried where ways are compared.
    """

    name: str
    about: str
    plan: Callable[..., Plan] | None
    options: tuple[str, ...] = ()
    two_level: bool = True
    has_servers: bool = False
    differs: Callable[[int], bool] = lambda ranks: False


#: All-reduce algorithms by name; the first is what communicators use.
ALGORITHMS = {row.name: row for row in (
    Algorithm('direct', 'each rank sums a piece',
              lambda nodes: direct(len(nodes)),
              differs=lambda ranks: True),
    Algorithm('ring', 'sums go round a ring',
              lambda nodes: ring(len(nodes)),
              differs=lambda ranks: ranks > 2),
    Algorithm('torus2d', 'sums go round the rows and columns of a torus',
              torus_of, ('shape',), two_level=False,
              differs=lambda ranks: 1 not in torus_shape(ranks, 0)),
    Algorithm('aggregator', 'extra ranks sum',
              lambda nodes, aggregators: aggregator(len(nodes), aggregators),
              ('aggregators',), has_servers=True),
    Algorithm('mpi_op', "MPI_Allreduce sums in the wire's format, as in the "
              'fp8 paper', None))}


def plan_of(row: Algorithm, nodes: Sequence[Sequence[int]], levels: bool,
            given: Mapping[str, Any]) -> Plan:
    """An algorithm's plan.

    Args:
        row: The algorithm.
        nodes: The ranks of every node.
        levels: In nodes first, which have equally many ranks.
        given: Options of a communicator.

    Raises:
        ValueError: Options do not fit the ranks.
    """
    assert row.plan
    options = {option: given[option] for option in row.options}
    if levels:
        return compose(
            direct(len(nodes[0])),
            row.plan([[node] for node in range(len(nodes))], **options),
            lambda member, node: nodes[node][member], encode_between=True)
    if row.two_level:       # nodes do not matter
        nodes = [[rank] for node in nodes for rank in node]
    return row.plan(nodes, **options)


def _one_block_each(name: str, reduce: Sequence[Actions],
                    gather: Sequence[Actions]) -> Plan:
    ranks = len(reduce)
    return Plan(name, ranks, ranks, ranks, tuple(
        (*actions, _block(Opcode.ENCODE, ranks, rank))
        for rank, actions in enumerate(reduce)), tuple(gather))


def _last_encoding(actions: Actions) -> tuple[Actions, Actions]:
    """Splits a reduce-scatter before the means that it ends with."""
    place = len(actions)
    while place and actions[place - 1].kind is Opcode.ENCODE and not any(
            later.start < actions[place - 1].stop
            and actions[place - 1].start < later.stop
            for later in actions[place:]):      # of a group of one
        place -= 1
    return actions[:place], actions[place:]


def _block(kind: Opcode, peer: int, block: int) -> Instruction:
    return Instruction(kind, peer, block, block + 1)


def _rotated(count: int, first: int) -> list[int]:
    return [(first + step) % count for step in range(count)]


def _moved(actions: Actions, factor: int, offset: int,
           peer_of: Callable[[int], int], more: int = 1
           ) -> list[Instruction]:
    """The same actions of other ranks, on other blocks.

    What is summed are sums of ``more`` contributions each.
    """
    return [Instruction(
        action.kind, action.peer * more if action.kind is Opcode.ENCODE
        else peer_of(action.peer), action.start * factor + offset,
        action.stop * factor + offset) for action in actions]
