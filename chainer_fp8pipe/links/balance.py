"""How many layers each chunk of a model gets: by number, size or time."""
from __future__ import annotations

import functools
import operator
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import chainer

from ..mpi import all_ranks
from ..pipeline.layers import LayerError, as_variables, layer_name
from ..planning.even_parts import partition
from .lazy import Lazy, initialising, own_copy
from .shared_parameters import elements, own_size, sum_of_known

#: The shortest of so many runs counts, after one that is not counted.
_RUNS = 3
_BALANCES = ('parameters', 'layers', 'time')


def chunk_counts(model: Any, stages: int, chunks: int,
                 balance: str | Sequence[int], comm: Any, example: Any
                 ) -> tuple[list[int], list[int | None] | None]:
    """The number of layers of each chunk, in the model's order.

    With the layers' numbers of parameters, if these had to be found out.
    """
    if operator.index(chunks) < 1:
        raise ValueError(f'a rank has 1 chunk or more, not {chunks}')
    total, parts = len(model.numbered_slots()), stages * chunks
    if total < parts:
        raise ValueError(
            f'{model!r} has {total} layers, too few for '
            + (f'{stages} ranks' if chunks == 1 else
               f'the {parts} chunks of {stages} ranks with {chunks} each')
            + '; use fewer ranks, or more and smaller layers')
    if not isinstance(balance, str):
        return _given(balance, parts, total), None
    if balance not in _BALANCES:
        raise ValueError(
            f'unknown balance {balance!r}; valid are '
            f'{", ".join(map(repr, _BALANCES))} and a list of the number of '
            'layers of each chunk')
    if balance == 'layers':
        return partition([1] * total, parts), None
    if balance == 'time':
        found = _on_first_rank(comm, lambda: measure(model, example, True))
        return (partition([one.seconds for one in found], parts),
                [one.parameters for one in found])
    counts = count_parameters(model)
    if None in counts:
        counts = _completed(model, counts, comm, example)
    return partition([count or 0 for count in counts], parts), counts


def count_parameters(model: Any) -> list[int | None]:
    """Number of parameters of each layer; None where it is not known yet.

    Shared ones count where they are first.  A lazy layer is built, counted
    and thrown away; one of equal ones is enough.
    """
    made: dict[Hashable, int | None] = {}
    seen: set[int] = set()

    def size_of(lazy: Lazy, number: int) -> int | None:
        if lazy.key not in made:
            layer = lazy.make(model.seed, number)
            parameters = ({id(one): one for one in layer.params()}
                          if isinstance(layer, chainer.Link) else {})
            made[lazy.key] = sum_of_known(map(elements, parameters.values()))
        return made[lazy.key]
    return [own_size(slot, seen, functools.partial(size_of, number=number))
            for number, slot in model.numbered_slots()]


def _completed(model: Any, counts: list[int | None], comm: Any,
               example: Any) -> list[int | None]:
    """The counts; those not known yet are found by running an example."""
    def found_out() -> list[LayerCost]:
        if example is None:
            number = counts.index(None)
            name = layer_name(*model.numbered_slots()[number])
            raise ValueError(
                f'{name} gets the shape of its parameters from its first '
                'input only; give it all sizes, or call stage with '
                "example=..., balance='layers' or the number of layers of "
                'each chunk')
        return measure(model, example, False)

    found = _on_first_rank(comm, found_out)
    return [one.parameters if count is None else count
            for count, one in zip(counts, found, strict=True)]


def _given(balance: Sequence[int], parts: int, total: int) -> list[int]:
    counts = [operator.index(count) for count in balance]
    if len(counts) != parts or min(counts) < 1 or sum(counts) != total:
        raise ValueError(
            f'balance={counts} does not fit: it must be {parts} numbers of '
            f'layers, one for each chunk, all 1 or more and {total} together')
    return counts


def _on_first_rank(comm: Any, action: Callable[[], list[LayerCost]]
                   ) -> list[LayerCost]:
    """The result of ``action`` on rank 0: all ranks must cut alike.

    An error there is raised on all, as a LayerError unless a ValueError.
    """
    everyone = all_ranks(comm)
    broadcast = getattr(everyone, 'bcast', None)
    if everyone.size == 1:
        return action()
    if broadcast is None:
        raise ValueError(
            'all ranks must get the same cut, so measuring takes a '
            'communicator that can broadcast, such as '
            f'mpi4py.MPI.COMM_WORLD; a {type(everyone).__name__} cannot')
    found: list[LayerCost] = []
    problem, cause = '', None
    kind: type[Exception] = LayerError
    if everyone.rank == 0:
        try:
            found = action()
        except Exception as error:      # the ranks that wait must hear of it
            problem, cause = str(error) or repr(error), error
            kind = ValueError if isinstance(error, ValueError) else LayerError
    found, problem, kind = broadcast((found, problem, kind))
    if problem:
        raise kind(f'on rank 0, {problem}') from cause
    return found


class LayerCost(NamedTuple):
    """The number of a layer's parameters, and its time."""

    parameters: int
    seconds: float      # of forward and backward together; 0 if not timed


def measure(model: Any, example: Any,
            timed: bool) -> list[LayerCost]:
    """Runs a copy of each layer on what the one before returned.

    One copy is in memory at a time.  The model stays as it is: lazy layers
    are not built, statistics not updated, and NumPy's random numbers not
    drawn.  The layers run on the device of ``example``, an input or a tuple
    of inputs; with ``timed`` forward and backward, as in training.
    """
    if example is None:
        raise ValueError('there is no input to measure with; call '
                         'stage(..., example=x) with one micro-batch')
    arrays = tuple(variable.array for variable in as_variables(example))
    found = []
    with chainer.using_config('train', True), \
            chainer.using_config('enable_backprop', True):
        for number, slot in model.numbered_slots():
            try:
                arrays, measurement = _measured(
                    slot, model.seed, number, arrays, timed)
            except LayerError:
                raise
            except Exception as error:
                raise LayerError(
                    f'{layer_name(number, slot)}, while it was measured: '
                    f'{type(error).__name__}: {error}') from error
            found.append(measurement)
    return found


def _measured(slot: Any, seed: int, number: int, arrays: tuple,
              timed: bool) -> tuple[tuple, LayerCost]:
    device = chainer.backend.get_device_from_array(*arrays)
    layer = own_copy(slot, seed, number, device)
    with initialising(seed, number, device.xp), chainer.using_device(device):
        # The first layer's input needs no gradient.
        outputs, _ = _run(layer, arrays, number > 0, timed, device)
        seconds = min(_run(layer, arrays, number > 0, timed, device)[1]
                      for _ in range(_RUNS)) if timed else 0.0
    size = layer.count_params() if isinstance(layer, chainer.Link) else 0
    return outputs, LayerCost(size, seconds)


def _run(layer: Any, arrays: tuple, wanted: bool, backward: bool,
         device: Any) -> tuple[tuple, float]:
    """A layer's outputs, and the seconds that they took."""
    inputs = [chainer.Variable(
        array, requires_grad=wanted and array.dtype.kind == 'f')
        for array in arrays]
    start = _now(device)
    outputs = as_variables(layer(*inputs))
    ends = [output for output in outputs
            if backward and output.creator_node is not None]
    for end in ends:
        end.grad = device.xp.ones_like(end.array)
    if ends:
        chainer.backward(ends)
    seconds = _now(device) - start
    return tuple(output.array for output in outputs), seconds


def _now(device: Any) -> float:
    if isinstance(device, chainer.backend.GpuDevice):
        device.device.synchronize()
    return time.perf_counter()
