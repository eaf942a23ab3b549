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
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from chainermn.links import MultiNodeBatchNormalization

from ..links.grouped_bn import GroupedBatchNormalization
from ..mpi.agreement import agree
from .drift import compare
from .gradients import (
    SAME_MODEL,
    Gradients,
    describe,
    distinct_parameters,
    problem_of,
    shared,
)
from .model_exchange import ModelExchange, Saved

_OWN, _STATISTIC = 'own|', 'statistic|'
_NO_UPDATE = (
    'the gradients of the last multi_node_mean_grad were not used: with '
    'local_steps, update() of a chainer.GradientMethod must follow, whose '
    'target is the same model')


class LocalExchange(ModelExchange):
    """Averages what a model's local updates change, after synchronous ones.

    Attributes:
        anchors: By the parameter's name, the values of the last exchange, in
            float32 or float64; {} before the first local update.
        statistics: By key, the persistent arrays of the last exchange.
        since: Updates since then.
        moving: Names of parameters that may have changed since then.
    """

    anchors: dict[str, Any]
    statistics: dict[str, Any]
    since: int
    moving: set[str]
    _steps: int                     # of this period; 0: to be chosen
    _awaits_update: bool
    _is_common = False

    def is_local(self, updates: int) -> bool:
        return updates >= self._reducer.options.sync_steps

    def mean(self, model: chainer.Link, zero_fill: bool) -> None:
        """See :class:`.ModelExchange`; of a local update, nothing travels.

        Raises:
            RuntimeError: The gradients of the last one were not used.
        """
        if not self.is_local(self.updates):
            super().mean(model, zero_fill)
            return
        if not self.anchors:
            self._begin_first_period(model)
        if self._awaits_update:
            raise RuntimeError(_NO_UPDATE)
        self._awaits_update = True
        for name, parameter in distinct_parameters(model):
            rule = parameter.update_rule
            if rule is not None and rule.enabled:
                self.moving.add(name)
        self.updates += 1

    def updated(self, optimizer: Any) -> None:
        """The optimizer has updated the model: a period may be over."""
        if not self._awaits_update:
            return
        self._awaits_update = False
        self.since += 1
        self._steps = self._steps or self._period(optimizer)
        if self.since >= self._steps:
            self.end_period(optimizer.target)

    def _period(self, optimizer: Any) -> int:
        """How many updates the period has that begins."""
        options = self._reducer.options
        if options.local_steps != 'qsr':
            return options.local_steps
        rate = _rate(optimizer)
        wanted = (options.qsr_alpha / rate) ** 2 if rate > 0 else numpy.inf
        # (0.3 / 0.1)^2 is 9, and less in binary.
        return int(max(options.qsr_min,
                       min(wanted * (1 + 1e-9), options.qsr_max)))

    def end_period(self, model: chainer.Link) -> None:
        """Gives all ranks the mean of what local updates have changed."""
        if not self.since:
            return
        with chainer.using_device(model.device), (
                self._reducer.events.section('exchange')):
            if not self._of_deltas:
                # The codec's scales and residuals are those of gradients,
                # which are of another size than changes.
                self._of_deltas = True
                self.codec_state = self._reducer.codec.init()
            deltas = Deltas(model, self)
            try:
                self._average(model, deltas)
            except BaseException:
                deltas.undo()
                raise
            self._average_statistics(model)
        self.since, self._steps = 0, 0
        self.moving.clear()

    def _average_statistics(self, model: chainer.Link) -> None:
        """Replaces a model's persistent arrays by their means."""
        found, ranks = _persistent(model), self._reducer.ranks
        if found:
            whole = numpy.concatenate([
                chainer.backends.cuda.to_cpu(array).reshape(-1)
                for array in found.values()]).astype(numpy.float32)
            ranks.mean(whole)
            self._reducer.events.sent(
                2 * whole.nbytes * (ranks.comm.size - 1) // ranks.comm.size)
            for array in found.values():
                _copy_to(array, whole[:array.size].reshape(array.shape))
                whole = whole[array.size:]
        self.statistics = {key: array.copy() for key, array in found.items()}

    def _check(self, model: chainer.Link, gradients: Gradients, is_new: bool
               ) -> None:
        if is_new:
            gradients.problem = gradients.problem or _obstacle(model)
        super()._check(model, gradients, is_new)

    # --- anchors -------------------------------------------------------------

    def forget(self) -> None:
        """All ranks' parameters are the same now: the next update begins."""
        self.anchors, self.statistics = {}, {}
        self.since, self._steps = 0, 0
        self.moving, self._awaits_update = set(), False

    def _begin(self, model: chainer.Link) -> None:
        """Makes a model's values the anchors of its first period."""
        self.forget()
        self.anchors = {
            name: _value(parameter).astype(numpy.promote_types(
                parameter.dtype, numpy.float32))
            for name, parameter in distinct_parameters(model)
            if parameter.array is not None}

    def _begin_first_period(self, model: chainer.Link) -> None:
        """Raises on all ranks if the replicas are not the same."""
        ranks = self._reducer.ranks
        with chainer.using_device(model.device):
            self._begin(model)
        agree(ranks.comm, {
            'the number of updates': str(self.updates),
            **{f'parameter {name}': describe(anchor)
               for name, anchor in self.anchors.items()}},
            _obstacle(model), SAME_MODEL, wait=ranks.wait)
        compare(model, self.updates, ranks, self.anchors)

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

    def in_common(self, model: chainer.Link) -> dict[int, Any]:
        """The anchors of parameters that are others now, by ``id``."""
        return {id(parameter): self.anchors[name]
                for name, parameter in self._moved(model)
                } if self.since else {}

    # --- snapshots -----------------------------------------------------------

    def save(self) -> Saved:
        model, saved = self.reference(), super().save()
        if not self.since or model is None:
            return saved
        return {**saved, 'since': numpy.asarray(self.since),
                'steps': numpy.asarray(self._steps),
                **{_STATISTIC + key: chainer.backends.cuda.to_cpu(array).copy()
                   for key, array in self.statistics.items()},
                **{_OWN + name: chainer.backends.cuda.to_cpu(
                    _value(parameter)).copy()
                   for name, parameter in self._moved(model)}}

    def load(self, saved: Saved) -> None:
        """See there.

        The model's parameters must be the anchors; they become the rank's own.
        """
        super().load(saved)
        self.forget()
        model = self.reference()
        if model is None or 'since' not in saved:
            return
        self._begin(model)
        self.since, self._steps = int(saved['since']), int(saved['steps'])
        self.moving = {key.removeprefix(_OWN) for key in saved
                       if key.startswith(_OWN)}
        self.statistics = {key.removeprefix(_STATISTIC): value.copy()
                           for key, value in saved.items()
                           if key.startswith(_STATISTIC)}
        for name, parameter in self._moved(model):
            _set(parameter, saved[_OWN + name])


class Deltas(Gradients):
    """Changes of a model's parameters, in the form of its gradients.

    They are computed in the parameters' own memory where that is possible:
    until :meth:`write_back` or :meth:`undo` the parameters have no value.
    """

    anchors: Mapping[str, Any]
    what = 'the change of'
    failed = 'The parameters are those of the last exchange'

    def __init__(self, model: chainer.Link, local: LocalExchange
                 ) -> None:
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


def _obstacle(model: chainer.Link) -> str:
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
