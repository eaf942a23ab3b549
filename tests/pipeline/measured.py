"""A simulated step with the events that a measured one has."""
from chainer_fp8pipe.report.events import Event


def as_measured(schedule, timeline):
    """Adds receives from the end of what came before, and the update.

    Args:
        schedule: What was simulated.
        timeline: Of a link that is not overlapped.
    """
    events = []
    for rank in range(schedule.stages):
        end = 0.0
        for event in timeline.events:
            if event.rank != rank:
                continue
            needs = {'forward': event.chunk > 0,
                     'backward': event.chunk < schedule.last_chunk}
            if schedule.stages > 1 and needs.get(event.name):
                events.append(event._replace(name='receive', start=end,
                                             end=event.start))
            events.append(event)
            end = event.end
        events.append(Event(rank, 'exchange', end, end + 0.5))
        events.append(Event(rank, 'update', end + 0.5, end + 1.0))
    return events
