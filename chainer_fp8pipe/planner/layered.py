"""A ``Divisible`` as plans see it: a Chain of its layers that has a loss."""
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import chainer

from ..links.divisible import Divisible
from ..pipeline.layers import as_tuple
from ..planning.partition_plan import PartitionPlan


class Layered(chainer.Chain):
    """Copies of all layers; the last array of a batch is the target.

    Parameters have the names that they have in the ``Divisible``.

    Args:
        model: A whole one.
        loss_fun: ``loss_fun(*outputs, target)``.

    Raises:
        ValueError: The model is a part of another one.
    """

    def __init__(self, model: Divisible, loss_fun: Callable[..., Any]
                 ) -> None:
        super().__init__()
        if model.is_part:
            raise ValueError(f'{model!r} is a part; plan() takes the whole '
                             'model')
        self.loss_fun = loss_fun
        # Each copy of this chain must call its own links: by their names.
        self.places = len(model)
        with self.init_scope():
            for number, layer in enumerate(copy.deepcopy(model)):
                layer.name = None
                setattr(self, str(number), layer)

    def forward(self, *batch: Any) -> Any:
        outputs = batch[:-1]
        for number in range(self.places):
            outputs = as_tuple(getattr(self, str(number))(*outputs))
        return self.loss_fun(*outputs, batch[-1])


def layer_counts(cut: PartitionPlan, layers: int) -> list[int]:
    """How many layers each chunk of a plan has.

    Args:
        cut: Of a plan that was made for a ``Divisible``.
        layers: Of the model.

    Raises:
        ValueError: The plan does not cut the model between layers.
    """
    # Layers without parameters follow the one before, a call for each; the
    # loss comes after the last one, and is no layer.
    left = len(cut.cuts)
    ends = [min(int(cut.order[place][0].split('/')[1]) + depth,
                layers - left + number)
            for number, (place, depth) in enumerate(cut.positions)]
    ends.append(layers)
    counts = [end - start for start, end in zip([0, *ends], ends,
                                                strict=False)]
    if min(counts) < 1:
        raise ValueError(f'the plan cuts a model of {layers} layers before '
                         f'the layers {", ".join(map(str, ends[:-1]))}, which '
                         'leaves a stage without one; make the plan again')
    return counts
