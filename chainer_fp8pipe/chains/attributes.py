"""What links keep in attributes, copied so that a look changes nothing."""
# partition() runs forward on an example, and a link's own code on made-up
# values, and nothing must be seen of it later: a counter, a list, a generator
# of random numbers, a running mean.  So links get deep copies for that time,
# all made together, as links may share what is in them.  Links, parameters,
# variables, placeholders and what copy.deepcopy refuses (threads, files, other
# ranks) stay as they are.
from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Mapping
from typing import Any

import chainer
import numpy

from . import nested

Attribute = tuple[str, str]     # path of a link, name
State = dict[str, dict[str, Any]]   # attributes by path and name
#: Those that links have of Chainer.
CHAINERS = frozenset(('_params', '_persistent', '_children', '_device'))
#: Packages whose objects have threads or other ranks behind them.
_FOREIGN = frozenset(('chainer', 'chainermn', 'chainer_fp8pipe', 'mpi4py'))


def _copies(links: Mapping[str, chainer.Link]) -> tuple[State, list[Any]]:
    """Copies of attributes, and everything that was copied."""
    # Those behind NumPy's and Python's functions, which a pass seeds anew.
    memo: dict[int, Any] = {id(one): one for one in (
        numpy.random.mtrand._rand, vars(random)['_inst'], *links.values(),
        *(one for link in links.values() for one in link.params()))}
    for link in links.values():
        # What cannot be written to may be large: a file in memory, say.
        memo.update((id(leaf), leaf) for value in vars(link).values()
                    for leaf in nested.leaves(value)[0]
                    if isinstance(leaf, (chainer.Variable, nested.Dataless))
                    or not getattr(leaf.flags, 'writeable', True))
    found: State = {}
    for path, link in links.items():
        own = found[path] = dict(vars(link))
        for name, value in own.items():
            if name not in CHAINERS and (
                    type(value).__module__.partition('.')[0] not in _FOREIGN):
                try:
                    own[name] = copy.deepcopy(value, memo)
                except Exception:       # of any class
                    memo[id(value)] = value
    return found, memo.get(id(memo), [])    # deepcopy keeps originals there


def copied(links: Mapping[str, chainer.Link]) -> State:
    """Copies of the attributes that links have now."""
    return _copies(links)[0]


def set_attributes(links: Mapping[str, chainer.Link], state: State) -> None:
    """Gives links these attributes and no others."""
    for path, own in state.items():
        vars(links[path]).clear()
        vars(links[path]).update(own)


@contextlib.contextmanager
def on_copies(links: Mapping[str, chainer.Link]) -> Iterator[None]:
    """A block in which links have copies of their attributes."""
    before = {path: dict(vars(link)) for path, link in links.items()}
    set_attributes(links, copied(links))
    try:
        yield
    finally:
        set_attributes(links, before)


def generators_of(links: Mapping[str, chainer.Link]) -> list[Any]:
    """The generators of random numbers in attributes of links."""
    return [one for one in _copies(links)[1] if isinstance(one, (
        numpy.random.RandomState, numpy.random.BitGenerator, random.Random))]


def state_of(generator: Any) -> Any:
    """A generator's state, for :func:`set_state`."""
    if isinstance(generator, numpy.random.BitGenerator):
        return generator.state
    return (generator.getstate() if isinstance(generator, random.Random)
            else generator.get_state())


def set_state(generator: Any, state: Any) -> None:
    """Sets a generator to another one's state."""
    if isinstance(generator, numpy.random.BitGenerator):
        generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(state)
