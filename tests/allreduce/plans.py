"""Plans to test with, and a proof that a plan is an all-reduce.

Every rank's actions are carried out on symbols.  Contributions are never
copied: a rank that has sent a sum has nothing left of it.  A result with every
contribution is therefore the only one of its block, so that all ranks get the
same bits; and a result that is received never takes the place of something
that has still to be sent.
"""
import collections
from fractions import Fraction

from chainer_fp8pipe.allreduce.plan import (
    ALGORITHMS,
    Algorithm,
    Instruction,
    Opcode,
    Plan,
)


def tree(ranks: int) -> Plan:
    """Each rank adds what two others send; the first sends means back."""
    whole, reduce, gather = (0, 1), [], []
    for rank in range(ranks):
        above, below = (rank - 1) // 2, [
            peer for peer in (2 * rank + 1, 2 * rank + 2) if peer < ranks]
        reduce.append((
            *(Instruction(Opcode.RECEIVE_PARTIAL, peer, *whole)
              for peer in below),
            Instruction(Opcode.SEND_PARTIAL, above, *whole) if rank
            else Instruction(Opcode.ENCODE, ranks, *whole)))
        gather.append((
            *([Instruction(Opcode.RECEIVE_RESULT, above, *whole)]
              if rank else []),
            *(Instruction(Opcode.SEND_RESULT, peer, *whole)
              for peer in below)))
    return Plan('tree', ranks, ranks, 1, tuple(reduce), tuple(gather))


#: The package's, and one that it has no need of, to see that a row suffices.
TABLE = {**ALGORITHMS, 'tree': Algorithm(
    'tree', 'sums go down a tree', lambda nodes: tree(len(nodes)))}
_FORMS = {Opcode.SEND_PARTIAL: 'partial', Opcode.SEND_RESULT: 'result'}


class Wrong(Exception):
    """A plan is no all-reduce."""


class Report:
    """What a plan sends, if it is proved.

    Attributes:
        traffic: ``[source, target, form]`` -> [messages, share of the
            vector]; the form is 'contribution' (of one rank, or of a group,
            encoded), 'partial' or 'result'.
        steps: Messages in the longest chain in which each one waits for the
            one before: 2 for ``direct``, 2 (P - 1) for a ring.
    """

    def __init__(self, plan):
        self.plan = plan
        self.traffic = collections.defaultdict(lambda: [0, Fraction(0)])
        self._messages = collections.defaultdict(collections.deque)
        blocks = range(plan.blocks)
        # By rank and block: by worker, the weight of its contribution;
        # whether something was added to it; and its place in the chain.
        self._parts = [{block: {rank: Fraction(1)} for block in blocks
                        if rank < plan.workers} for rank in range(plan.ranks)]
        self._results = [{} for _ in range(plan.ranks)]
        self._summed = [set() for _ in range(plan.ranks)]
        self._depth = [collections.Counter() for _ in range(plan.ranks)]
        left = [collections.deque(
            (action, _is_last(plan.reduce[rank], place)) for place, action
            in enumerate(plan.actions(rank))) for rank in range(plan.ranks)]
        going = True
        while going:
            going = False
            for rank, actions in enumerate(left):
                while actions and self._do(rank, *actions[0]):
                    actions.popleft()
                    going = True
        if any(left):
            raise Wrong('deadlock', left)
        mean = dict.fromkeys(range(plan.workers), Fraction(1, plan.workers))
        for rank in range(plan.workers):
            for block in blocks:
                if self._results[rank].get(block) != mean:
                    raise Wrong(rank, block, self._results[rank].get(block))
        self.steps = max((depth for of in self._depth
                          for depth in of.values()), default=0)

    def sent(self, rank, forms=('contribution', 'partial', 'result')):
        return self._sum(lambda source, target, form: source == rank
                         and form in forms)

    def received(self, rank):
        return self._sum(lambda source, target, form: target == rank)

    def pairs(self):
        return {(source, target) for source, target, _ in self.traffic}

    def _sum(self, counts):
        found = [of for key, of in self.traffic.items() if counts(*key)]
        return (sum(messages for messages, _ in found),
                sum((share for _, share in found), Fraction(0)))

    def _do(self, rank, action, is_last):
        kind, peer, start, stop = action
        blocks = range(start, stop)
        parts, results = self._parts[rank], self._results[rank]
        depth = self._depth[rank]
        if kind is Opcode.ENCODE:
            for block in blocks:
                mean = {worker: weight / peer for worker, weight
                        in parts.pop(block).items()}
                (results if is_last else parts)[block] = mean
            self._summed[rank].difference_update(blocks)
        elif kind in _FORMS:
            form = _FORMS[kind]
            if form == 'partial' and not self._summed[rank] & set(blocks):
                form = 'contribution'
            self._messages[rank, peer].append((kind, blocks, [
                parts.pop(block) if kind is Opcode.SEND_PARTIAL
                else results[block] for block in blocks],
                max((depth[block] for block in blocks), default=0) + 1))
            of = self.traffic[rank, peer, form]
            of[0] += 1
            of[1] += Fraction(stop - start, self.plan.blocks)
        else:
            return self._receive(rank, kind, peer, blocks)
        return True

    def _receive(self, rank, kind, peer, blocks):
        if not self._messages[peer, rank]:
            return False
        sent, of, values, step = self._messages[peer, rank].popleft()
        if of != blocks or (sent is Opcode.SEND_PARTIAL) != (
                kind is Opcode.RECEIVE_PARTIAL):
            raise Wrong(rank, peer, blocks, of)
        for block, value in zip(blocks, values, strict=True):
            self._depth[rank][block] = max(self._depth[rank][block], step)
            if kind is Opcode.RECEIVE_PARTIAL:
                mine = self._parts[rank].setdefault(block, {})
                if mine.keys() & value.keys():
                    raise Wrong('twice', rank, block)
                mine.update(value)
                self._summed[rank].add(block)
            elif block in self._parts[rank] or block in self._results[rank]:
                raise Wrong('still to be sent', rank, block)
            else:
                self._results[rank][block] = value
        return True


def _is_last(reduce, place):
    """Whether an action is of the means at the end of a reduce-scatter."""
    rest = reduce[place:]
    blocks = [block for action in rest
              for block in range(action.start, action.stop)]
    return len({*blocks}) == len(blocks) and all(
        action.kind is Opcode.ENCODE for action in rest)
