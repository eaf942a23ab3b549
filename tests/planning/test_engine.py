"""Programs take the time that hand and closed forms say."""
from chainer_fp8pipe.allreduce.plan import direct
from chainer_fp8pipe.pipeline.schedules import forward_schedule
from chainer_fp8pipe.planning.allreduce.codec_costs import (
    CodecCosts,
    StepCosts,
)
from chainer_fp8pipe.planning.allreduce.simulation import add_exchange
from chainer_fp8pipe.planning.cluster import Cluster
from chainer_fp8pipe.planning.deadlock import Deadlock
from chainer_fp8pipe.planning.engine import (
    Compute,
    Engine,
    Flush,
    Receive,
    Send,
)
from chainer_fp8pipe.planning.schedules.simulator import Costs, add_pipeline

import pytest


def run(*programs, cluster=None):
    """The engine and the ends of programs (rank, actions)."""
    engine = Engine(cluster or Cluster.pairs(3, 1.0, 0.5))
    added = [engine.add(rank, actions) for rank, actions in programs]
    engine.run()
    return engine, [program.ended for program in added]


def test_a_program_computes_and_waits_for_its_messages():
    """The message leaves at 1 s, takes 2 s on the link and 0.5 s more."""
    _, ends = run((0, [Compute(1.0), Send(1, 2.0, 'a')]),
                  (1, [Receive('a'), Compute(1.0)]))
    assert ends == [1, 4.5]


def test_messages_may_arrive_before_they_are_wanted():
    _, ends = run((0, [Send(1, 2.0, 'a')]), (1, [Compute(4.0),
                                                Receive('a')]))
    assert ends == [0, 4]


def test_of_equal_messages_each_is_received_once():
    """They arrive at 1.5 s and 2.5 s."""
    _, ends = run((0, [Send(1, 1.0, 'a'), Send(1, 1.0, 'a')]),
                  (1, [Receive('a'), Compute(0.25), Receive('a')]))
    assert ends[1] == 2.5


def test_a_program_that_waits_lets_the_others_of_its_rank_go_on():
    """Message at 1.5 s; the other program computes until 1 s."""
    _, ends = run((0, [Send(1, 1.0, 'a')]),
                  (1, [Receive('a'), Compute(1.0)]), (1, [Compute(1.0)]))
    assert ends == [0, 2.5, 1]


def test_a_rank_computes_one_thing_at_a_time():
    """The message is there at 1.5 s, the core at 3 s."""
    _, ends = run((0, [Send(1, 1.0, 'a')]),
                  (1, [Receive('a'), Compute(1.0)]),
                  (1, [Compute(2.0), Compute(1.0)]))
    assert ends == [0, 4, 3]


def test_a_send_that_blocks_ends_when_the_message_has_arrived():
    engine, ends = run(
        (0, [Send(1, 1.0, 'a', True, 'one'), Send(1, 1.0, 'b', True, 'two'),
             Compute(1.0)]), (1, [Receive('b')]))
    assert [tuple(span) for span in engine.spans] == [
        (0, 'one', 0, 1.5), (0, 'two', 1.5, 3.0)]
    assert ends == [4, 3]


def test_a_flush_waits_until_messages_have_left_not_arrived():
    """1 s on the link; the latency of 0.5 s comes after it."""
    _, ends = run((0, [Send(1, 1.0, 'a'), Flush(), Compute(1.0)]),
                  (1, [Receive('a')]))
    assert ends == [2, 1.5]


def test_after_a_flush_the_other_programs_have_their_turn():
    _, ends = run((0, [Compute(1.0), Flush(), Compute(1.0)]),
                  (0, [Compute(1.0)]))
    assert ends == [3, 2]


def test_a_program_may_begin_after_another():
    engine = Engine(Cluster.pairs(1, 1.0, 0.0))
    first = engine.add(0, [Compute(2.0)])
    second = engine.add(0, [Compute(1.0)], after=first)
    engine.run()
    assert (first.ended, second.ended) == (2, 3)


def test_a_computation_without_seconds_is_a_span_all_the_same():
    engine, _ = run((0, [Compute(1.0), Compute(0.0, 'none')]))
    assert [tuple(span) for span in engine.spans] == [(0, 'none', 1, 1)]


def test_what_is_busy_is_counted():
    engine, _ = run((0, [Compute(1.0), Send(1, 2.0, 'a'), Send(2, 1.0, 'b')]),
                    (1, [Receive('a'), Compute(3.0)]), (2, [Receive('b')]))
    assert (engine.link_seconds, engine.rank_seconds) == (2, 3)
    assert engine.seconds == 6.5


def test_ranks_that_wait_for_each_other_are_named():
    with pytest.raises(Deadlock) as caught:
        run((1, [Receive('b', 'of 0'), Send(0, 1.0, 'a')]),
            (0, [Compute(1.0), Receive('a', 'of 1'), Send(1, 1.0, 'b')]))
    assert caught.value.waits == ((0, 'of 1'), (1, 'of 0'))


# --- a pipeline and an all-reduce at the same time ---------------------------

@pytest.mark.parametrize(('activation', 'end'), [(0.0, 18.0), (4.0, 25.0)])
def test_gradients_wait_for_activations_on_the_same_port(activation, end):
    """Two pipelines of ranks 0 and 2, 1 and 3; 0 and 1 average 16 bytes.

    The first stages compute until 2 s.  Two activations of 4 bytes, from 1 s
    on, keep their ports busy until 9 s at 1 byte per second.  Then both
    halves of the exchange send 8 bytes each.
    """
    cluster = Cluster(range(4), 1.0, 0.0)
    engine = Engine(cluster)
    first = [add_pipeline(engine, forward_schedule(2, 2),
                          [Costs(1.0, 0.0, 0.0)] * 2, [activation],
                          ranks=ranks)[0] for ranks in ((0, 2), (1, 3))]
    exchange = add_exchange(
        engine, [direct(2)], StepCosts(cluster, CodecCosts(4, 4)), 4,
        frame_bytes=1 << 10, frames_in_flight=1, ranks=(0, 1), after=first)
    engine.run()
    assert [program.ended for program in first] == [2, 2]
    assert max(program.ended for program in exchange) == end


def test_exchanges_of_several_stages_do_not_take_each_others_messages():
    """Of the same plan on the same ranks; each has half of the port."""
    cluster = Cluster(range(2), 1.0, 0.0)
    engine = Engine(cluster)
    ends = [add_exchange(engine, [direct(2)], StepCosts(
        cluster, CodecCosts(1, 1)), 8, frame_bytes=1 << 10,
        frames_in_flight=1) for _ in range(2)]
    engine.run()
    assert [max(program.ended for program in programs)
            for programs in ends] == [12, 16]
