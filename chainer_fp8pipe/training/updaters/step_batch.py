"""What the first stage of a pipeline reads for one step."""
from __future__ import annotations

from typing import Any, NamedTuple

from ...pipeline.layers import as_tuple
from ...pipeline.tape import Arrays


class StepBatch(NamedTuple):
    """Arrays of one batch.

    Attributes:
        inputs: For the first layer.
        target: For the loss; None in a prediction.
        progress: Numbers about the iterator, for the other stages.
        keys: Names of the inputs, where they are keyword arguments.
    """

    inputs: Arrays
    target: Any
    progress: tuple[float, ...] = (0.0,) * 4
    keys: tuple[str, ...] | None = None

    def arguments(self) -> tuple[tuple, dict[str, Any]]:
        """Positional and keyword arguments of a model that has its loss.

        As ``StandardUpdater`` calls it.
        """
        if self.keys is None:
            return self.inputs, {}
        return (), dict(zip(self.keys, self.inputs, strict=True))

    def samples(self) -> int:
        """How many samples there are.

        Raises:
            ValueError: None, or not equally many in all arrays.
            TypeError: Something is no array.
        """
        arrays = self.inputs if self.target is None else (
            *self.inputs, self.target)
        for array in arrays:
            if not hasattr(array, 'shape'):
                raise TypeError(
                    f'a batch holds a {type(array).__name__}, not an array; '
                    'have the converter make arrays of inputs and target')
        lengths = sorted({len(array) for array in arrays})
        if len(lengths) != 1:
            raise ValueError(f'the arrays of a batch have {lengths} samples; '
                             'they must have equally many')
        if not lengths[0]:
            raise ValueError('a batch without samples')
        return lengths[0]


def split_target(arrays: Any, label_key: Any,
                 progress: tuple[float, ...] = (0.0,) * 4) -> StepBatch:
    """Inputs and target of a converted batch.

    Args:
        arrays: A tuple of arrays, or a dictionary.
        label_key: Where the target is.
        progress: Goes into the batch.

    Raises:
        ValueError: There is no target.
    """
    if isinstance(arrays, dict):
        if label_key not in arrays:
            known = ', '.join(map(repr, arrays))
            raise ValueError(f'a batch has {known} but no target; name it by '
                             f'label_key, not {label_key!r}')
        arrays = dict(arrays)
        target = arrays.pop(label_key)
        return StepBatch(tuple(arrays.values()), target, progress)
    arrays = list(as_tuple(arrays))
    if len(arrays) < 2:
        raise ValueError('an example has no target; it must be a tuple of '
                         'one input or more and the target')
    target = arrays.pop(label_key)
    return StepBatch(tuple(arrays), target, progress)


def whole_batch(arrays: Any, progress: tuple[float, ...] = (0.0,) * 4
                ) -> StepBatch:
    """A converted batch for a model that has its loss inside.

    Args:
        arrays: An array, a tuple of them, or a dictionary.
        progress: Goes into the batch.
    """
    if isinstance(arrays, dict):
        return StepBatch(tuple(arrays.values()), None, progress, tuple(arrays))
    return StepBatch(arrays if isinstance(arrays, tuple) else (arrays,), None,
                 progress)
