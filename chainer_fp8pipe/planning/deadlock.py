"""The proof that ranks which wait for each other's messages all end.

Sends never block, and a rank that receives waits for the message.  Then the
ranks' speeds do not matter: if the actions of all ranks can be done in one
order, they end in every other order as well, because the messages that a rank
has received and sent when it waits are the same in every order (Kahn, "The
Semantics of a Simple Language for Parallel Programming", 1974).

:class:`.engine.Engine` raises the same error when nothing happens any more and
programs still wait.
"""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

Act = TypeVar('Act')


class Deadlock(Exception):
    """Ranks wait for messages that will never come.

    Attributes:
        waits: Each waiting rank and the action at which it waits, in the
            order of ranks.
    """

    def __init__(self, waits: Sequence[tuple[int, Any]]) -> None:
        super().__init__(waits)
        self.waits = tuple(waits)

    def said(self, what: str, verb: str,
             describe: Callable[[Any], str] = str) -> str:
        """A sentence that names every rank and what the rank waits for.

        Args:
            what: The plan or schedule, with which the sentence begins.
            verb: Between rank and action: ``'waits for'``.
            describe: An action in words.
        """
        return f'{what} comes to a deadlock: ' + ', '.join(
            f'rank {rank} {verb} {describe(action)}'
            for rank, action in self.waits)


class Effect(NamedTuple):
    """What an action does with messages.

    Attributes:
        awaits: The channel from which the action takes a message, or None.
        sends: The channel into which the action puts a message, or None.
    """

    awaits: Hashable = None
    sends: Hashable = None


NO_MESSAGE = Effect()


def runnable_order(programs: Sequence[Sequence[Act]],
                   effect: Callable[[int, Act], Effect]
                   ) -> Iterator[tuple[int, Act]]:
    """All actions in one order in which they can be done.

    Args:
        programs: The actions of each rank, in the rank's order.
        effect: What an action of a rank does with messages.

    Yields:
        Rank and action.  An action's message can be received as soon as the
        caller asks for the next action.

    Raises:
        Deadlock: After all that can be done.
    """
    positions = [0] * len(programs)
    messages: Counter[Hashable] = Counter()
    going = True
    while going:
        going = False
        for rank, program in enumerate(programs):
            while positions[rank] < len(program):
                action = program[positions[rank]]
                awaits, sends = effect(rank, action)
                if awaits is not None:
                    if not messages[awaits]:
                        break
                    messages[awaits] -= 1
                yield rank, action
                positions[rank] += 1
                going = True
                if sends is not None:
                    messages[sends] += 1
    waits = [(rank, program[position]) for rank, (program, position)
             in enumerate(zip(programs, positions, strict=True))
             if position < len(program)]
    if waits:
        raise Deadlock(waits)
