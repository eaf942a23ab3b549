"""Paths of a model's links and parameters."""
from __future__ import annotations

import collections
from typing import Any

import chainer
import numpy

from .calls import Value

#: Between a link's path and the name under which the link has reported.
OBSERVER = '\0/'


class Names:
    """Paths of a model's links and parameters."""

    def __init__(self, model: chainer.Link) -> None:
        #: Parameters that got their shape in a program, in this order.
        self.shaped: list[str] = []
        #: Placeholders of the parameters that their links make in forward.
        self.made: dict[str, Any] = {}
        self.links: dict[str, chainer.Link] = {}
        self.parameters: dict[str, chainer.Parameter] = {}
        #: How many links have a parameter, one with two paths counted twice.
        self.times: collections.Counter[str] = collections.Counter()
        self._of: dict[int, str] = {}
        links = list(model.namedlinks())
        for name, link in links:
            if id(link) not in self._of:
                self._of[id(link)] = name
                self.links[name] = link
        # model.namedparams() of a partitioned model has this rank's only.
        for path, link in self.links.items():
            for name in sorted(link._params):
                parameter = getattr(link, name)
                if id(parameter) not in self._of:
                    full = f'{path.rstrip("/")}/{name}'
                    self._of[id(parameter)] = full
                    self.parameters[full] = parameter
        self.reporter = chainer.Reporter()
        for path, link in self.links.items():
            self.reporter.add_observer(path + OBSERVER[:-1], link)
        for _, link in links:
            self.times.update(self._of[id(getattr(link, name))]
                              for name in link._params)

    def of(self, thing: Any) -> str | None:
        """The path of a link or parameter; None: not of this model."""
        return self._of.get(id(thing))


def parameters_of(names: Names) -> dict[str, Value]:
    """Shapes and dtypes of a model's parameters, by path, for planning."""
    found = {}
    for name, parameter in names.parameters.items():
        array = parameter._data[0]
        if array is None:
            array = names.made.get(name)
        found[name] = Value(
            None if array is None else tuple(array.shape),
            numpy.dtype(chainer.get_dtype(
                getattr(parameter.initializer, 'dtype', None)))
            if array is None else array.dtype)
    return found
