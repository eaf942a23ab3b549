"""Says when a parameter's gradient is final, while backward still runs."""
# Only in the backward pass that `update(lossfun, ...)` of ChainerMN's
# optimizer makes: it clears the gradients before, and averages them right
# after, so that the pass is the only one, and no line of a script is between.
#
# Chainer writes the gradients of parameters at the very end of a pass.  Until
# then a table has them; each function that a variable goes into asks the table
# for the variable's gradients once.  So these functions are counted in the
# graph when the pass begins, and when the last of them is through, the
# gradient in the table is the one that Chainer will write.
#
# A communicator's `watcher(model)` is None, or hears of a pass.  It has the
# `parameters()` to watch, initialised, by name, and is called as
# `begin(names, loss_scale)` with those that the pass may reach, then
# `final(name, gradient)` with the array that will be a parameter's `grad`, and
# `end()` when the update is over, or has failed.
#
# While `PATCHES` are held, two names of Chainer 7.8.1 are replaced:
# `_MultiNodeOptimizer.update` (chainermn/optimizers.py, line 17) and
# `_backprop_utils` in `chainer._backprop` (chainer/_backprop.py, line 9), from
# which Chainer's loop takes its table (line 167).  Passes inside of the pass
# (`F.forget`) are not watched, and each thread has passes of its own.
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chainer import _backprop, _backprop_utils
from chainermn.optimizers import _MultiNodeOptimizer

from .patching import Current, Patch

#: What this thread's next pass begins with.
_next = Current()


def _update(original: Any, self: Any, lossfun: Any = None, *args: Any,
            **kwargs: Any) -> None:
    """The optimizer's ``update``, whose communicator hears of its pass."""
    watcher = None if lossfun is None or self.target is None else getattr(
        self.communicator, 'watcher', lambda model: None)(self.target)
    if watcher is None:
        original(self, lossfun, *args, **kwargs)
        return

    def watched(*args: Any, **kwargs: Any) -> Any:
        loss = lossfun(*args, **kwargs)
        _next.now = loss, watcher, self.actual_optimizer._loss_scale
        return loss
    try:
        original(self, watched, *args, **kwargs)
    finally:
        _next.now = None
        watcher.end()


class _Namespace:
    """Stands for the module that Chainer's loop takes its table from."""

    def __init__(self, original: Any) -> None:
        self._original = original

    def GradTable(self, **options: Any) -> Any:
        found, _next.now = _next.now, None
        if found is None:
            return self._original.GradTable(**options)
        return _Table(*found, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


#: To be held as long as a communicator has watchers.
PATCHES = (Patch(_MultiNodeOptimizer, 'update', _update),
           Patch(_backprop, '_backprop_utils', _Namespace))


class _Table(_backprop_utils.GradTable):
    """Chainer's table of gradients, which reports the final ones."""

    def __init__(self, loss: Any, watcher: Any, loss_scale: float | None,
                 **options: Any) -> None:
        super().__init__(**options)
        self._watcher = watcher
        self._names = {parameter.node: name for name, parameter
                       in watcher.parameters().items()}
        self._uses = _count_uses(loss.node, self._names)
        self._through: list[Any] = []
        watcher.begin({self._names[node] for node in self._uses}, loss_scale)

    def get_as_list(self, node: Any) -> Any:
        found = super().get_as_list(node)
        uses = self._uses.get(node)
        if uses:
            # The function that asks will add to the list, and be through
            # when the next one begins.
            self._uses[node] = uses - 1
            if uses == 1:
                self._through.append((node, found))
        return found

    def pop(self, node: Any) -> Any:
        # Nothing more is added to what the last function is through with.
        through, self._through = self._through, []
        for leaf, gradients in through:
            # As pop will do at the end: the sum is made once only.
            gradient = _backprop_utils._reduce(gradients)
            if gradient is not None:
                self._watcher.final(self._names[leaf], gradient.raw_array)
        return super().pop(node)


def _count_uses(output: Any, wanted: Mapping[Any, Any]) -> dict[Any, int]:
    """How many functions below the output use each wanted node."""
    uses: dict[Any, int] = {}
    waiting = [output.creator_node] if output.creator_node else []
    seen = set(waiting)
    while waiting:
        for node in set(waiting.pop().inputs):
            function = node.creator_node
            if not node.requires_grad:
                continue
            if function is None:
                if node in wanted:
                    uses[node] = uses.get(node, 0) + 1
            elif function not in seen:
                seen.add(function)
                waiting.append(function)
    return uses
