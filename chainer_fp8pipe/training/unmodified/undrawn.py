"""Has a script build its model without the values of large parameters.

Each rank of a pipeline runs the script, which builds the whole model, as in a
block of :func:`.deferred`, from the script's own state of NumPy's generator.
So no rank ever has the whole.
"""
from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import chainer

from ...chains.deferred import (
    Deferral,
    DeferredParameter,
    draw,
    without_drawing,
)
from ...chains.placeholder import is_placeholder
from ...intercept.function_calls import Creation, creating
from ...intercept.patching import Patch
from ...report.quantities import size

#: Bytes of a model on each rank that the user is told of.
_WORTH_A_WORD = 1 << 26


class Undrawn(Deferral):
    """Notes how the values of large parameters are to be made.

    What gets its shape in forward is drawn as by Chainer.

    Args:
        is_building: Whether the script still builds its model.
    """

    def __init__(self, is_building: Callable[[], bool]) -> None:
        super().__init__()
        self._is_building = is_building

    @contextlib.contextmanager
    def building(self) -> Iterator[None]:
        """A block in which this thread's script makes models.

        In it links do not look at the arrays of their parameters to find
        which have a shape (chainer/link.py, lines 474, 481 and 735).
        """
        with contextlib.ExitStack() as stack:
            stack.enter_context(creating(self))
            for name in 'params', 'namedparams', 'count_params':
                stack.enter_context(Patch(chainer.Link, name,
                                          self._without_looking))
            yield

    def _without_looking(self, original: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._is_building():
                return original(*args, **kwargs)
            with without_drawing():
                found = original(*args, **kwargs)
                return found if isinstance(found, int) else iter(list(found))
        return call

    created = Creation.created

    def initialize(self, parameter: chainer.Parameter, shape: Any) -> bool:
        return self._is_building() and super().initialize(parameter, shape)

    def held(self, model: chainer.Link) -> str:
        """What to say of a model that each rank holds before it is cut.

        '' if ranks hold less than half of it, or than 64 MB.
        """
        arrays = [parameter._data[0] for parameter in model.params()
                  if parameter._data[0] is not None]
        whole = sum(array.nbytes for array in arrays)
        held = sum(array.nbytes for array in arrays
                   if not is_placeholder(array))
        if held < max(_WORTH_A_WORD, whole / 2):
            return ''
        return (f"{size(held)} of the model's {size(whole)} are on each rank "
                'until the model is divided, as the script looks at them, '
                'loads them, or makes them of arrays or by an initializer of '
                'its own; afterwards each rank has its part')

    def draw_others(self, model: chainer.Link) -> None:
        """Draws the parameters that are not the model's.

        Its ``forward`` may use them, and in a trace nothing is drawn.
        """
        own = set(map(id, model.params()))
        gc.collect()            # not what nobody has any more
        for one in gc.get_objects():
            if (type(one) is DeferredParameter and id(one) not in own
                    and is_placeholder(one._data[0])):
                draw(one)
