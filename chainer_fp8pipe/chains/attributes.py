"""What links keep in attributes, copied so that a look changes nothing."""
# partition() runs forward on an example, and a link's own code on made-up
# values, and nothing must be seen of it later: a counter, a list, a generator
# of random numbers, a running mean.  So links get copies of their attributes
# for that time.  All are copied together, as links may share what is in them.
# Links, parameters, variables, functions, modules and what has threads or
# other ranks behind it are not copied, and so is an attribute that pickle
# refuses.  In training, where forward runs once for a micro-batch, nothing is
# copied but for a form of a batch that is new.
from __future__ import annotations

import contextlib
import io
import pickle
import random
import types
from collections.abc import Iterator, Mapping
from typing import Any

import chainer
import numpy

from .placeholder import is_placeholder

Attribute = tuple[str, str]     # path of a link, name
_OWN = frozenset(('_params', '_persistent', '_children', '_device'))
State = dict[str, dict[str, Any]]   # attributes by path and name
#: What never changes in itself, or is left alone; numbers and texts, too.
_SIMPLE = frozenset((int, bool, float, str, type(None)))
_SHARED = (type, types.FunctionType, types.ModuleType, numpy.ufunc,
           numpy.dtype, chainer.Link, chainer.Variable)
#: Modules whose objects have threads, locks or other ranks behind them.
_FOREIGN = frozenset((
    'asyncio', 'chainer', 'chainer_fp8pipe', 'chainermn', 'concurrent',
    'logging', 'mpi4py', 'multiprocessing', 'queue', 'socket', 'subprocess',
    'threading'))
_GENERATORS = (numpy.random.RandomState, numpy.random.BitGenerator,
               random.Random)
#: Those behind NumPy's and Python's functions, which each pass seeds anew.
_SEEDED = numpy.random.mtrand._rand, vars(random)['_inst']


class _Writer(pickle.Pickler):
    """Writes attributes, without arrays and what is not copied.

    Attributes:
        outside: These, by id.
        generators: Of random numbers.
    """

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, 5)
        self.outside: dict[int, Any] = {}
        self.generators: list[Any] = []

    def persistent_id(self, value: Any) -> int | None:
        if is_placeholder(value) or isinstance(
                value, (*_SHARED, *chainer.get_array_types())) or (
                type(value).__module__.partition('.')[0] in _FOREIGN
                or any(value is one for one in _SEEDED)):
            self.outside[id(value)] = value
            return id(value)
        if isinstance(value, _GENERATORS) and not any(
                value is one for one in self.generators):
            self.generators.append(value)
        return None


class _Reader(pickle.Unpickler):
    outside: dict[int, Any]

    def persistent_load(self, pid: int) -> Any:
        return self.outside[pid]


def _written(value: Any) -> _Writer | None:
    writer = _Writer()
    try:
        writer.dump(value)
    except Exception:       # of any class: it cannot be copied
        return None
    return writer


def _all_written(links: Mapping[str, chainer.Link]) -> tuple[State, _Writer]:
    """The attributes that can be copied, and these written."""
    found = {path: own for path, link in links.items() if (own := {
        name: value for name, value in vars(link).items()
        if type(value) not in _SIMPLE and name not in _OWN
        and not isinstance(value, _SHARED)})}
    writer = _written(found)
    if writer is None:
        found = {path: {name: value for name, value in own.items()
                        if _written(value)} for path, own in found.items()}
        writer = _written(found)
    assert writer is not None
    return found, writer


def attributes_of_links(links: Mapping[str, chainer.Link]) -> State:
    """The attributes of links that are there now."""
    return {path: dict(vars(link)) for path, link in links.items()}


def copied(links: Mapping[str, chainer.Link]) -> State:
    """Copies of the attributes that links have now."""
    _, writer = _all_written(links)
    reader = _Reader(io.BytesIO(writer.file.getvalue()))
    # What cannot be written to may be large: a file in memory, say.
    reader.outside = {pid: value.copy() if isinstance(
        value, chainer.get_array_types()) and not is_placeholder(value)
        and getattr(value.flags, 'writeable', True) else value
        for pid, value in writer.outside.items()}
    found = reader.load()
    return {path: {**vars(link), **found.get(path, {})}
            for path, link in links.items()}


def set_attributes(links: Mapping[str, chainer.Link], state: State) -> None:
    """Gives links these attributes and no others."""
    for path, own in state.items():
        vars(links[path]).clear()
        vars(links[path]).update(own)


@contextlib.contextmanager
def on_copies(links: Mapping[str, chainer.Link]) -> Iterator[None]:
    """A block in which links have copies of their attributes."""
    before = attributes_of_links(links)
    set_attributes(links, copied(links))
    try:
        yield
    finally:
        set_attributes(links, before)


def generators_of(links: Mapping[str, chainer.Link]) -> list[Any]:
    """The generators of random numbers in attributes of links."""
    return _all_written(links)[1].generators


def state_of(generator: Any) -> Any:
    """A generator's state, for :func:`set_state`; None: it tells none."""
    if isinstance(generator, numpy.random.BitGenerator):
        return generator.state
    with contextlib.suppress(NotImplementedError):  # of SystemRandom
        return (generator.get_state() if hasattr(generator, 'get_state')
                else generator.getstate())
    return None


def set_state(generator: Any, state: Any) -> None:
    """Sets a generator to another one's state; None leaves it as it is."""
    if isinstance(generator, numpy.random.BitGenerator):
        generator.state = state or generator.state
    elif hasattr(generator, 'set_state'):
        generator.set_state(state or generator.get_state())
    elif state is not None:
        generator.setstate(state)
