"""Looks of events are told apart, by the colour-blind as well."""
from itertools import combinations

from chainer_fp8pipe.report.events import Event
from chainer_fp8pipe.report.looks import Looks, look_of_name
from chainer_fp8pipe.report.record import PHASES

import numpy
import pytest

# Machado, Oliveira, Fernandes 2009, severity 1, for linear RGB.
SIGHT = {
    'protanopia': [[0.152286, 1.052583, -0.204868],
                   [0.114503, 0.786281, 0.099216],
                   [-0.003882, -0.048116, 1.051998]],
    'deuteranopia': [[0.367322, 0.860646, -0.227968],
                     [0.280085, 0.672501, 0.047413],
                     [-0.011820, 0.042940, 0.968881]],
    'all colours': numpy.eye(3)}


def lab(colour, sight):
    """CIELAB of an sRGB colour as somebody with that sight sees it."""
    colour = numpy.array(colour)
    linear = numpy.where(colour <= 0.04045, colour / 12.92,
                         ((colour + 0.055) / 1.055) ** 2.4)
    seen = numpy.clip(numpy.array(SIGHT[sight]) @ linear, 0, 1)
    xyz = numpy.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722],
                       [0.0193, 0.1192, 0.9505]]) @ seen
    x, y, z = (numpy.cbrt(part) if part > 0.008856
               else 7.787 * part + 16 / 116
               for part in xyz / [0.9505, 1, 1.089])
    return numpy.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize('sight', SIGHT)
def test_the_colour_blind_tell_phases_apart(sight):
    colours = {look_of_name(name).colour for name in (*PHASES, 'bucket',
                                                      'wait')}
    # 2.3 is a difference that is just seen.
    assert min(numpy.linalg.norm(lab(one, sight) - lab(other, sight))
               for one, other in combinations(colours, 2)) > 9


def test_every_phase_but_the_rest_has_a_look_of_its_own():
    own = [look_of_name(name) for name in PHASES if name != 'other']
    # Both are messages of a pipeline.
    assert own.count(look_of_name('send')) == 2
    assert len(set(own)) == len(own) - 1
    assert look_of_name('other').label == 'other'


def test_a_second_chunk_is_lighter_and_says_so():
    events = [Event(0, 'forward', 0, 1, 0, chunk) for chunk in (0, 4)]
    first, second = map(Looks(events).of, events)
    assert sum(second.colour) > sum(first.colour)
    assert second.label == 'forward, chunk 2 of 2'
    assert first.colour == look_of_name('forward').colour
