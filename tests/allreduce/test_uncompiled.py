"""What is compiled, and what is done in Python instead, give the same bits."""
from chainer_fp8pipe.allreduce.bucket import Bucket
from chainer_fp8pipe.allreduce.executor import Framing, PlanExecutor
from chainer_fp8pipe.allreduce.plan import Instruction, Opcode
from chainer_fp8pipe.allreduce.rank_plan import RankPlan, Step
from chainer_fp8pipe.allreduce.sums import FORMS
from chainer_fp8pipe.allreduce.uncompiled import Uncompiled
from chainer_fp8pipe.codecs import BlockScaled, Cast, Fp8Ratio, Tensors
from chainer_fp8pipe.report.stream import EventStream

import ml_dtypes
import numpy
import pytest

from tests.codecs import fake_cupy
from tests.ranks import on_ranks

from .helpers import begin_on, bits, plans, spoiled, tensors_of

SIZES = [1000, 0, 3, 2037]
OF_CODECS = {
    'float32': lambda: Cast('float32'),
    'float16': lambda: Cast('float16'),
    'nearest': lambda: Fp8Ratio(period=1),
    'truncate': lambda: Fp8Ratio(period=1, rounding='truncate'),
    'no feedback': lambda: Fp8Ratio(period=1, error_feedback=False),
    'clipping': lambda: Fp8Ratio(period=2, headroom=1.0),
    'int4': BlockScaled, 'e2m1': lambda: BlockScaled('e2m1'),
    'int5': lambda: BlockScaled('int5', error_feedback=False)}


def results(comm, name, form, make_codec, kind, early):
    """All that three updates leave behind."""
    made = PlanExecutor(comm, plans(name, comm.size), EventStream(),
                   Framing(300, 3, form))
    codec, found = make_codec(), []
    for update in range(3):
        tensors = spoiled(tensors_of(
            comm.rank, SIZES, update, codec.grain), comm.rank, kind)
        wire = numpy.zeros(tensors.size, codec.wire_dtype)
        begin_on(comm, codec, tensors)
        job = made.submit(Bucket(codec, tensors, wire, 0, tensors.size,
                              made.prescale(codec), decodes=not early))
        if early:
            made.run()
            assert job.finished
            made.begin_decoding(job)
        else:
            made.run()
        assert job.passes == (job.compiled is not None and not early)
        if not job.passes:
            decoded = spoiled(tensors_of(
                comm.rank, SIZES, update, codec.grain), comm.rank, kind)
            codec.decode(decoded, wire)
            for one, other in zip(tensors.gradients, decoded.gradients,
                                  strict=True):
                numpy.testing.assert_array_equal(bits(one), bits(other))
        found += [*([wire] if early else []), *tensors.gradients,
                  job.nonfinite, job.wire_is_finite, sorted(codec.nonfinite)]
    state = codec.state()
    found += [state[key] for key in sorted(state)]
    if isinstance(codec, Fp8Ratio):
        found.append(codec.report())
    return found, job


@pytest.mark.parametrize('kind', ['normal', 'extreme', 'nonfinite'])
@pytest.mark.parametrize('codec', OF_CODECS)
@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('name', ['direct', 'ring', 'torus',
                                  'two_level_direct_ring'])
@on_ranks(4)
def test_compiled_code_leaves_the_bits_that_python_leaves(
        comm, name, form, codec, kind):
    check_bits(comm, name, form, codec, kind)


@pytest.mark.parametrize('codec', OF_CODECS)
@pytest.mark.parametrize('form', FORMS)
@on_ranks(1)
def test_so_does_compiled_code_of_a_single_rank(comm, form, codec):
    for kind in 'normal', 'extreme', 'nonfinite':
        check_bits(comm, 'direct', form, codec, kind)


def check_bits(comm, name, form, codec, kind):
    """Compares what compiled code leaves with what Python leaves."""
    if form == 'wire' and OF_CODECS[codec]().grain > 1:
        return      # no sums of records; options refuse it
    for early in (False, True):
        with numpy.errstate(all='ignore'):
            compiled, job = results(comm, name, form, OF_CODECS[codec], kind,
                                    early)
            assert job.compiled
            with pytest.MonkeyPatch.context() as patch:
                for kind_of_codec in (BlockScaled, Cast, Fp8Ratio):
                    patch.setattr(kind_of_codec, 'compiled',
                                  lambda *arguments: None)
                expected, job = results(comm, name, form, OF_CODECS[codec],
                                        kind, early)
            assert not job.compiled
        assert len(compiled) == len(expected)
        for one, other in zip(compiled, expected, strict=True):
            if isinstance(one, numpy.ndarray):
                numpy.testing.assert_array_equal(bits(one), bits(other))
            else:
                assert one == other


@on_ranks(2)
def test_codecs_without_compiled_code_work_all_the_same(comm):
    _, job = results(comm, 'direct', 'float32', lambda: Fp8Ratio(
        rounding='stochastic'), 'normal', False)
    assert not job.compiled


@on_ranks(1, 2)
def test_every_half_and_all_that_lies_between_two_is_rounded_as_by_numpy(
        comm):
    """Both ranks have the same gradient, which is its own mean then."""
    halves = numpy.arange(1 << 16, dtype=numpy.uint16).view(numpy.float16)
    exact = halves[numpy.isfinite(halves)].astype(numpy.float32)
    steps = numpy.sort(exact)
    ties = (steps[1:] + steps[:-1]) / 2
    values = numpy.concatenate([
        exact, ties, *(numpy.nextafter(ties, numpy.float32(away)) for away
                       in (-numpy.inf, numpy.inf)),
        numpy.float32([65519.996, 65520, 65535, 65536, 1e30, 1e-8, 2e-8, 3e-8,
                       1e-45, -1e-45, 0.0, -0.0])])
    tensors = Tensors(['/x'], [values.copy()], [numpy.ones_like(values)])
    codec = Cast('float16')
    wire = numpy.zeros(values.size, numpy.float16)
    made = PlanExecutor(comm, plans('direct', comm.size), EventStream(),
                        Framing(1 << 14, 3, 'float32'))
    job = made.submit(Bucket(codec, tensors, wire, 0, values.size, 1.0,
                             decodes=True))
    made.run()
    assert job.compiled
    with numpy.errstate(over='ignore'):
        expected = values.astype(numpy.float16).astype(numpy.float32)
    numpy.testing.assert_array_equal(tensors.gradients[0], expected)


@on_ranks(1)
def test_a_gradient_that_cannot_be_overwritten_is_an_error(comm):
    made = PlanExecutor(comm, plans('direct', 1), EventStream(), Framing())
    for early in (True, False):
        codec, tensors = Cast('float32'), tensors_of(0, [100])
        tensors.gradients[0].flags.writeable = False
        wire = numpy.zeros(100, numpy.float32)
        job = Bucket(codec, tensors, wire, 0, 100, 1.0, decodes=not early)

        def exchange(job=job):
            made.submit(job)
            made.run()
            made.begin_decoding(job)
        with pytest.raises(ValueError, match='writeable|read-only'):
            exchange()


# --- sums --------------------------------------------------------------------

PARTS = [slice(2, 6), slice(8, 11)]
INSIDE = [2, 3, 4, 5, 8, 9, 10]


class Blocks:
    """A range of which two blocks travel, each in one frame."""

    def part(self, block, chunk):
        return PARTS[block]

    def owned(self, action):
        return 2, 11


class Sums:
    """Sums of ``wire`` and of what is added, on one of so many workers."""

    def __init__(self, codec, wire, form, workers=2, contributes=True,
                 to_device=lambda array: array):
        gradient, parameter = numpy.random.default_rng(0).normal(
            0, 1, (2, 12)).astype('f4')
        self.bucket = Bucket(codec, Tensors(
            ['/x'], [to_device(gradient)], [to_device(parameter)]), wire)
        receive = Instruction(Opcode.RECEIVE_PARTIAL, 1, 0, 2)
        steps = [Step(receive, summed, fresh)
                 for summed in (False, True) for fresh in (False, True)]
        encode = Step(Instruction(Opcode.ENCODE, 2, 0, 2), True, False)
        self.made = Uncompiled(self.bucket, [(RankPlan(
            (*steps, encode), (0, 1), contributes), Blocks())], form, workers)

    def add(self, message, fresh=False, summed=False):
        self.made.add(0, 0, 2 * summed + fresh, memoryview(message))

    def message(self, dtype):
        message = numpy.empty(7, dtype)
        self.made.message(0, 0, 0, memoryview(message))
        return message

    def encode(self, site):
        self.made.encode_sums(0, 0, 4, site)


def codes(values):
    return numpy.asarray(values, numpy.float32).astype(
        ml_dtypes.float8_e5m2).view(numpy.uint8)


def values(codes):
    return codes.view(ml_dtypes.float8_e5m2).astype(numpy.float64)


def test_sums_in_the_wires_format_are_made_where_the_contribution_lies():
    wire = numpy.arange(12, dtype=numpy.float32)
    sums = Sums(Cast('float32'), wire, 'float32')
    sums.add(numpy.full(7, 100, numpy.float32), fresh=True)
    sums.add(numpy.full(7, 1000, numpy.float32), summed=True)
    sums.encode(0)      # they are means already
    expected = numpy.arange(12.0)
    expected[INSIDE] += 1100
    numpy.testing.assert_array_equal(wire, expected)


def test_who_contributes_nothing_begins_with_what_comes_first():
    wire = numpy.full(12, numpy.nan, numpy.float32)
    sums = Sums(Cast('float32'), wire, 'wire', contributes=False)
    sums.add(numpy.full(7, 1, numpy.float32), fresh=True)
    sums.add(numpy.full(7, 2, numpy.float32))
    numpy.testing.assert_array_equal(wire[INSIDE], 3)
    assert numpy.isnan(wire[[0, 1, 6, 7, 11]]).all()


@pytest.mark.parametrize('contributes', [True, False])
@pytest.mark.parametrize('dtype', ['float16', 'float32'])
def test_wide_sums_take_contributions_in_fp8_and_sums_as_they_travel(
        dtype, contributes):
    wire = codes(numpy.linspace(-3, 3, 12))
    own = values(wire)[INSIDE] * contributes
    sums = Sums(Fp8Ratio(), wire, dtype, 5, contributes)
    first = codes(numpy.linspace(5, 9, 7))
    sums.add(first, fresh=True)
    travelled = sums.message(dtype)
    # Of 5 workers: divided by 8, so that 5 x 57344 fits into float16.
    shrink = 8 if dtype == 'float16' else 1
    numpy.testing.assert_array_equal(
        travelled, ((own + values(first)) / shrink).astype(dtype))
    sums.add(travelled, summed=True)
    numpy.testing.assert_array_equal(sums.message(dtype), 2 * travelled)


def test_saturated_contributions_of_many_ranks_fit_into_float16():
    wire = codes(numpy.full(12, 57344))
    sums = Sums(Fp8Ratio(), wire, 'float16', workers=1000)
    for rank in range(999):
        sums.add(wire[:7], fresh=rank == 0)
    message = sums.message('float16')
    assert numpy.isfinite(message).all()
    numpy.testing.assert_allclose(message, 57344 * 1000 / 1024, rtol=1e-3)


def test_the_second_level_begins_with_the_first_ones_mean():
    wire = numpy.arange(12, dtype=numpy.float16)
    sums = Sums(Cast('float16'), wire, 'float32', workers=4)
    sums.add(numpy.full(7, 10, numpy.float16), fresh=True)
    sums.encode(0)
    numpy.testing.assert_array_equal(wire[2:6], [6, 6.5, 7, 7.5])
    sums.add(numpy.full(7, 20, numpy.float16), fresh=True)
    sums.encode(1)
    numpy.testing.assert_array_equal(wire[2:6], [13, 13.25, 13.5, 13.75])
    numpy.testing.assert_array_equal(wire[[0, 1, 6, 7, 11]],
                                     [0, 1, 6, 7, 11])


@pytest.mark.parametrize('form', ['float16', 'float32'])
@pytest.mark.parametrize('codec', [Fp8Ratio, lambda: Cast('float16')])
def test_sums_on_a_device_have_the_bits_of_the_host(form, codec):
    def found(*to_device):
        made = codec()
        wire = numpy.linspace(0, 60, 12).astype(made.wire_dtype)
        sums = Sums(made, wire, form, 5, True, *to_device)
        sums.add(wire[:7], fresh=True)
        sums.add(sums.message(form), summed=True)
        message = sums.message(form)
        sums.encode(0)
        return message, wire
    expected = found()
    with fake_cupy.installed():
        for one, other in zip(found(fake_cupy.ndarray), expected,
                              strict=True):
            numpy.testing.assert_array_equal(one, other)
