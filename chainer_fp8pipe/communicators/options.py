"""The options of ``create_communicator``, their defaults and their limits."""
from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable
from typing import Any

from ..allreduce.plan import ALGORITHMS, Algorithm
from ..codecs import CODECS, Row

#: Names of this package's communicators, each with defaults of its own.
FAMILIES: dict[str, dict[str, Any]] = {
    name: dict(row.defaults) for name, row in CODECS.items()}
_OF_CODECS = {option for row in CODECS.values() for option in row.options}


def _option(default: Any, help: str, choices: tuple[Any, ...] = (),
            low: float = -math.inf, high: float = math.inf,
            used_by: Callable[[Algorithm], object] = lambda row: True) -> Any:
    """An option; those of codecs are in their rows.

    Other algorithms than those that use it would silently do without it.
    """
    return dataclasses.field(default=default, metadata={
        'help': help, 'choices': choices, 'low': low, 'high': high,
        'algorithms': [name for name, row in ALGORITHMS.items()
                       if used_by(row)]})


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of a communicator; ``name`` says which of them are used.

    All have those up to ``check_every``.  ``fp8``, ``fp8_paper`` and ``int4``
    have ``warmup``; ``fp8`` and ``int4`` ``error_feedback``; ``fp8`` and
    ``fp8_paper`` (the paper's names in brackets) ``period`` (N) and
    ``epsilon``; ``fp8_paper`` ``quantile`` (Q), ``samples`` (R) and ``seed``.

    Raises:
        ValueError: A value is not allowed; the message says what is.
    """

    name: str
    algorithm: str = _option(
        next(iter(ALGORITHMS)), 'how gradients are summed: ' + '; '.join(
            f'{row.about} ({row.name})' for row in ALGORITHMS.values()),
        choices=tuple(ALGORITHMS))
    shape: tuple[int, int] = _option(
        (0, 0), 'rows and columns of the torus; 0x0: one row per node, or '
        'nearly square', low=0, used_by=lambda row: 'shape' in row.options)
    aggregators: int = _option(
        1, 'how many ranks, the last ones, sum for the others',
        low=1, used_by=lambda row: 'aggregators' in row.options)
    frame_bytes: int = _option(
        3 << 14, 'bytes of a message; 0: a whole bucket (store and forward)',
        low=0, used_by=lambda row: row.plan)
    bucket_bytes: int = _option(
        1 << 22, 'gradients that travel together, in bytes of float32; '
        '0: all', low=0)
    overlap: bool = _option(
        False, "exchange late layers' gradients during the backward pass",
        choices=(True, False))
    two_level: str = _option(
        'auto', 'exchange inside nodes first, then between them; auto: with '
        'several nodes of equally many ranks, more than one',
        choices=('auto', 'yes', 'no'), used_by=lambda row: row.two_level)
    ranks_per_node: int = _option(
        0, 'pretend that so many consecutive ranks are one node; 0: nodes '
        'are told apart by host name', low=0)
    shared_memory: bool = _option(
        True, "ranks of a node read each other's memory and send no messages, "
        'where the system allows that (Linux)',
        choices=(True, False), used_by=lambda row: row.plan)
    nonfinite: str = _option(
        'auto', 'NaN or infinite mean gradients: raise an error, or pass them '
        'on; auto: raise unless the loss is scaled dynamically',
        choices=('auto', 'raise', 'pass'))
    check_every: int = _option(
        100, 'updates between comparisons of all replicas; parameters or '
        'optimizer states that differ are an error naming parameter and '
        'ranks; 0: never', low=0)
    warmup: int = _option(
        100, 'updates in float32 before the first in the format', low=0)
    error_feedback: bool = _option(
        True, 'add what an encoding lost to the next gradient',
        choices=(True, False))
    period: int = _option(100, 'updates between choices of scales (N)', low=1)
    quantile: float = _option(
        0.95, 'quantile of |gradient / parameter| that sets the scale (Q)',
        low=0.0, high=1.0)
    samples: int = _option(
        1024, 'most elements that the quantile is estimated from (R)', low=1)
    epsilon: float = _option(
        1e-5, 'added to |parameter| before the division (epsilon)',
        low=1e-30, high=1e30)
    seed: int = _option(0, 'of the sampling', low=0)

    def __post_init__(self) -> None:
        for option, field in OPTIONS.items():
            value = getattr(self, option)
            if allowed := _unless_allowed(field, value):
                raise ValueError(f'{option} must be {allowed}, not {value!r}')
            # The same text on all ranks, whatever kind of number it is.
            kind: Any = type(field.default)
            if isinstance(value, str):
                continue
            if kind is tuple:
                object.__setattr__(self, option, tuple(map(int, value)))
            elif kind in (int, float):
                object.__setattr__(self, option, kind(value))
        if ALGORITHMS[self.algorithm].plan:
            return
        if self.overlap:
            raise ValueError(
                f'algorithm={self.algorithm!r} can only wait for MPI; pass '
                'another one, or overlap=False')
        if not self.row.has_sums:
            raise ValueError(
                f'algorithm={self.algorithm!r} makes sums in the format of '
                'the wire, which blocks with a scale of their own have not; '
                'pass another algorithm')

    def described(self) -> dict[str, str]:
        """Names each option with its value, for :func:`.agree`."""
        return {f'option {name} of the communicator': repr(value)
                for name, value in dataclasses.asdict(self).items()}

    @property
    def row(self) -> Row:
        """That of the codec in the table of codecs."""
        return CODECS[self.name]


#: Of all communicators, by name; the metadata has ``'help'`` and limits.
OPTIONS = {field.name: field for field in dataclasses.fields(Options)
           if field.metadata}


def options_of(name: str) -> list[str]:
    """The options that communicator ``name`` has."""
    return [option for option in OPTIONS
            if option in CODECS[name].options or option not in _OF_CODECS]


def make_options(name: str, given: dict[str, Any]) -> Options:
    """Checked options of communicator ``name``.

    Raises:
        ValueError: An option is unknown, its value is not allowed (the
            message lists what is), or the algorithm does not use it.
    """
    known = options_of(name)
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(
            f'communicator {name!r} has no option {unknown[0]!r}; '
            f'its options are: {", ".join(known)}')
    exact = {} if 'warmup' in known else {'warmup': 0}
    made = Options(name, **{**exact, **FAMILIES[name], **given})
    for option in given:
        users = OPTIONS[option].metadata['algorithms']
        if made.algorithm not in users:
            raise ValueError(
                f'{option}={given[option]!r} does not go with '
                f'algorithm={made.algorithm!r}; pass '
                f'algorithm={" or ".join(map(repr, users))}, or no {option}')
    return made


def without_warmup(name: str) -> dict[str, int]:
    """Options with which communicator ``name`` begins in its own format."""
    has_one = name in FAMILIES and 'warmup' in options_of(name)
    return {'warmup': 0} if has_one else {}     # ChainerMN's have no options


def parse_option(name: str, option: str, text: str) -> Any:
    """The value of an option written on a command line.

    Raises:
        ValueError: There is no such option, or ``text`` is not of its type.
    """
    if name not in FAMILIES:
        raise ValueError(f'communicator {name!r} takes no options on the '
                         f'command line; these do: {", ".join(FAMILIES)}')
    if option not in options_of(name):
        make_options(name, {option: text})      # raises, listing the names
    kind: Any = type(OPTIONS[option].default)
    read, allowed = {
        tuple: (lambda: tuple(map(int, text.split('x'))), 'like 4x8'),
        bool: (lambda: {'true': True, 'false': False}[text.lower()],
               'true or false')}.get(kind, (
                   lambda: kind(text), f'of type {kind.__name__}'))
    try:
        return read()
    except (ValueError, KeyError):
        raise ValueError(f'{option} must be {allowed}, not {text!r}'
                         ) from None


def _unless_allowed(field: dataclasses.Field, value: Any) -> str:
    """Names the values that are allowed; '' if this one is."""
    choices, low, high = (field.metadata[key]
                          for key in ('choices', 'low', 'high'))
    wanted = type(field.default)
    if choices:
        found = any(type(value) is type(choice) and value == choice
                    for choice in choices)
        return '' if found else f'one of {", ".join(map(repr, choices))}'
    if wanted is tuple:
        found = (isinstance(value, (tuple, list)) and len(value) == 2
                 and all(_is_number(item, numbers.Integral) and item >= 0
                         for item in value))
        return '' if found else 'two numbers, e.g. (4, 8)'
    if not _is_number(value, numbers.Integral if wanted is int
                      else numbers.Real):
        return f'of type {wanted.__name__}'
    if low <= value <= high:        # also refuses NaN
        return ''
    return (f'at least {low:g}' if high == math.inf
            else f'between {low:g} and {high:g}')


def _is_number(value: Any, kind: type) -> bool:
    return isinstance(value, kind) and not isinstance(value, bool)
