"""How many layers each chunk of a model gets: by number, size or time."""
from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import chainer

from ..chains.measure import clock_of
from ..mpi import all_ranks
from ..pipeline.layers import LayerError, as_variables, layer_name
from ..pipeline.randomness import preserved

#: The shortest of so many runs counts, after one that is not counted.
_RUNS = 3
_BALANCES = ('parameters', 'layers', 'time')


class LayerCost(NamedTuple):
    """The number of a layer's parameters, and its time."""

    parameters: int
    seconds: float      # of forward and backward together; 0 if not timed


def check_balance(balance: str | Sequence[int], chunks: int, layers: int
                  ) -> str | list[int]:
    """The measure's name, or the number of layers of each chunk.

    Raises:
        ValueError: There is no such measure, or the numbers do not fit.
    """
    if isinstance(balance, str):
        if balance not in _BALANCES:
            raise ValueError(
                f'unknown balance {balance!r}; valid are '
                f'{", ".join(map(repr, _BALANCES))} and a list of the number '
                'of layers of each chunk')
        return balance
    counts = [operator.index(count) for count in balance]
    if len(counts) != chunks or min(counts) < 1 or sum(counts) != layers:
        raise ValueError(
            f'balance={counts} does not fit: it must be {chunks} numbers of '
            f'layers, one for each chunk, all 1 or more and {layers} together')
    return counts


def chunk_counts(model: Any, chunks: int, balance: str | list[int],
                 comm: Any, example: Any
                 ) -> tuple[list[int], list[int | None]]:
    """The number of layers of each chunk, and of parameters of each layer.

    Args:
        model: The whole one.
        chunks: Of all ranks.
        balance: What :func:`check_balance` has returned.
        comm: As for :meth:`.Divisible.stage`.
        example: As there; the first rank's counts.

    Raises:
        ValueError: A layer failed on the first rank, or there is no example;
            on all ranks.
    """
    sizes = model.sizes()
    if not isinstance(balance, str):
        return balance, sizes
    if balance == 'layers':
        return even_parts([1] * len(model), chunks), sizes
    if balance == 'parameters' and None not in sizes:
        return even_parts(sizes, chunks), sizes

    def found_out() -> list[LayerCost]:
        if balance == 'parameters' and example is None:
            number = sizes.index(None)
            raise ValueError(
                f'{layer_name(*model.numbered_layers()[number])} learns '
                'the shape of its parameters from its first input; give '
                "it all sizes, or pass example=... or balance='layers' "
                'to stage')
        return measure(model, example, timed=balance == 'time')
    found = _on_first_rank(comm, found_out)
    sizes = [one.parameters if size is None else size
             for size, one in zip(sizes, found, strict=True)]
    return even_parts([round(1e9 * one.seconds) for one in found]
                      if balance == 'time' else sizes, chunks), sizes


def _on_first_rank(comm: Any, action: Callable[[], list[LayerCost]]
                   ) -> list[LayerCost]:
    """The result of ``action`` on rank 0: all ranks must cut alike."""
    everyone = all_ranks(comm)
    if hasattr(everyone, 'Iallreduce'):
        from ..mpi.agreement import of_first_rank
        return of_first_rank(everyone, action)
    if everyone.size > 1:
        raise ValueError(
            'all ranks must get the same cut, so measuring takes a '
            'communicator that can broadcast, such as '
            f'mpi4py.MPI.COMM_WORLD; a {type(everyone).__name__} cannot')
    return action()


# --- measuring --------------------------------------------------------------

def measure(model: Any, example: Any, timed: bool) -> list[LayerCost]:
    """Runs a copy of each layer on what the one before returned.

    One copy is in memory at a time.  The model stays as it is: parameters
    get no values, statistics are not updated, and NumPy's random numbers not
    drawn.  The layers run on the device of ``example``, an input or a tuple
    of inputs; with ``timed`` forward and backward, as in training.
    """
    if example is None:
        raise ValueError('there is no input to measure with; call '
                         'stage(..., example=x) with one micro-batch')
    arrays = tuple(variable.array for variable in as_variables(example))
    device = chainer.backend.get_device_from_array(*arrays)
    found = []
    with chainer.using_config('train', True), chainer.using_config(
            'enable_backprop', True), preserved(), chainer.using_device(
            device):
        for number, layer in model.numbered_layers():
            try:
                own = (copy.deepcopy(layer).to_device(device)
                       if isinstance(layer, chainer.Link) else layer)
                # The first layer's input needs no gradient.
                outputs, _ = _run(own, arrays, number > 0, timed, device)
                seconds = min(_run(own, arrays, number > 0, timed, device)[1]
                              for _ in range(_RUNS)) if timed else 0.0
            except Exception as error:
                raise LayerError(
                    f'{layer_name(number, layer)}, while it was measured: '
                    f'{type(error).__name__}: {error}') from error
            found.append(LayerCost(own.count_params() if isinstance(
                own, chainer.Link) else 0, seconds))
            arrays = outputs
    return found


def _run(layer: Any, arrays: tuple, wanted: bool, backward: bool,
         device: Any) -> tuple[tuple, float]:
    """A layer's outputs, and the seconds that they took."""
    inputs = [chainer.Variable(
        array, requires_grad=wanted and array.dtype.kind == 'f')
        for array in arrays]
    now = clock_of(device)
    start = now()
    outputs = as_variables(layer(*inputs))
    ends = [output for output in outputs
            if backward and output.creator_node is not None]
    for end in ends:
        end.grad = device.xp.ones_like(end.array)
    if ends:
        chainer.backward(ends)
    seconds = now() - start
    return tuple(output.array for output in outputs), seconds


# --- dividing ---------------------------------------------------------------

def even_parts(costs: Sequence[int], parts: int) -> list[int]:
    """How many consecutive layers each part gets; at least one.

    The largest sum of costs over the parts is as small as it can be.  Of
    all cuts with that largest sum, the one with the smallest sum of squares
    of all parts' sums is taken, and of these the one with the smallest sum
    of squares of the counts, so that parts are as even as possible.

    Args:
        costs: Of each layer; not negative.
        parts: How many parts, at most as many as layers.

    Returns:
        Numbers of layers, which sum to ``len(costs)``.
    """
    sums = [0, *itertools.accumulate(costs)]
    low, high = max(costs), sums[-1]
    while low < high:
        bound = (low + high) // 2
        if _parts_needed(sums, bound) <= parts:
            high = bound
        else:
            low = bound + 1
    # By the end of a part, the least (squares of sums, squares of counts,
    # counts) of so many parts as there were rounds.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, ())}
    for _ in range(parts):
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (cost, count, counts) in best.items():
            for end in range(start + 1, len(sums)):
                part = sums[end] - sums[start]
                if part > high:
                    break
                candidate = (cost + part ** 2, count + (end - start) ** 2,
                             (*counts, end - start))
                if end not in following or candidate < following[end]:
                    following[end] = candidate
        best = following
    return list(best[len(sums) - 1][2])


def _parts_needed(sums: list[int], bound: int) -> int:
    """The number of parts if none may cost more than ``bound``."""
    needed, start = 1, 0
    for end in range(1, len(sums)):
        if sums[end] - sums[start] > bound:
            needed, start = needed + 1, end - 1
    return needed
