"""Updates of each rank by itself, and the mean of what they have changed."""
# A rank updates its own copy of the parameters H times, by its own gradients
# (local SGD: Stich, "Local SGD Converges Fast and Communicates Little", ICLR
# 2019).  These H updates are a period.  After the last of them, the change of
# each parameter since the last exchange travels in place of a gradient,
# through the same buckets, codec, residuals and algorithm.  All ranks then
# hold
#
#     anchor + mean of (value - anchor)
#
# which is the next anchor: the value that all ranks had last in common.  The
# first updates are synchronous (post-local SGD: Lin et al., "Don't Use Large
# Mini-batches, Use Local SGD", ICLR 2020).
#
# H is a number, or follows the learning rate by the quadratic synchronization
# rule (Gu et al., "A Quadratic Synchronization Rule for Distributed Deep
# Learning", ICLR 2024): H = max(H_min, floor((alpha / rate)^2)), with the rate
# at the beginning of a period.
#
# Whatever an optimizer does is of one rank: hooks, clipping, loss scale and
# momentum.  Parameters are averaged, and in float32 the statistics of batch
# normalisation and other persistent arrays: in an evaluation they must fit the
# parameters.  Between two exchanges ranks do not talk: who looks at a model
# sees the values of its own rank, in a block of `common` the anchors.  A
# snapshot's model is the anchor, and the ranks' own values are beside it.
#
# The change is computed where the value is, so that an anchor is all the
# memory that local steps take.
from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from chainermn.links import MultiNodeBatchNormalization

from ..links.grouped_bn import GroupedBatchNormalization
from .gradients import Gradients, distinct_parameters, problem_of, shared

#: Flat arrays by name, as in snapshots.
Saved = dict[str, numpy.ndarray]

_OWN, _STATISTIC = 'own|', 'statistic|'
_NO_UPDATE = (
    'the gradients of the last multi_node_mean_grad were not used: with '
    'local_steps, update() of a chainer.GradientMethod must follow, whose '
    'target is the same model')


class LocalSteps:
    """The period that one model is in.

    Args:
        options: The communicator's ``Options``.

    Attributes:
        anchors: By the parameter's name, the values of the last exchange, in
            float32 or float64; {} before the first local update.
        statistics: By key, the persistent arrays of the last exchange.
        since: Updates since then.
        moving: Names of parameters that may have changed since then.
    """

    def __init__(self, options: Any) -> None:
        self._options = options
        self.anchors: dict[str, Any] = {}
        self.statistics: dict[str, Any] = {}
        self.since = 0
        self._steps = 0         # of this period; 0: to be chosen
        self.moving: set[str] = set()
        self._awaits_update = self._is_common = False

    def takes(self, updates: int) -> bool:
        """Whether the update behind so many others is a local one."""
        return updates >= self._options.sync_steps

    def begin_update(self, model: chainer.Link) -> None:
        """The gradients of a local update are there.

        Raises:
            RuntimeError: Those of the last one were not used.
        """
        if self._awaits_update:
            raise RuntimeError(_NO_UPDATE)
        self._awaits_update = True
        for name, parameter in distinct_parameters(model):
            rule = parameter.update_rule
            if rule is not None and rule.enabled:
                self.moving.add(name)

    def end_update(self, optimizer: Any) -> bool:
        """The optimizer has made an update; whether the period is over."""
        if not self._awaits_update:
            return False
        self._awaits_update = False
        self.since += 1
        self._steps = self._steps or self._period(optimizer)
        return self.since >= self._steps

    def _period(self, optimizer: Any) -> int:
        """How many updates the period has that begins."""
        options = self._options
        if options.local_steps != 'qsr':
            return options.local_steps
        rate = _rate(optimizer)
        wanted = (options.qsr_alpha / rate) ** 2 if rate > 0 else numpy.inf
        # (0.3 / 0.1)^2 is 9, and less in binary.
        return int(max(options.qsr_min,
                       min(wanted * (1 + 1e-9), options.qsr_max)))

    # --- anchors -------------------------------------------------------------

    def forget(self) -> None:
        """All ranks' parameters are the same now: the next update begins."""
        self.anchors, self.statistics = {}, {}
        self.since, self._steps = 0, 0
        self.moving, self._awaits_update = set(), False

    def begin(self, model: chainer.Link) -> None:
        """Makes a model's values the anchors of its first period."""
        self.forget()
        self.anchors = {
            name: _value(parameter).astype(numpy.promote_types(
                parameter.dtype, numpy.float32))
            for name, parameter in distinct_parameters(model)
            if parameter.array is not None}

    def next_period(self, model: chainer.Link,
                    mean: Callable[[numpy.ndarray], None]) -> None:
        """The deltas' means have been written back.

        Args:
            model: Its persistent arrays become their means.
            mean: Replaces a float32 array by its mean over ranks.
        """
        found = _persistent(model)
        if found:
            whole = numpy.concatenate([
                chainer.backends.cuda.to_cpu(array).reshape(-1)
                for array in found.values()]).astype(numpy.float32)
            mean(whole)
            for array in found.values():
                _copy_to(array, whole[:array.size].reshape(array.shape))
                whole = whole[array.size:]
        self.statistics = {key: array.copy() for key, array in found.items()}
        self.since, self._steps = 0, 0
        self.moving.clear()

    @contextlib.contextmanager
    def common(self, model: chainer.Link) -> Iterator[None]:
        """A block in which a model's parameters are the anchors."""
        if not self.since or self._is_common:
            yield
            return
        moved = [*self._moved(model)]
        self._swap(model, moved)
        self._is_common = True
        try:
            yield
        finally:
            self._is_common = False
            self._swap(model, moved[::-1])  # two may share memory

    def _swap(self, model: chainer.Link,
              moved: list[tuple[str, chainer.Parameter]]) -> None:
        with chainer.using_device(model.device):
            for name, parameter in moved:
                own = _value(parameter).copy()
                _set(parameter, self.anchors[name])
                self.anchors[name][...] = own
            for key, array in _persistent(model).items():
                if key in self.statistics:
                    own = array.copy()
                    _copy_to(array, self.statistics[key])
                    self.statistics[key] = own

    def _moved(self, model: chainer.Link
               ) -> Iterator[tuple[str, chainer.Parameter]]:
        for name, parameter in distinct_parameters(model):
            if name in self.moving and name in self.anchors:
                yield name, parameter

    # --- snapshots -----------------------------------------------------------

    def save(self, model: chainer.Link | None) -> Saved:
        """This rank's part of a period; nothing at the beginning of one."""
        if not self.since or model is None:
            return {}
        return {'since': numpy.asarray(self.since),
                'steps': numpy.asarray(self._steps),
                **{_STATISTIC + key: chainer.backends.cuda.to_cpu(array).copy()
                   for key, array in self.statistics.items()},
                **{_OWN + name: chainer.backends.cuda.to_cpu(
                    _value(parameter)).copy()
                   for name, parameter in self._moved(model)}}

    def load(self, model: chainer.Link | None, saved: Mapping[str, Any]
             ) -> None:
        """Restores what :meth:`save` returned.

        The model's parameters must be the anchors; they become the rank's own.
        """
        self.forget()
        if model is None or 'since' not in saved:
            return
        self.begin(model)
        self.since, self._steps = int(saved['since']), int(saved['steps'])
        self.moving = {key.removeprefix(_OWN) for key in saved
                       if key.startswith(_OWN)}
        self.statistics = {key.removeprefix(_STATISTIC): value.copy()
                           for key, value in saved.items()
                           if key.startswith(_STATISTIC)}
        for name, parameter in self._moved(model):
            _set(parameter, saved[_OWN + name])

    def in_common(self, model: chainer.Link) -> dict[int, Any]:
        """The anchors of parameters that are others now, by ``id``."""
        return {id(parameter): self.anchors[name]
                for name, parameter in self._moved(model)
                } if self.since else {}


class Deltas(Gradients):
    """Changes of a model's parameters, in the form of its gradients.

    They are computed in the parameters' own memory where that is possible:
    until :meth:`write_back` or :meth:`undo` the parameters have no value.
    """

    anchors: Mapping[str, Any]
    what = 'the change of'
    failed = 'The parameters are those of the last exchange'

    def __init__(self, model: chainer.Link, local: LocalSteps) -> None:
        self.anchors, self.updates = local.anchors, local.since
        self._moving = local.moving
        self._shared = shared({
            name: _value(parameter)
            for name, parameter in distinct_parameters(model)
            if parameter.array is not None})
        super().__init__(model, False)
        self.entries['persistent arrays'] = str([
            (key, array.shape) for key, array in _persistent(model).items()])

    def _take(self, name: str, parameter: chainer.Parameter, zero_fill: bool
              ) -> str:
        if parameter.array is None or name not in self._moving:
            self.entries[f'parameter {name}'] = 'not updated'
            return ''
        anchor, value = self.anchors.get(name), _value(parameter)
        if anchor is None:
            return (f'parameter {name} was initialised after the last '
                    'exchange; call bcast_data(model) on all ranks then')
        if problem := problem_of(name, value, None):
            return problem
        self.parameters[name] = parameter
        if value.size:
            self.sizes[name] = value.size
        self._scales.setdefault(None, name)
        self.entries[f'parameter {name}'] = f'{value.dtype} {value.shape}'
        in_place = value.dtype == anchor.dtype and name not in self._shared
        xp = parameter.xp
        self.arrays[name] = xp.asarray(xp.subtract(     # may be a number
            value, anchor, **{'out': value} if in_place else {}))
        self.values[name] = anchor
        return ''

    def write_back(self, names: Iterable[str]) -> None:
        """Moves anchors and parameters by the means."""
        for name in names:
            anchor = self.anchors[name]
            anchor += self.flat[name].reshape(anchor.shape)
            _set(self.parameters[name], anchor)
        for name in names:      # as rounded, or written last
            anchor, value = self.anchors[name], _value(self.parameters[name])
            if name in self._shared or value.dtype != anchor.dtype:
                anchor[...] = value

    def undo(self) -> None:
        """Gives the parameters the values of the last exchange."""
        for name, parameter in self.parameters.items():
            _set(parameter, self.anchors[name])


def obstacle(model: chainer.Link) -> str:
    """Why a model cannot be trained by local steps; '' if it can."""
    for link in model.links():
        if isinstance(link, (MultiNodeBatchNormalization,
                             GroupedBatchNormalization)):
            return (f'{type(link).__name__} averages over ranks in every '
                    'forward pass, while local_steps lets their parameters '
                    'differ; pass local_steps=1, or use BatchNormalization')
    return ''


# --- what a rule updates -----------------------------------------------------

def _copy(parameter: chainer.Parameter) -> Any:
    """The float32 copy that is updated in place of a float16 parameter."""
    rule = parameter.update_rule
    return None if rule is None else rule._fp32_param


def _value(parameter: chainer.Parameter) -> Any:
    copy = _copy(parameter)
    return parameter.array if copy is None else copy.array


def _set(parameter: chainer.Parameter, value: Any) -> None:
    copy = _copy(parameter)
    for one in (parameter,) if copy is None else (copy, parameter):
        if one.array is not value:
            _copy_to(one.array, value)


def _copy_to(array: Any, value: Any) -> None:
    array[...] = chainer.backend.get_array_module(array).asarray(value)


def _persistent(model: chainer.Link) -> dict[str, Any]:
    """Floating-point persistent arrays by key, shared ones once."""
    found: dict[str, Any] = {}
    for path, link in sorted(model.namedlinks(), key=lambda item: item[0]):
        for name in sorted(link._persistent):
            array = getattr(link, name)
            if isinstance(array, chainer.get_array_types()) and (
                    array.dtype.kind == 'f') and not any(
                        array is other for other in found.values()):
                found[f'{path}/{name}'] = array
    return found


def _rate(optimizer: Any) -> float:
    """The learning rate of an optimizer.

    Raises:
        ValueError: It has none.
    """
    for name in 'lr', 'alpha':
        if (rate := getattr(optimizer.hyperparam, name, None)) is not None:
            return float(rate)
    raise ValueError(
        f"{type(optimizer).__name__} has no learning rate for local_steps="
        "'qsr'; pass a number of local_steps")
