"""Which ranks send to which at the same time, while links are measured.

A round is a set of messages that are sent at once, each a pair (source,
target) of ranks.  There are about log2(P) rounds for P hosts.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence

Message = tuple[int, int]
Round = tuple[Message, ...]


def shifts(count: int) -> list[int]:
    """1, 2, 4, ... below ``count``."""
    return [1 << power for power in range((count - 1).bit_length())]


def ring_rounds(members: Sequence[int]) -> list[Round]:
    """Every member sends to the one 1, 2, 4, ... places further on a ring.

    So all are busy in both directions in every round, and each has another
    peer in every round.
    """
    count = len(members)
    return [tuple((members[place], members[(place + shift) % count])
                  for place in range(count)) for shift in shifts(count)]


def torus_rounds(members: Sequence[int], rows: int, columns: int
                 ) -> list[Round]:
    """Every member sends to both neighbours in its row, then in its column.

    So all links of the torus, whose members are numbered row by row, are busy
    in both directions.
    """
    return [tuple(sorted({*there, *_back(there)}))
            for there in torus_steps(members, rows, columns)]


def torus_steps(members: Sequence[int], rows: int, columns: int
                ) -> list[Round]:
    """Every member sends to the next one in its row, then in its column."""
    along_rows = tuple(
        (members[row * columns + column],
         members[row * columns + (column + 1) % columns])
        for row in range(rows) for column in range(columns))
    along_columns = tuple(
        (members[row * columns + column],
         members[(row + 1) % rows * columns + column])
        for row in range(rows) for column in range(columns))
    return [messages for messages, length
            in ((along_rows, columns), (along_columns, rows)) if length > 1]


def one_way(members: Sequence[int]) -> Round:
    """Every second member sends to the next one, and nobody sends back."""
    return tuple(zip(members[::2], members[1::2], strict=False))


def torus_one_way(members: Sequence[int], rows: int, columns: int) -> Round:
    """Links of the torus that are busy in one direction only."""
    first = torus_steps(members, rows, columns)[0]
    return tuple(message for message in first
                 if message[::-1] not in first or message[0] < message[1])


def pair(message: Message) -> Round:
    """Both ends of a message send to each other, and nobody else sends."""
    return message, message[::-1]


def local_rounds(hosts: Sequence[int]) -> list[Round]:
    """The rounds on a ring of each host's ranks, on all hosts at once.

    Args:
        hosts: For each rank, the number of its host.
    """
    rings = [ring_rounds(ranks) for ranks in ranks_by_host(hosts)]
    return [tuple(message for ring in rings if number < len(ring)
                  for message in ring[number])
            for number in range(max(map(len, rings)))]


def local_pairs(hosts: Sequence[int]) -> Round:
    """The first two ranks of each host send to each other."""
    return tuple(message for ranks in ranks_by_host(hosts) if len(ranks) > 1
                 for message in pair((ranks[0], ranks[1])))


def ranks_by_host(hosts: Sequence[int]) -> list[list[int]]:
    """The ranks of host 0, of host 1, ..."""
    return [[rank for rank, of in enumerate(hosts) if of == host]
            for host in range(max(hosts) + 1)]


def ends(messages: Round, rank: int) -> tuple[list[int], list[int]]:
    """To whom a rank sends in a round, and from whom it hears."""
    return ([target for source, target in messages if source == rank],
            [source for source, target in messages if target == rank])


def _back(messages: Iterable[Message]) -> list[Message]:
    return [(target, source) for source, target in messages]
