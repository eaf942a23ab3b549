import json

from chainer_fp8pipe.training.extensions import PipelineTimeline

import chainer
import pytest
from chainer.training import extensions

from tests.ranks import on_ranks
from tests.training.trainers import Job


@on_ranks(2)
@pytest.mark.parametrize('schedule', ['1f1b', 'zero_bubble'])
def test_one_update_of_all_ranks_is_drawn_and_traced(
        comm, tmp_path, schedule):
    job = Job(comm, schedule=schedule)
    trainer = job.trainer(tmp_path, 4)
    trainer.extend(PipelineTimeline(job.updater, 3))
    trainer.extend(extensions.Evaluator(
        chainer.iterators.SerialIterator(
            chainer.datasets.TupleDataset(*job.data), 4, repeat=False),
        job.model, eval_func=job.updater.evaluate), trigger=(1, 'iteration'))
    trainer.run()
    comm.Barrier()
    picture = (tmp_path / 'timeline.svg').read_text()
    assert schedule in picture
    assert picture.count('<rect') > 3 * comm.size
    with open(tmp_path / 'timeline.json') as file:
        events = [event for event in json.load(file)['traceEvents']
                  if event['ph'] == 'X']
    assert {event['pid'] for event in events} == set(range(comm.size))
    for rank in range(comm.size):
        names = [event['name'] for event in events if event['pid'] == rank]
        # Those of the update alone: the evaluations are not in it.
        for name in ('forward', 'backward'):
            assert [event['args']['micro_batch'] for event in events
                    if (event['pid'], event['name']) == (rank, name)] == [
                        0, 1, 2]
        assert names.count('update') == 1
        assert names.count('backward_weight') == (
            3 if schedule == 'zero_bubble' else 0)


def test_wrong_arguments_are_errors():
    with pytest.raises(ValueError, match='at least 1'):
        PipelineTimeline(None, 0)
    with pytest.raises(TypeError, match='not of a NoneType; RunReport'):
        PipelineTimeline(None)
