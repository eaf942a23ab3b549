"""A ``Divisible`` as a Chain that is cut between its layers."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import chainer

from ..pipeline.layers import LayerError, as_tuple, check_returned, layer_name
from ..pipeline.randomness import Place
from ..planning.calls import Position
from ..planning.partition_plan import PartitionPlan
from .ghost import GhostError, ghost, is_ghost
from .names import Names
from .partitioned import Partition
from .rehearsal import Mismatch
from .run import Diverged
from .tracing.trace import Tracer
from .valueless_parameters import deferred, place_array, take_away

# A list of layers needs no other engine than any Chain does: every rank goes
# through all layers, does the calls of its own, and gets ghosts from the
# others (see the package's docstring).  Three things differ.  The cut is
# given, and by layer: each call belongs to the chunk of the layer that makes
# it, whatever it reads.  There is no example when the model is cut, so the
# first batch is traced when it comes.  And the layers of other ranks are
# stand-ins: links whose parameters have a shape at most, and lazy layers that
# are built here without values, so that no rank ever holds another's.
#
# What is traded: the first step runs one call of every layer on every rank,
# for the shapes of its outputs, and all ranks get the whole batch.


class LayerCall(chainer.Link):
    """Layer ``layer_number`` of the whole model, a link or a function."""

    def __init__(self, number: int, run: Any) -> None:
        super().__init__()
        self.layer_number, self.run = number, run

    def forward(self, *xs: Any) -> Any:
        return self.run(*xs)


class Layers(chainer.Link):
    """All layers of a model, those of other ranks without values.

    Args:
        model: A :class:`.Divisible`, or a part of one.

    Raises:
        LayerError: A layer cannot be built.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.seed = model.seed
        here = dict(model._numbered_layers())
        made: dict[int, Any] = {}       # the same lazy is one layer
        self.calls = []
        for number, slot in model.all_slots():
            layer = here.get(number, slot)
            if number not in here:
                layer = made.setdefault(
                    id(slot), _stand_in(slot, number, model))
            self.calls.append(LayerCall(number, layer))
        self.here = frozenset(here)

    def forward(self, *xs: Any) -> Any:
        """The last layer's output.

        Raises:
            LayerError: A layer fails; the message names it.
        """
        value: Any = xs
        for call in self.calls:
            try:
                value = call(*as_tuple(value))
                check_returned(value)
            except (GhostError, Mismatch, Diverged, LayerError):
                raise
            except Exception as error:
                raise LayerError(
                    f'{layer_name(call.layer_number, call.run)}: '
                    f'{type(error).__name__}: {error}') from error
        return value

    def namedlinks(self, skipself: bool = False) -> Any:
        """Each link with the number of its layer: ``'/7/conv'``."""
        if not skipself:
            yield '/', self
        for call in self.calls:
            if isinstance(call.run, chainer.Link):
                for path, link in call.run.namedlinks():
                    yield f'/{call.layer_number}{path}'.rstrip('/'), link


def cut_layers(model: Any, grid: Any, layout: Sequence[tuple[int, int]],
               micro_batches: int, schedule: str) -> tuple[Layers, Partition]:
    """The whole model, and what this rank knows of the cut.

    Args:
        model: This rank's part, with its layers.
        grid: The ranks.
        layout: Start and end of the layers of every chunk.
        micro_batches: As for :class:`PipelineUpdater`.
        schedule: As for :class:`PipelineUpdater`.
    """
    whole = Layers(model)
    names = Names(whole)
    for call in whole.calls:
        path = f'/{call.layer_number}'
        if isinstance(call.run, chainer.Link):
            if call.layer_number not in whole.here:
                _take_values(call.run, names)
        else:
            # A function that looks at data is then run as one call.
            names.add(call, path)
    last = len(layout) - 1
    plan = PartitionPlan(
        (), tuple(Position(1 << 30, chunk) for chunk in range(last)),
        grid.stages, (False,) * (last + 1), micro_batches, schedule)
    part = Partition(whole, names, Tracer(whole, names, grid.pipeline), plan,
                     grid, None)
    part.chunk_of = {number: chunk
                     for chunk, (start, end) in enumerate(layout)
                     for number in range(start, end)}
    part.hold_layers((part.chunk_of[call.layer_number], call.run)
                     for call in whole.calls
                     if isinstance(call.run, chainer.Link))
    part.initial_place = lambda place, number, name: Place(
        whole.seed, 0, int(name.split('/')[1]), 0)
    return whole, part


def _stand_in(slot: Any, number: int, model: Any) -> Any:
    """A layer of another rank."""
    with deferred(model.seed):
        layer = slot.make(model.seed, number) if hasattr(
            slot, 'factory') else slot
        if isinstance(layer, chainer.Link):
            for _ in layer.links():     # builds lazy layers inside
                pass
            layer.to_device(model.device)
    return layer


def _take_values(link: chainer.Link, names: Names) -> None:
    for parameter in link.params():
        name = names.of(parameter) or ''
        form = getattr(parameter, 'form', None)
        if form is not None:
            place_array(parameter, ghost(form[0], form[1], name,
                                         link.xp))
        elif is_ghost(parameter._data[0]):
            take_away(name, parameter)
        elif parameter._data[0] is not None:
            # As in a link that was made after the model was divided.
            place_array(parameter, ghost(
                parameter.shape, parameter.dtype, name, link.xp))
