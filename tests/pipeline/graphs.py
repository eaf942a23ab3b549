"""Schedules as graphs: a reference for them."""
from graphlib import CycleError, TopologicalSorter

from chainer_fp8pipe.pipeline.schedules import Action, Kind

BACKWARDS = Kind.BACKWARD, Kind.BACKWARD_INPUT
#: Units of time: the weight half, the input half and forward take one each.
UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1,
         Kind.BACKWARD_WEIGHT: 1}


def edges_of(schedule):
    """Node (rank, action) -> the nodes that come before it.

    In the rank's list, as what it needs, or of the micro-batch before.
    """
    nodes = [(rank, action) for rank, actions in enumerate(schedule.actions)
             for action in actions]
    edges = {node: set() for node in nodes}
    for before, node in zip(nodes, nodes[1:], strict=False):
        if before[0] == node[0]:
            edges[node].add(before)
    for node in nodes:
        kind, number, chunk = node[1]
        needs = [Action(kind, number - 1, chunk)]
        if kind is Kind.FORWARD:
            needs.append(Action(kind, number, chunk - 1))
        elif kind is Kind.BACKWARD_WEIGHT:
            needs.append(Action(Kind.BACKWARD_INPUT, number, chunk))
        else:
            needs += [Action(Kind.FORWARD, number, chunk),
                      *(Action(one, number, chunk + 1) for one in BACKWARDS)]
        for action in needs:
            other = action.chunk % schedule.stages, action
            if other in edges:
                edges[node].add(other)
    return edges


def is_sound(schedule):
    """Whether a schedule can be carried out."""
    try:
        TopologicalSorter(edges_of(schedule)).prepare()
    except CycleError:
        return False
    return True


def ends(schedule):
    """When each (rank, action) ends, in units, if messages take no time."""
    edges, end = edges_of(schedule), {}
    for node in TopologicalSorter(edges).static_order():
        end[node] = UNITS[node[1].kind] + max(
            (end[other] for other in edges[node]), default=0)
    return end


def length(schedule):
    """Of a step: the longest path."""
    return max(ends(schedule).values())


def peak_live(schedule):
    """For each rank, how many activations of a chunk it keeps at most.

    From forward until backward, or its weight half, is through.
    """
    found = []
    for actions in schedule.actions:
        live = peak = 0
        for action in actions:
            live += action.kind is Kind.FORWARD
            peak = max(peak, live)
            live -= action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        found.append(peak)
    return tuple(found)
