"""A ``Divisible`` as plans see it: a Chain of its layers that has a loss."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import chainer

from ..links.divisible import Divisible
from ..links.lazy import built, own_copy
from ..planning.partition_plan import PartitionPlan


class Layered(chainer.Chain):
    """Copies of all layers; the last array of a batch is the target.

    Parameters have the names that they have in the ``Divisible``.

    Args:
        model: A whole one; lazy layers are built here, not there.
        loss_fun: ``loss_fun(*outputs, target)``.

    Raises:
        ValueError: The model is a part of another one.
        LayerError: A layer cannot be built.
    """

    def __init__(self, model: Divisible, loss_fun: Callable[..., Any]
                 ) -> None:
        super().__init__()
        if getattr(model, '_part', None):
            raise ValueError(f'{model!r} is a part; plan() takes the whole '
                             'model')
        self.loss_fun = loss_fun
        self.layers, copies = [], dict[int, Any]()
        for number, slot in model.numbered_slots():
            if id(slot) not in copies:
                copies[id(slot)] = layer = own_copy(slot, model.seed, number,
                                                    model.device)
                if isinstance(layer, chainer.Link):
                    with self.init_scope():
                        layer.name = None
                        setattr(self, str(number), layer)
            self.layers.append(copies[id(slot)])

    def forward(self, *batch: Any) -> Any:
        outputs = batch[:-1]
        for layer in self.layers:
            found = layer(*outputs)
            outputs = found if isinstance(found, tuple) else (found,)
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
            for number, (place, depth) in enumerate(cut.cuts)]
    ends.append(layers)
    counts = [end - start for start, end in zip([0, *ends], ends,
                                                strict=False)]
    if min(counts) < 1:
        raise ValueError(f'the plan cuts a model of {layers} layers before '
                         f'the layers {", ".join(map(str, ends[:-1]))}, which '
                         'leaves a stage without one; make the plan again')
    return counts


def known_shapes(model: Divisible, planned: Mapping[str, Any]
                 ) -> dict[str, Any]:
    """Shapes of the parameters that are built; of others, None.

    Args:
        model: Of which nothing is built.
        planned: What a plan says; only of layers that are not built.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    for number, slot in model.numbered_slots():
        layer = built(slot)
        if layer is None:
            found.update({name: None for name in planned
                          if name.startswith(f'/{number}/')})
        elif isinstance(layer, chainer.Link) and id(layer) not in seen:
            seen.add(id(layer))
            found.update({f'/{number}{path}': one.shape
                          for path, one in layer.namedparams()})
    return found
