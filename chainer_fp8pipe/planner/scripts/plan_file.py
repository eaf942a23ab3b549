"""Reads a plan's file, which people edit, and says what is wrong with it."""
from __future__ import annotations

import dataclasses
import math
from typing import Any

from mpi4py import MPI

from ...communicators.options import make_options
from ...planning.job.configuration import Configuration
from ...planning.job.job_plan import JobPlan, load_job_plan
from ...planning.json_file import read_json

_REMEDY = ('correct it, or make the plan again: '
           'python -m chainer_fp8pipe plan -o FILE SCRIPT')
#: The types of what a field is said to be; a bool is no number.
_TYPES: dict[str, tuple[type, ...]] = {
    'a whole number': (int,), 'a number': (int, float), 'a text': (str,),
    'a list': (list,), 'an object': (dict,), 'true or false': (bool,),
    'a number or null': (int, float, type(None)),
    'a list or null': (list, type(None)),
    'an object or null': (dict, type(None)),
    'true, false or a text': (bool, str)}
#: What fields are, by path; ``*`` are all entries.
_FIELDS = {
    'format': 'a whole number', 'ranks': 'a whole number',
    'batch': 'a whole number', 'model': 'an object',
    'model.*': 'a list or null', 'model.*.*': 'a whole number',
    'memory_limit': 'a number or null', 'choice': 'an object',
    'choice.replicas': 'a whole number', 'choice.stages': 'a whole number',
    'choice.micro_batches': 'a whole number', 'choice.codec': 'a text',
    'choice.algorithm': 'a text', 'choice.overlap': 'true, false or a text',
    'choice.options': 'an object', 'choice.cut': 'an object or null',
    'choice.cut.format': 'a whole number',
    'choice.cut.stages': 'a whole number',
    'choice.cut.micro_batches': 'a whole number',
    'choice.cut.schedule': 'a text', 'choice.cut.cuts': 'a list',
    'choice.cut.cuts.*': 'an object', 'choice.cut.cuts.*.before': 'a text',
    'choice.cut.cuts.*.calls_later': 'a whole number',
    'choice.cut.recompute': 'a list',
    'choice.cut.recompute.*': 'true or false',
    'choice.cut.order': 'a list', 'choice.cut.order.*': 'a list',
    'choice.cut.order.*.*': 'a text', 'predicted': 'an object',
    'predicted.seconds': 'a number', 'predicted.spread': 'a number',
    'predicted.parts': 'an object', 'predicted.parts.*': 'a number',
    'predicted.memory': 'a list', 'predicted.memory.*': 'a number',
    'alternatives': 'a list', 'alternatives.*': 'an object',
    'remarks': 'a list', 'remarks.*': 'a text',
    'looked_at': 'a whole number', 'trials': 'a list',
    'trials.*': 'an object', 'trials.*.way': 'a text',
    'trials.*.seconds': 'a number', 'trials.*.spread': 'a number',
    'alternatives.*.kind': 'a text',
    'alternatives.*.configuration': 'a text',
    'alternatives.*.seconds': 'a number or null',
    'alternatives.*.loses': 'a text',
    'choice.cut.predicted': 'an object',
    'choice.cut.predicted.seconds': 'a number',
    'choice.cut.predicted.busy': 'a list',
    'choice.cut.predicted.busy.*': 'a number',
    'choice.cut.predicted.memory': 'a list',
    'choice.cut.predicted.memory.*': 'a number',
    'choice.cut.predicted.crossing': 'a list',
    'choice.cut.predicted.crossing.*': 'a number'}


def read_plan(path: str) -> JobPlan:
    """Reads a plan and checks all that can be checked without its model.

    Args:
        path: Of a file that :meth:`.JobPlan.save` has written.

    Raises:
        ValueError: There is no such file, or it is damaged, or no plan, or
            one that cannot be carried out; the message names file, field
            and remedy.
    """
    try:
        data = read_json(path, _REMEDY)
    except OSError as error:
        raise ValueError(f'{path} cannot be read ({error.strerror}); '
                         f'{_REMEDY}') from None
    try:
        if not isinstance(data, dict):
            raise ValueError('this is no plan of a job')
        if 'kind' in data:      # or else the loader says what it may be
            _check_fields(data)
        found = load_job_plan(data)
        check_choice(found)
    except ValueError as error:
        text = str(error).removeprefix('the plan: ')
        raise ValueError(f'{path}: {text}; {_REMEDY}') from None
    return found


def read_together(comm: MPI.Comm, path: str) -> JobPlan:
    """What the first rank reads with :func:`read_plan`; call it on all.

    Raises:
        ValueError: As there, or the plan is for another number of ranks; on
            all ranks.
    """
    found: JobPlan | str = ''
    if comm.rank == 0:
        try:
            found = read_plan(path)
            if problem := found.problem(found.model, comm.size):
                found = f'{path}: {problem}'
        except ValueError as error:
            found = str(error)
    found = comm.bcast(found)
    if isinstance(found, str):
        raise ValueError(found)
    return found


def check_choice(plan: JobPlan) -> None:
    """Raises ValueError if a plan's choice cannot be carried out."""
    choice = plan.choice
    for name in 'algorithm', 'overlap':
        if name in choice.options:
            raise ValueError(f'choice.options has {name!r}, which is '
                             f'choice.{name}')
    try:
        if choice.codec != 'naive':
            make_options(choice.codec, choice.communicator_options())
        elif choice.options or choice.overlap:
            raise ValueError("ChainerMN's naive has none")
    except ValueError as error:
        raise ValueError('choice.algorithm, overlap and options: '
                         f'{error}') from None
    rows, columns = choice.options.get('shape', (0, 0))
    if (rows, columns) != (0, 0) and rows * columns != choice.replicas:
        raise ValueError(f'choice.options.shape is {rows} x {columns}, but '
                         f'there are {choice.replicas} replicas')
    if plan.batch < choice.replicas * choice.micro_batches:
        raise ValueError(
            f'batch {plan.batch} cannot be cut into choice.micro_batches '
            f'{choice.micro_batches} for each of {choice.replicas} replicas')
    if choice.cut is not None:
        _check_cut(plan)


def _check_cut(plan: JobPlan) -> None:
    cut = plan.choice.cut
    assert cut is not None
    for group in cut.order:
        for name in group:
            # Of a Divisible, also the paths of layers.
            if not any(one == name or one.startswith(f'{name}/')
                       for one in plan.model):
                raise ValueError(f'choice.cut.order has {name}, which is no '
                                 'parameter of the model')


def _check_fields(data: dict[str, Any]) -> None:
    """Raises ValueError about a field that is missing or no such value."""
    for path, said in _FIELDS.items():
        for where, value in _values(data, path):
            types = _TYPES[said]
            if not isinstance(value, types) or (
                    isinstance(value, bool) and bool not in types):
                raise ValueError(f'{where} must be {said}, not {value!r}')
            if isinstance(value, (int, float)) and not (
                    0 <= value < math.inf):
                raise ValueError(f'{where} must be 0 or more, and finite, '
                                 f'not {value!r}')
    if any(not group for group in (data['choice']['cut'] or {}).get(
            'order', ())):
        raise ValueError('choice.cut.order has an empty group')
    unknown = set(data['choice']) - {
        field.name for field in dataclasses.fields(Configuration)}
    if unknown:
        raise ValueError(f'choice.{min(unknown)} is no field of a plan')


def _values(data: Any, path: str) -> list[tuple[str, Any]]:
    """All values of a path that has been checked but for its last name.

    With each comes what messages call it.
    """
    found: list[tuple[str, Any]] = [('', data)]
    for name in path.split('.'):
        parents, found = found, []
        for where, parent in parents:
            if parent is None:      # of a plan without a cut
                continue
            entries: Any = parent if name == '*' else [name]
            if isinstance(parent, list):
                entries = range(len(parent))
            for key in entries:
                if isinstance(parent, dict) and key not in parent:
                    raise ValueError(f'{where}{key} is missing')
                found.append((f'{where}{key}', parent[key]))
        found = [(f'{where}.', value) for where, value in found]
    return [(where[:-1], value) for where, value in found]
