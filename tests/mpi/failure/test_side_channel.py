import json
import socket
import time

from chainer_fp8pipe.mpi.failure.side_channel import SideChannel

import pytest


def received(channel):
    end = time.monotonic() + 100
    while not (found := channel.receive()) and time.monotonic() < end:
        time.sleep(0.001)
    return found


@pytest.fixture
def pair():
    made = SideChannel(), SideChannel()
    for number, channel in enumerate(made):
        channel.know({1 - number: made[1 - number].address})
    yield made
    for channel in made:
        channel.close()


def test_messages_arrive(pair):
    pair[0].send(1, {'from': 0, 'text': 'grüß dich'})
    assert received(pair[1]) == [{'from': 0, 'text': 'grüß dich'}]
    assert pair[1].receive() == []


def test_an_answer_goes_where_the_question_came_from(pair):
    zero, one = pair
    one.know({0: zero.address._replace(
        hosts=('127.0.0.1', '192.0.2.1'), port=1, machine='another')})
    zero.send(1, {'from': 0})
    received(one)
    one.send(0, {'from': 1})
    assert received(zero) == [{'from': 1}]


@pytest.mark.parametrize('data', [
    b'', b'x', b'{}', b'{"from": 0}', b'wrong' * 5 + b'{"from": 0}'])
def test_what_others_send_is_ignored(pair, data):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        for message in (data, pair[1].address.token.encode() + b'no JSON',
                        pair[1].address.token.encode() + b'[1]',
                        pair[1].address.token.encode() + json.dumps(
                            {'from': 'nobody'}).encode()):
            stranger.sendto(message, ('127.0.0.1', pair[1].address.port))
    pair[0].send(1, {'from': 0})
    found = []
    while not found or found[-1] != {'from': 0}:
        found += received(pair[1])
    assert found == [{'from': 'nobody'}, {'from': 0}]


def test_who_is_gone_is_no_error(pair):
    pair[1].close()
    for _ in range(3):
        pair[0].send(1, {'from': 0})
        time.sleep(0.01)
        assert pair[0].receive() == []


def test_messages_that_are_too_long_are_lost(pair):
    pair[0].send(1, {'from': 0, 'text': 'x' * 100_000})
    pair[0].send(1, {'from': 0})
    assert received(pair[1]) == [{'from': 0}]
