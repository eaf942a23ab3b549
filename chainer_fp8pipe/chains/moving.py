"""Sends parameters to other ranks, with their optimizer's state."""
from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import chainer
import numpy
from mpi4py import MPI

from ..mpi.agreement import raise_together
from ..mpi.broadcast import receive_array, send_array
from .ghost import ghost
from .valueless_parameters import settle

_PICKLE = MPI.pickle        # as for messages
_COUNTERS = ('t', 'enabled', '_use_fp32_update')


def move(comm: MPI.Comm, parameters: Mapping[str, chainer.Parameter],
         before: Mapping[str, tuple[int, ...]],
         after: Mapping[str, tuple[int, ...]], optimizer: Any) -> int:
    """Moves parameters to other ranks; call it on all of them.

    Args:
        comm: The ranks of a pipeline.
        parameters: All of the model, by path.
        before: The ranks that have a parameter, by its path.
        after: The ranks that are to have a parameter.
        optimizer: Makes update rules; None: there are none.

    Returns:
        Bytes that all ranks have sent.

    Raises:
        ValueError: A hook of an update rule cannot be sent; on all ranks,
            before anything has moved.
    """
    # Before the first send: a rank that waits for a message learns of no
    # error.
    packed = raise_together(comm, lambda: {
        name: _packed(name, parameter)
        for name, parameter in parameters.items()
        if comm.rank == before[name][0]
        and not set(after[name]) <= set(before[name])}, error=ValueError)
    sent = 0
    for name, parameter in parameters.items():
        source = before[name][0]
        for rank in after[name]:
            if rank in before[name]:
                continue
            if comm.rank == source:
                sent += _send(comm, parameter, rank, packed[name])
            elif comm.rank == rank:
                _receive(comm, parameter, source, optimizer)
        if comm.rank in before[name] and comm.rank not in after[name]:
            take_away(name, parameter)
    return comm.allreduce(sent)


def take_away(name: str, parameter: chainer.Parameter) -> None:
    """Leaves a ghost of a parameter that is on other ranks."""
    array = parameter._data[0]
    if array is not None:
        settle(parameter, ghost(array.shape, array.dtype, name,
                                chainer.backend.get_array_module(array)))
    parameter.update_rule = None


def _packed(name: str, parameter: chainer.Parameter) -> bytes:
    """The description of a parameter's update rule, as a message."""
    rule = parameter.update_rule
    if rule is None:
        return _PICKLE.dumps(None)
    for hooks in (rule._hookable._pre_update_hooks,
                  rule._hookable._post_update_hooks):
        for key, hook in hooks.items():
            try:
                _PICKLE.dumps(hook)
            except Exception as error:
                raise ValueError(
                    f'the hook {key!r} of the update rule of {name} cannot '
                    f'go to another rank with the parameter ({error}); make '
                    'it a function, or an object of a class, at the top '
                    'level of a module') from error
    return _PICKLE.dumps(_described(rule))


def _send(comm: MPI.Comm, parameter: chainer.Parameter, rank: int,
          packed: bytes) -> int:
    array, rule = parameter._data[0], parameter.update_rule
    state = {} if rule is None else dict(rule.state or {})
    master = None if rule is None or rule._fp32_param is None else (
        rule._fp32_param.array)
    comm.send((array is None, packed, sorted(state), master is not None),
              rank)
    arrays = [numpy.asarray(chainer.backends.cuda.to_cpu(one))
              for one in (array, *map(state.get, sorted(state)), master)
              if one is not None]
    for one in arrays:
        send_array(comm, one, rank)
    return sum(one.nbytes for one in arrays)


def _receive(comm: MPI.Comm, parameter: chainer.Parameter, source: int,
             optimizer: Any) -> None:
    empty, packed, keys, has_master = comm.recv(source=source)
    described = _PICKLE.loads(packed)
    device = parameter._initial_device
    if not empty:
        settle(parameter, device.send(receive_array(comm, source)))
    state = {key: device.send(receive_array(comm, source)) for key in keys}
    master = (device.send(receive_array(comm, source)) if has_master
              else None)
    if not described or optimizer is None:
        return
    rule = optimizer.create_update_rule()
    plain, own, hookable = described
    vars(rule).update(plain)
    vars(rule.hyperparam).update(own)
    rule._hookable = hookable
    if state:
        rule._state = {key: value.item() if value.ndim == 0 else value
                       for key, value in state.items()}
    if master is not None:
        rule._fp32_param = chainer.Parameter(master, name=parameter.name)
    parameter.update_rule = rule


def _described(rule: Any) -> tuple[dict, dict, Any]:
    """Counters, hyperparameters and hooks of an update rule."""
    own = {key: value for key, value in vars(rule.hyperparam).items()
           if isinstance(value, (int, float, numpy.number))}
    return ({key: vars(rule)[key] for key in _COUNTERS if key in vars(rule)},
            own, copy.copy(rule._hookable))
