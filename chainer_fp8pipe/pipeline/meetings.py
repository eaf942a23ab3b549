"""What the ranks of a step tell each other: failures, numbers, gradients."""
# In each meeting every rank of a step says something small and hears what the
# others say.  Between them no rank waits for another one but through channels
# or groups of batch normalisation.  So a rank that fails anywhere says so in
# place of whatever the others say next, and all raise.
#
# Two decisions of Chainer's optimizers look at all parameters: the norm of the
# gradient for clipping, and whether an update is skipped because a gradient is
# not finite (dynamic loss scaling).  Here they are made over all stages.
# Where several stages use one parameter, each gets the sum of its gradients.
from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import chainer
import numpy
from chainer.optimizer_hooks import GradientClipping, GradientNoise
from mpi4py import MPI

from ..mpi.agreement import Meeting, agree, digest, raised_by_all, with_common
from ..mpi.world import shown, stderr, wait_until_read
from .channel import RemoteError

_SAME = ('All ranks must do the same: iterators of equal length, the same '
         'optimizer, hooks and schedules, one snapshot to resume from.')


class NotTraced(ValueError):
    """A model cannot be divided for a batch; raised before any work."""


class Meetings:
    """The meetings of all ranks, ``comm``, or of one pipeline's alone.

    ``waits`` gives a block in which this rank waits for the others.
    """

    def __init__(self, comm: MPI.Comm, waits: Callable[[], Any]) -> None:
        self.comm, self._waits = comm, waits
        self.broken = ''        # what has failed after it had begun
        #: What blocks of :meth:`noting` have caught on this rank.
        self.errors: list[BaseException] = []
        self._meetings: dict[int, Meeting] = {}

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """A block that may fail, of which the others hear in :meth:`open`."""
        try:
            yield
        except BaseException as error:
            self.errors.append(error)

    def open(self, comm: MPI.Comm, entries: Mapping[str, str],
             value: Any = None) -> list[Any]:
        """The first meeting of a step; the values of all ranks.

        If something has failed on a rank, or entries differ, it raises
        ValueError on all of them; or the error itself, if it is no Exception.
        """
        errors, self.errors = self.errors, []
        # A wish to exit, or else what came first.
        error = next((one for one in errors if not isinstance(
            one, Exception)), errors[0] if errors else None)
        text = '; '.join([
            str(one) if str(one) and type(one) in (NotTraced, ValueError)
            else f'{type(one).__name__}: {one}' for one in errors])
        texts, digests, values, untraced = zip(*self._exchange(comm, (
            text, digest(with_common(comm, entries)), value,
            NotTraced in map(type, errors))), strict=True)
        if any(texts) or len(set(digests)) > 1:
            try:
                agree(comm, entries, text, _SAME,
                      NotTraced if any(untraced) else ValueError)
            except ValueError as together:
                if error is not None and not isinstance(error, Exception):
                    raise error from None
                raise together from error
        return list(values)

    def meet(self, comm: MPI.Comm, value: Any = None,
             error: BaseException | None = None) -> list[Any]:
        """A later meeting: the values of all ranks.

        If a rank says by which ``error`` it has failed, this raises on all:
        that error there, elsewhere, also where it is a repetition of what
        another rank has said, a :class:`RemoteError`.
        """
        is_own = error is not None and not isinstance(error, RemoteError)
        if is_own:
            show_traceback(comm)
        texts, values = zip(*self._exchange(comm, (
            '' if error is None else str(error) or type(error).__name__
            if is_own else ' ', value)), strict=True)
        if not any(texts):
            return list(values)
        # Messages of the failed step may still be on their way, or some
        # ranks have been updated.
        ranks = comm.Get_group().Translate_ranks(None, self.comm.Get_group())
        self.broken = '; '.join(
            f'rank {rank}: {text}' for rank, text
            in zip(ranks, texts, strict=True) if text.strip()
        ) or 'another rank failed'
        if error is not None and is_own:
            raise error
        raise raised_by_all(RemoteError(self.broken)) from error

    def _exchange(self, comm: MPI.Comm, what: tuple) -> list[Any]:
        meeting = self._meetings.setdefault(id(comm), Meeting(comm))
        with self._waits():
            return meeting.say(what)


def show_traceback(comm: MPI.Comm) -> None:
    """Prints the exception that is handled, before the other ranks' errors."""
    if comm.size > 1:
        error: Any = sys.exc_info()[1]
        sys.stdout.flush()
        stderr().write(f'\nrank {comm.rank} of {comm.size} failed:\n'
                       f'{shown(error)}')
        stderr().flush()
        with contextlib.suppress(AttributeError):
            error.is_shown = True
        wait_until_read()
        # On its way from one node, what another prints may still overtake.
        time.sleep(0.2)


# --- the optimizers ----------------------------------------------------------

Add = Callable[[float], float]


def decide_together(optimizer: Any, add: Add) -> None:
    """Makes an optimizer decide with those of the other stages.

    ``add`` sums a number over the stages of a pipeline, on all ranks.  Call it
    before every update, as hooks may have been added since the last.
    """
    def check() -> None:
        """All stages skip an update if one stage's gradient is not finite."""
        type(optimizer).check_nan_in_grads(optimizer)
        if optimizer._loss_scaling_is_dynamic:
            skip = add(float(optimizer._loss_scaling_isnan)) > 0
            optimizer._loss_scaling_isnan = skip
            optimizer._loss_scaling_isnan_ever |= skip
    optimizer.check_nan_in_grads = check
    hooks = optimizer._hookable._pre_update_hooks
    for name, hook in hooks.items():
        # Chainer has a second class of it, chainer.optimizer's.
        if type(hook).__call__ is GradientClipping.__call__:
            hook = hooks[name] = _ClipTogether(hook)
        if isinstance(hook, _ClipTogether):
            hook.add = add          # an optimizer may get other ranks


def decisions(optimizer: Any, stages: int, replicas: int = 1
              ) -> dict[str, str]:
    """The settings that the optimizers of all stages must share.

    Raises ValueError for a hook that would look at one of several stages only,
    or draw other numbers on each rank.
    """
    own, rules = _hooks(optimizer), [
        pair for parameter in optimizer.target.params()
        for pair in _hooks(parameter.update_rule)]
    for name, hook in own + rules if stages * replicas > 1 else ():
        if isinstance(hook, GradientNoise):
            raise ValueError(
                f'the hook {name!r}, a GradientNoise, would draw other noise '
                'on each rank for a parameter that several of them have; '
                'leave it out, or train with one process')
    for name, hook in own if stages > 1 else ():
        if not getattr(hook, 'call_for_each_param', False) and (
                getattr(hook, '__module__', '').partition('.')[0]
                not in ('chainer', 'chainer_fp8pipe')):
            raise ValueError(
                f'the hook {name!r}, a {type(hook).__name__}, would see the '
                'parameters and gradients of one stage only; use chainer\'s '
                'GradientClipping, which looks at all stages, or a hook of '
                'each parameter (call_for_each_param = True)')
    kind = type(getattr(optimizer, 'actual_optimizer', optimizer)).__name__
    return {
        'the optimizer': f'{kind} with {optimizer.hyperparam}',
        'the gradient clipping': ', '.join(
            name for name, hook in own
            if isinstance(hook, GradientClipping)) or 'none',
        'dynamic loss scaling': str(optimizer._loss_scaling_is_dynamic)}


@contextlib.contextmanager
def counting_nothing(optimizer: Any, stages: int) -> Iterator[None]:
    """A block with an update; ValueError for a hook that counts in it.

    Which a hook of each parameter would do over those of one stage.
    """
    def counts() -> dict[tuple[str, str], str]:
        return {(name, key): repr(
            len(value) if isinstance(value, list) else value)
            for name, hook in _hooks(optimizer) if stages > 1
            and getattr(hook, 'call_for_each_param', False)
            for key, value in getattr(hook, '__dict__', {}).items()
            if isinstance(value, (int, float, list, numpy.generic))}
    before = counts()
    yield
    for (name, key), value in counts().items():
        if before.get((name, key), value) != value:
            raise ValueError(
                f'the hook {name!r} changes its {key!r} in an update, and '
                'sees the parameters of one stage only; count updates by '
                'rule.t, and keep what else changes as an attribute of each '
                "parameter's update rule")


def _hooks(owner: Any) -> list[tuple[str, Any]]:
    """Names and hooks of an optimizer or update rule."""
    hookable = getattr(owner, '_hookable', None)
    return [] if hookable is None else [
        *hookable._pre_update_hooks.items(),
        *hookable._post_update_hooks.items()]


class _ClipTogether(GradientClipping):
    """Chainer's clipping with the norm over all stages."""

    add: Add

    def __init__(self, hook: GradientClipping) -> None:
        self._hook = hook       # whose threshold may be changed later

    @property
    def threshold(self) -> float:
        return self._hook.threshold

    def __call__(self, optimizer: Any) -> None:
        parameters = list(optimizer.target.params(False))
        part = getattr(optimizer.target, 'partition', None)
        # What several stages have counts once.
        norm = float(numpy.sqrt(self.add(sum(
            _square_norm(parameter.grad) for parameter in (
                part.counted() if part else parameters)))))
        # As in Chainer, a norm that is not finite spoils all gradients.
        rate = self.threshold / norm if norm else numpy.inf
        if not rate >= 1:
            for parameter in parameters:
                with chainer.using_device(parameter.device):
                    parameter.grad = (parameter.grad * rate).astype(
                        parameter.dtype, copy=False)


def _square_norm(gradient: Any) -> float:
    flat = chainer.backends.cuda.to_cpu(gradient).reshape(-1)
    # Summed in float64, which numpy.vdot would not do.
    return float(numpy.einsum('i,i', flat, flat, dtype=numpy.float64,
                              casting='safe'))


@contextlib.contextmanager
def tied_gradients(stage: int, ties: Mapping[int, tuple[int, ...]],
                   model: chainer.Link, channels: Any,
                   waits: Callable[[], Any]) -> Iterator[None]:
    """A block in which one stage has the gradients of a parameter of several.

    The first of its stages, its home, has the sum, which is averaged there
    over replicas.  After the block the others get it, too: so the copies stay
    the same, bit for bit.  ``ties`` has the stages of each tied parameter, by
    its ``id``; parameters of ``model`` are in the same order on all ranks.
    """
    tied = {id(one): (one, *ties[id(one)])
            for _, one in (model.namedparams() if ties else ())
            if id(one) in ties}.values()

    with waits():
        for parameter, home, *others in tied:
            if home != stage:
                channels.send((parameter.grad,), home)
                parameter.cleargrad()       # there is nothing to average
                continue
            for gradient, in map(channels.receive, others):
                if parameter.grad is None:
                    parameter.grad = gradient
                elif gradient is not None:
                    parameter.grad += gradient
    yield
    with waits():
        for parameter, home, *others in tied:
            if home != stage:
                parameter.grad, = channels.receive(home)
                continue
            for other in others:
                channels.send((parameter.grad,), other)
        channels.flush()        # an update may write to what was sent
