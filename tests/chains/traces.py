"""Traces of models that nobody wrote, and what can be said of any."""
import types

from chainer_fp8pipe.chains.calls import Call, Source, Value
from chainer_fp8pipe.chains.placeholder import placeholder

import numpy
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

#: Drawing a trace takes milliseconds, and much longer on a busy machine.
few = settings(max_examples=max(settings.default.max_examples // 4, 1),
               suppress_health_check=[HealthCheck.too_slow])

_LINKS = 4
_FLOAT = numpy.dtype('f')

#: A parameter of each link, and one more of some of them.
PARAMETERS = {
    f'/{link}/{name}': Value((size,), _FLOAT)
    for link, size in enumerate((300, 1, 50, 4000))
    for name in ('W', 'b')}


def program_of(calls, results=()):
    """What a layout reads of a program."""
    return types.SimpleNamespace(
        calls=calls, reports={}, kept={},
        result=[placeholder((), 'f', source) for source in results])


@st.composite
def traces(draw, seconds=False, most=12):
    """Calls of a model: any graph, parameters that are shared, loops."""
    calls = []
    first = {}
    for number in range(draw(st.integers(1, most))):
        known = [Source(before, output) for before, call in enumerate(calls)
                 for output in call.outputs]
        inputs = draw(st.lists(st.sampled_from(known), max_size=3)
                      ) if known else []
        link = draw(st.sampled_from([None, *range(_LINKS)]))
        names, path = (), ()
        if link is not None:
            path = (first.setdefault(link, number),)
            names = tuple(draw(st.lists(
                st.sampled_from([f'/{link}/W', f'/{link}/b']), unique=True)))
            # A tied one: another link's.
            names += tuple(draw(st.lists(
                st.sampled_from(['/0/W', '/3/W']).filter(
                    lambda name, had=names: name not in had), max_size=1)))
        call = Call('call', path=path, inputs=tuple(inputs), parameters=names,
                    outputs={output: _value(draw) for output in range(
                        draw(st.integers(1, 2)))})
        call.retained = tuple(draw(st.lists(st.sampled_from(
            [*inputs, *(Source(number, output) for output in call.outputs)]),
            unique=True)))
        call.kept = draw(st.sampled_from([0, 0, 1000]))
        call.temporary = draw(st.sampled_from([0, 100, 5000]))
        if seconds:
            call.forward, call.backward = (
                draw(st.integers(0, 20)) * 1e-3 for _ in range(2))
        if link is not None and draw(st.integers(0, 3)) == 0:
            call.whole = (f'/{link}',)
        calls.append(call)
    return calls


@st.composite
def going_on(draw, stages, **options):
    """The same, with values of an earlier batch on some of the stages."""
    pins = [Call('state', outputs={0: _value(draw)}, pinned=stage)
            for stage in draw(st.lists(st.integers(0, stages - 1),
                                       max_size=2))]
    calls = draw(traces(**options))
    for call in calls:
        call.inputs = tuple(
            Source(draw(st.integers(0, len(pins) - 1)), 0)
            if pins and draw(st.integers(0, 3)) == 0 else
            source._replace(call=source.call + len(pins))
            for source in call.inputs)
        call.retained, call.path = (), tuple(
            number + len(pins) for number in call.path)
    return pins + calls


def _value(draw):
    return Value((draw(st.integers(0, 900)),), _FLOAT, True)


def chain(*seconds, size=1000, parameters=1000, kept=0):
    """Calls one after the other, each with a parameter of its own.

    Args:
        seconds: Of each call, forward and backward together.
        size: Bytes of each output.
        parameters: Bytes of each parameter.
        kept: Bytes that each call keeps.

    Returns:
        The calls, and the parameters by path.
    """
    calls, found = [], {}
    for number, time in enumerate(seconds):
        name = f'/{number}/W'
        found[name] = Value((parameters // 4,), _FLOAT)
        calls.append(Call(
            'linear', f'/{number}', (number,),
            (Source(number - 1, 0),) if number else (), (name,),
            {0: Value((size // 4,), _FLOAT, True)}, time / 2, time / 2,
            kept=kept))
    return calls, found


def stacked(layers, steps, lateral=False):
    """A stack of recurrent layers along a sequence, step by step.

    Args:
        layers: How many.
        steps: How many.
        lateral: A layer has another parameter, which its first step does
            not use.
    """
    calls, states, first = [], [None] * layers, {}
    for _ in range(steps):
        below = None
        for layer in range(layers):
            before = states[layer]
            names = (f'/{layer}/upward/W',)
            if lateral and before is not None:
                names += (f'/{layer}/lateral/W',)
            number = first.setdefault(layer, len(calls))
            calls.append(Call(
                'lstm', f'/{layer}', (number,),
                tuple(source for source in (below, before) if source),
                names, {0: Value((8,), _FLOAT, True)}, .001, .001))
            below = states[layer] = Source(len(calls) - 1, 0)
        calls.append(Call('loss', inputs=(below,),
                          outputs={0: Value((), _FLOAT, True)}))
    return calls
