"""Says when a parameter's gradient is final, while backward still runs."""
# Chainer writes the gradients of parameters at the very end of a backward
# pass. Until then a table has them; each function that a variable goes into
# asks the table for the variable's gradients once.  So this module counts
# these functions in the graph when a pass begins, and looks into the table
# when the last of them is through: the gradient there is the one that Chainer
# will write.
#
# The gradient of a layer's weights is computed before that of the layer's
# input, so that it can travel while the pass goes on to the layers below (Oh
# et al., "Out-of-Order BackProp", EuroSys 2022).
#
# Passes inside another one (`F.forget`) are not watched.
#
# From the first `watch` to the last `unwatch`, two names of
# `chainer._backprop` (Chainer 7.8.1) are replaced (see `Patch`):
# `_backprop_to_all` (chainer/_backprop.py, line 146), which all backward
# passes but `chainer.grad` go through, and `_backprop_utils` (line 9), from
# which that loop takes its table (line 167) and its step (line 225).  Another
# package's loop and step are called; another package's table is used in passes
# that concern no watcher.  Each thread has passes of its own, and watchers may
# come and go in any thread.
from __future__ import annotations

import threading
from collections.abc import Hashable, Mapping
from typing import Any, Protocol

import chainer
from chainer import _backprop, _backprop_utils
from chainer.functions.connection.convolution_2d import Convolution2DFunction
from chainer.functions.connection.convolution_nd import ConvolutionND
from chainer.functions.connection.linear import LinearFunction

from .patching import Patch

# Their gradients of different inputs have no work in common, and may be
# computed in any order (those of a deconvolution may not).
_SEPARATE = frozenset({LinearFunction, Convolution2DFunction, ConvolutionND})

Nodes = dict[Any, int]      # how many functions use a variable, by its node


class Watcher(Protocol):
    """An observer of the gradients that become final."""

    def parameters(self) -> Mapping[str, chainer.Parameter]:
        """The parameters to watch, by name, all of them initialised."""

    def begin(self, names: set[str], kind: Hashable, models: int,
              loss_scale: float | None) -> bool:
        """A pass begins; says whether to call :meth:`final`.

        Args:
            names: The parameters that the pass may reach.
            kind: Equal for passes through the same models.
            models: How many watchers have come so far.
            loss_scale: The factor of the gradients; None for none.
        """

    def final(self, name: str, gradient: Any) -> None:
        """The array is the one that will be the parameter's ``grad``."""


class _Thread(threading.local):
    """The pass that this thread is in."""

    inside = False
    uses: Nodes = {}                    # of what is to be reported
    told: Mapping[Any, list[tuple[Watcher, str]]] = {}
    table: _Table | None = None


_thread = _Thread()
_watchers: tuple[Watcher, ...] = ()
_count = 0                              # of watchers so far
_lock = threading.Lock()


def watch(watcher: Watcher) -> None:
    """Tells a watcher, from now on, of passes through its parameters."""
    global _watchers, _count
    with _lock:
        if not _watchers:
            for patch in _PATCHES:
                patch.install()
        _watchers += watcher,
        _count += 1


def unwatch(watcher: Watcher) -> None:
    """Stops telling a watcher of passes."""
    global _watchers
    with _lock:
        before, _watchers = _watchers, tuple(
            other for other in _watchers if other is not watcher)
        if before and not _watchers:
            for patch in _PATCHES:
                patch.remove()


class unwatched:
    """A ``with`` block in which this thread's passes are not reported."""

    def __enter__(self) -> None:
        self._before, _thread.inside = _thread.inside, True

    def __exit__(self, *_: Any) -> None:
        _thread.inside = self._before


def _reporting(original: Any) -> Any:
    """Chainer's loop, which tells the watchers of its passes."""
    def backprop(outputs: Any, retain_grad: bool, loss_scale: Any) -> None:
        if _thread.inside or not _watchers:
            original(outputs, retain_grad, loss_scale)
            return
        with unwatched():
            _begin(outputs, loss_scale)
            try:
                original(outputs, retain_grad, loss_scale)
            finally:
                _thread.uses, _thread.told, _thread.table = {}, {}, None
    return backprop


class _Namespace:
    """Stands for the module that Chainer's loop takes table and step from.

    ``chainer.grad`` has tables of its own.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def GradTable(self, **options: Any) -> Any:
        uses, _thread.uses = _thread.uses, {}
        if not uses:
            return self._original.GradTable(**options)
        _thread.table = _Table(uses, **options)
        return _thread.table

    def backprop_step(self, function: Any, indexes: tuple[int, ...],
                      outputs: Any, gradients: Mapping[Any, list[Any]],
                      is_debug: bool) -> None:
        """Chainer's, in two parts if some gradients can be final earlier."""
        step, table = self._original.backprop_step, _thread.table
        if table and type(function) in _SEPARATE:
            early = tuple(index for index in indexes if table.is_last(
                gradients[function.inputs[index]]))
            if early:
                step(function, early, outputs, gradients, is_debug)
                table.report()
                indexes = tuple(
                    index for index in indexes if index not in early)
        if indexes:
            step(function, indexes, outputs, gradients, is_debug)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


_PATCHES = (Patch(_backprop, '_backprop_to_all', _reporting),
            Patch(_backprop, '_backprop_utils', _Namespace))


class _Table(_backprop_utils.GradTable):
    """Chainer's table of gradients, which reports the final ones."""

    def __init__(self, uses: Nodes, **options: Any) -> None:
        super().__init__(**options)
        self._uses = uses
        self._through: list[Any] = []

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

    def is_last(self, gradients: list[Any]) -> bool:
        """Whether the function that adds to this list now is the last."""
        return any(found is gradients for _, found in self._through)

    def report(self) -> None:
        """Reports the gradients that nothing more is added to."""
        through, self._through = self._through, []
        for leaf, gradients in through:
            # As pop will do at the end: the sum is made once only.
            gradient = _backprop_utils._reduce(gradients)
            if gradient is not None:
                for watcher, name in _thread.told[leaf]:
                    watcher.final(name, gradient.raw_array)

    def pop(self, node: Any) -> Any:
        self.report()
        return super().pop(node)


def _begin(outputs: Any, loss_scale: Any) -> None:
    """Asks the watchers about this pass, and notes who is to be told."""
    names: dict[Any, list[tuple[Watcher, str]]] = {}
    for watcher in _watchers:
        for name, parameter in watcher.parameters().items():
            names.setdefault(parameter.node, []).append((watcher, name))
    uses, strangers = _count_uses([node for node, _ in outputs], names)
    reached: dict[int, set[str]] = {}
    for node in uses:
        for watcher, name in names[node]:
            reached.setdefault(id(watcher), set()).add(name)
    kind: Hashable = frozenset(reached)
    if len(reached) > 1 or strangers:
        # Both losses of a GAN go through both models, but not equally often.
        kind = kind, strangers, tuple(uses.get(node, 0) for node in names)
    wanted = {id(watcher) for watcher in _watchers
              if id(watcher) in reached and watcher.begin(
                  reached[id(watcher)], kind, _count, loss_scale)}
    _thread.told = {node: entries for node in uses if (entries := [
        entry for entry in names[node] if id(entry[0]) in wanted])}
    _thread.uses = {node: uses[node] for node in _thread.told}


def _count_uses(outputs: list[Any], wanted: Mapping[Any, Any]
                ) -> tuple[Nodes, int]:
    """How many functions between the outputs and each wanted node use it.

    Also returns how many parameters are not watched.
    """
    uses: Nodes = {}
    strangers = set()
    waiting = [node.creator_node for node in outputs
               if node.creator_node is not None]
    seen = set(waiting)
    while waiting:
        for node in set(waiting.pop().inputs):
            function = node.creator_node
            if not node.requires_grad:
                continue
            if function is not None:
                if function not in seen:
                    seen.add(function)
                    waiting.append(function)
            elif node in wanted:
                uses[node] = uses.get(node, 0) + 1
            elif isinstance(node.get_variable_or_none(), chainer.Parameter):
                strangers.add(node)
    for node in outputs:
        if node.creator_node is None:   # gets a gradient from elsewhere, too
            uses.pop(node, None)
    return uses, len(strangers)
