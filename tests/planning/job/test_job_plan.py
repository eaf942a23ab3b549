"""Plans of jobs: saved, read, edited by hand, and said."""
import dataclasses
import json

from chainer_fp8pipe.planning.job.choices import Choices, Wanted
from chainer_fp8pipe.planning.job.configuration import Configuration
from chainer_fp8pipe.planning.job.job_plan import (
    Alternative,
    JobPlan,
    load_job_plan,
    plan_of,
)
from chainer_fp8pipe.planning.job.job_profile import Figure

import pytest
from hypothesis import given
from hypothesis import strategies as st

from .jobs import codecs, figures, job
from .test_configuration import configurations, cut

#: JSON knows them all.
NUMBERS = st.floats(0, 1e12)
PATHS = st.text(st.characters(blacklist_categories=['Cs']), max_size=9)


@st.composite
def plans(draw):
    choice = draw(configurations())
    return JobPlan(
        choice, choice.stages * choice.replicas, draw(st.integers(1, 4096)),
        draw(st.dictionaries(PATHS, st.none() | st.tuples(
            st.integers(1, 9), st.integers(1, 9)), max_size=3)),
        draw(st.none() | NUMBERS), draw(NUMBERS), draw(NUMBERS),
        draw(st.dictionaries(PATHS, NUMBERS, max_size=3)),
        tuple(draw(st.lists(NUMBERS, max_size=3))),
        tuple(draw(st.lists(st.builds(
            Alternative, PATHS, PATHS, st.none() | NUMBERS, PATHS),
            max_size=2))),
        tuple(draw(st.lists(PATHS, max_size=2))), draw(st.integers(0, 999)))


@given(plans())
def test_what_was_saved_is_read_again(plan):
    again = load_job_plan(json.loads(json.dumps(plan.as_dict())))
    # JSON has lists for tuples.
    assert again == dataclasses.replace(plan, model={
        name: shape and list(shape) for name, shape in plan.model.items()})
    assert again.as_dict() == plan.as_dict()
    assert load_job_plan(plan) is plan


def test_a_file_holds_the_plan(tmp_path):
    plan = JobPlan(Configuration(2, 2, 4, cut(), 'fp8'), 4, 64,
                   {'/l/W': (3, 4), '/l/b': None}, 2e9)
    path = str(tmp_path / 'plan.json')
    plan.save(path)
    again = load_job_plan(path)
    assert again.as_dict() == plan.as_dict()
    assert again.choice == plan.choice


def edited(**changes):
    """A plan's dictionary; names with dots are inside of others."""
    data = JobPlan(Configuration(2, 2, 4, cut()), 4, 64).as_dict()
    for name, value in changes.items():
        inside, *path = reversed(name.split('__'))
        where = data
        for part in reversed(path):
            where = where[part]
        where[inside] = value
    return data


@pytest.mark.parametrize(('changes', 'message'), [
    ({'kind': 'menu'}, 'the plan: this is no plan of a job'),
    ({'format': 2}, 'a plan of format 2; this version reads format 1'),
    ({'ranks': 6}, '2 stages x 2 replicas are not 6 ranks'),
    ({'ranks': '4'}, "ranks must be a number of at least 1, not '4'"),
    ({'batch': 0}, 'batch must be a number of at least 1, not 0'),
    ({'choice': None}, 'is no plan of a job'),
    ({'predicted': None}, 'is no plan of a job'),
    ({'alternatives': [{'kind': 'ring'}]}, 'is no plan of a job'),
    ({'choice__codec': 'fp4'}, "codec must be one of .*, not 'fp4'"),
    ({'choice__algorithm': 'star'}, "algorithm .*, not 'star'"),
    ({'choice__micro_batches': 0}, 'micro_batches .* at least 1, not 0'),
    ({'choice__replicas': 3}, '2 stages x 3 replicas are not 4 ranks'),
    ({'choice__stages': 4}, 'the cut is for 2 stages'),
    ({'choice__speed': 3}, 'is no plan of a job'),
    ({'choice__cut__cuts': []}, '1 chunks cannot be on 2 stages'),
    ({'choice__cut__schedule': 'zigzag'}, "no schedule 'zigzag'")])
def test_what_was_edited_wrongly_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        load_job_plan(edited(**changes))


@pytest.mark.parametrize('name', [
    'kind', 'format', 'ranks', 'batch', 'model', 'choice', 'predicted',
    'alternatives', 'remarks', 'looked_at', 'memory_limit'])
def test_what_is_missing_is_named(name):
    data = edited()
    del data[name]
    with pytest.raises(ValueError, match=(
            'this is no plan' if name == 'kind' else
            rf'no plan of a job: KeyError\(.{name}.\)')):
        load_job_plan(data)


def test_a_cut_alone_is_no_plan_of_a_job():
    with pytest.raises(ValueError, match=r"partition\(plan=...\)"):
        load_job_plan(cut().as_dict())


@pytest.mark.parametrize('content', ['{"kind": ', '', '\udcff'])
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / 'plan.json'
    path.write_bytes(content.encode(errors='surrogateescape'))
    with pytest.raises(ValueError, match=r'plan\.json is no JSON'):
        load_job_plan(str(path))


@pytest.mark.parametrize('content', ['[]', '3', '"plan"', 'null'])
def test_json_of_another_kind_is_no_plan(tmp_path, content):
    path = tmp_path / 'plan.json'
    path.write_text(content)
    with pytest.raises(ValueError, match=r'plan\.json is no plan of a job'):
        load_job_plan(str(path))


def test_a_file_that_is_not_there_is_an_error():
    with pytest.raises(FileNotFoundError):
        load_job_plan('/not/there.json')


# --- for which job -----------------------------------------------------------

SHAPES = {'/l/W': (3, 4), '/l/b': (3,), '/lazy/W': None}


@pytest.mark.parametrize(('shapes', 'ranks', 'problem'), [
    (SHAPES, 2, ''), (SHAPES, None, ''),
    ({**SHAPES, '/lazy/W': (7, 7)}, 2, ''),
    ({**SHAPES, '/l/W': None}, 2, ''),
    (SHAPES, 3, 'the plan is for 2 ranks, and there are 3'),
    ({'/l/W': (3, 4), '/l/b': (3,)}, 2, '/lazy/W is only in the plan'),
    ({**SHAPES, '/m/W': (1,)}, 2, '/m/W is only in the model'),
    ({**SHAPES, '/l/W': (4, 3)}, 2,
     r'/l/W has shape (4, 3), in the plan (3, 4)')])
def test_a_plan_says_for_which_job_it_is(shapes, ranks, problem):
    said = JobPlan(Configuration(2), 2, 8, SHAPES).problem(shapes, ranks)
    assert problem in said
    assert bool(said) == bool(problem)


# --- as text -----------------------------------------------------------------

def test_a_plan_says_what_was_chosen_and_what_is_predicted():
    plan = JobPlan(
        Configuration(2, 2, 4, cut(), 'fp8', 'ring'), 4, 64, {}, 2e9, .1234,
        .05, {'forward and backward': .1, 'exchange': .0234, 'other': 0.0},
        (1.5e9, 3e8), (Alternative('float32', '4 replicas', .2, '62 % slower'),
                       Alternative('1 x 4', 'one', None, 'needs 3 GB')),
        ('rank 3 is slow',), 17)
    lines = str(plan).split('\n')
    assert lines[0] == ('2 stages x 2, 4 micro-batches, 1f1b, fp8 ring')
    assert lines[1] == ('a step of 64 samples on 4 ranks is predicted to '
                        'take 123.4 ms +- 5 %:')
    assert [line.split() for line in lines[2:4]] == [
        ['forward', 'and', 'backward', '100', 'ms'],
        ['exchange', '23.4', 'ms']]
    assert lines[4] == ('memory per rank, beyond the interpreter: 1.5 GB, '
                        '300 MB of 2 GB')
    assert 'gradients are near-exact (fp8)' in lines
    assert 'note: rank 3 is slow' in lines
    assert 'why not (of 17 configurations' in str(plan)
    assert [line.split() for line in lines[-2:]] == [
        ['float32', '200', 'ms', '62', '%', 'slower', '4', 'replicas'],
        ['1', 'x', '4', '-', 'needs', '3', 'GB', 'one']]


def test_one_rank_has_no_gradients_to_say_anything_of():
    assert 'gradients' not in str(JobPlan(Configuration(), 1, 8))


# --- of a search -------------------------------------------------------------

def test_the_plan_of_a_search_is_its_best_candidate():
    profile = job(figures(*[.01] * 8, parameters=400_000, size=16_000,
                          update=Figure(.001)),
                  (0, 0, 1, 1), rate=1e8, latency=1e-4,
                  codec=codecs(1e9, 1e-4), speeds=(1.0, 1.0, 1.0, 1.6),
                  remarks=('the links are slow',))
    choices = Choices(profile, Wanted(32, 1e9))
    plan = plan_of(choices)
    best = choices.best
    assert plan.choice == best.configuration
    assert (plan.seconds, plan.spread) == best.step.seconds
    assert sum(plan.parts.values()) == pytest.approx(plan.seconds)
    assert plan.memory == best.memory
    assert (plan.ranks, plan.batch, plan.memory_limit) == (4, 32, 1e9)
    assert plan.model == {f'/{number}/W': (100_000,) for number in range(8)}
    assert plan.remarks == (
        'the links are slow', 'rank 3 takes 1.6 times as long as the others '
        'for the same computation; every step waits for it')
    assert plan.looked_at == choices.looked_at
    assert load_job_plan(plan.as_dict()).as_dict() == plan.as_dict()
    # Others are slower by what they say, and the choice is none of them.
    assert plan.alternatives
    for one in plan.alternatives:
        assert one.seconds > plan.seconds
        assert one.loses == (
            f'{100 * (one.seconds / plan.seconds - 1):.0f} % slower')
    assert str(plan.choice) not in [one.configuration
                                    for one in plan.alternatives]
