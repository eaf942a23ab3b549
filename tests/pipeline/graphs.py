"""Schedules as graphs: a reference for them."""
from graphlib import CycleError, TopologicalSorter

from chainer_fp8pipe.pipeline.schedules import Action, Kind

BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)

#: What comes before an action about the same micro-batch, if it is there:
#: why, the kind, and how many chunks further on.
NEEDS = {
    Kind.FORWARD: [('data', Kind.RECEIVE_ACTIVATION, 0),
                   ('data', Kind.FORWARD, -1)],
    Kind.BACKWARD: [('data', Kind.FORWARD, 0),
                    ('data', Kind.RECEIVE_GRADIENT, 0),
                    *(('data', kind, 1) for kind in BACKWARDS)],
    Kind.BACKWARD_WEIGHT: [('data', Kind.BACKWARD_INPUT, 0)],
    Kind.SEND_ACTIVATION: [('data', Kind.FORWARD, 0)],
    Kind.SEND_GRADIENT: [('data', kind, 0) for kind in BACKWARDS],
    Kind.RECEIVE_ACTIVATION: [('message', Kind.SEND_ACTIVATION, -1)],
    Kind.RECEIVE_GRADIENT: [('message', Kind.SEND_GRADIENT, 1)],
}
NEEDS[Kind.BACKWARD_INPUT] = NEEDS[Kind.BACKWARD]

COMPUTING = (Kind.FORWARD, *BACKWARDS, Kind.BACKWARD_WEIGHT)


def edges_of(schedule):
    """Node (rank, action) -> the nodes that come before it, and why.

    ``'order'`` in the rank's list, ``'data'``, ``'message'`` between ranks,
    ``'number'`` of the micro-batch.
    """
    nodes = [(rank, action) for rank, actions in enumerate(schedule.actions)
             for action in actions]
    edges = {node: {} for node in nodes}
    for before, node in zip(nodes, nodes[1:], strict=False):
        if before[0] == node[0]:
            edges[node][before] = 'order'
    for node in nodes:
        kind, number, chunk = node[1]
        needs = [(reason, Action(kind, number, chunk + further))
                 for reason, kind, further in NEEDS[kind]]
        if kind in COMPUTING:
            needs.append(('number', Action(kind, number - 1, chunk)))
        for reason, action in needs:
            other = action.chunk % schedule.stages, action
            if other in edges:
                edges[node][other] = reason
    return edges


def is_sound(schedule):
    """Whether a schedule can be carried out."""
    try:
        TopologicalSorter(edges_of(schedule)).prepare()
    except CycleError:
        return False
    return all(
        stream(schedule, Kind[f'SEND_{what}'], boundary)
        == stream(schedule, Kind[f'RECEIVE_{what}'], boundary)
        for what in ('ACTIVATION', 'GRADIENT')
        for boundary in range(schedule.last_chunk))


def stream(schedule, kind, boundary):
    """Numbers of the micro-batches, in the order of the transfers."""
    return [action.micro_batch for actions in schedule.actions
            for action in actions
            if action.kind is kind and action.boundary == boundary]



#: Units of time: the weight half, the input half and forward take one each.
UNITS = {Kind.FORWARD: 1, Kind.BACKWARD: 2, Kind.BACKWARD_INPUT: 1,
         Kind.BACKWARD_WEIGHT: 1}


def ends(schedule):
    """When each (rank, action) ends, in units, if messages take no time."""
    edges, end = edges_of(schedule), {}
    for node in TopologicalSorter(edges).static_order():
        end[node] = UNITS.get(node[1].kind, 0) + max(
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
