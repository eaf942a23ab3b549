"""A moving average of the weights, to evaluate with."""
from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import chainer
import numpy
from chainer.training import extension

from ..checks import check_number


class MovingAverage(extension.Extension):
    """Averages weights exponentially over the updates.

    After each update ``average += (1 - d) * (weights - average)``. d is
    ``decay``, or (1 + n) / (10 + n) after n updates while that is less: the
    initial weights soon fade.  Averages are float32; those of float16
    parameters are of their float32 copies where the optimizer has them
    (``use_fp32_update``).  Statistics of batch normalisation, and other
    persistent floating-point arrays, are averaged like weights.::

        average = MovingAverage(model, 0.999)
        trainer.extend(average)
        trainer.extend(average.evaluator(Evaluator(iterator, model)),
                       name='average')

    Add it on all ranks that evaluate.  Snapshots contain the averages.

    Args:
        model: The optimizer's target.
        decay: Less than 1; the average is over some 1 / (1 - decay) updates.

    Raises:
        ValueError: ``decay`` is not between 0 and 1.
    """

    trigger = 1, 'iteration'
    # Before evaluators, which are writers.
    priority = extension.PRIORITY_WRITER + 50
    default_name = 'MovingAverage'

    def __init__(self, model: chainer.Link, decay: float = 0.9999) -> None:
        check_number('decay', decay)
        if decay >= 1:
            raise ValueError(f'decay must be less than 1, not {decay!r}')
        self._model = model
        self._decay = decay
        self._updates = 0
        self._averages: dict[str, Any] = {}

    def __call__(self, trainer: chainer.training.Trainer | None = None
                 ) -> None:
        """Adds the present weights to the average."""
        new = 1 - min(self._decay, (1 + self._updates) / (10 + self._updates))
        for key, owner, name in _places(self._model):
            # The optimizer may update a float32 copy.
            copy = getattr(getattr(owner, 'update_rule', None), '_fp32_param',
                           None)
            latest = getattr(owner, name) if copy is None else copy.array
            with chainer.using_device(owner.device):
                average = self._averages.get(key)
                if average is None or average.shape != latest.shape:
                    average = latest.astype(numpy.promote_types(
                        latest.dtype, numpy.float32))
                else:
                    average = owner.device.send(average)
                    average += (latest - average) * new
                self._averages[key] = average
        self._updates += 1

    @contextlib.contextmanager
    def weights(self) -> Iterator[None]:
        """A ``with`` block in which the model has the averaged weights.

        Afterwards the model has its own weights back, bit for bit, also after
        an error.  Before the first update, the average is the model itself.
        """
        own = []
        try:
            for key, owner, name in _places(self._model):
                if key in self._averages:
                    array = getattr(owner, name)
                    own.append((owner, name, array))
                    # A copy: what is done to it is not done to the average.
                    setattr(owner, name, owner.device.send(
                        self._averages[key]).astype(array.dtype))
            yield
        finally:
            for owner, name, array in reversed(own):    # two may be the same
                setattr(owner, name, array)

    def evaluator(self, evaluator: Any) -> Any:
        """Makes an evaluator use the averaged weights, and returns it.

        Args:
            evaluator: Chainer's ``Evaluator``, or one that ChainerMN's
                ``create_multi_node_evaluator`` has prepared; ``extend``
                should name it where there is another one.
        """
        evaluate = evaluator.evaluate

        def with_average() -> Any:
            with self.weights():        # which evaluate() keeps
                return evaluate()
        evaluator.evaluate = with_average
        return evaluator

    def serialize(self, serializer: chainer.AbstractSerializer) -> None:
        """Writes or reads the averages."""
        self._updates = int(serializer('updates', self._updates))
        if isinstance(serializer, chainer.Serializer):
            for key, average in self._averages.items():
                serializer(f'average{key}',
                           chainer.backends.cuda.to_cpu(average))
            return
        self._averages.clear()
        for key, *_ in _places(self._model) if self._updates else ():
            # An array that the snapshot lacks starts with its first value.
            with contextlib.suppress(KeyError):
                average = serializer(f'average{key}', None)
                if average is not None:
                    self._averages[key] = numpy.array(average)


def _places(model: chainer.Link) -> Iterator[tuple[str, Any, str]]:
    """Every initialised floating-point array, shared ones once.

    Yields its key, the parameter or link that has it, and as what.
    """
    seen: set[int] = set()
    for key, parameter in model.namedparams(False):
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield key, parameter, 'array'
    for path, link in model.namedlinks():
        for name in sorted(link._persistent) if id(link) not in seen else ():
            dtype = getattr(getattr(link, name), 'dtype', None)
            if dtype is not None and dtype.kind == 'f':
                yield f'{path.rstrip("/")}/{name}', link, name
        seen.add(id(link))
