"""Buckets on a GPU: one kernel encodes all tensors, another decodes them."""
# A kernel is a cupy.ElementwiseKernel over the entries of a bucket's wire.  It
# reads the same table as compiled code on the host (coding.h), with addresses
# on the device, and finds its tensor there.  What is counted is counted on the
# device, and fetched with the bucket's end.  The arithmetic is the headers'
# text, and so the bits are those of the CPU.  A thread has a whole record of
# int4.
from __future__ import annotations

import functools
from importlib import resources
from typing import Any, NamedTuple

#: No contraction of a * b + c, so that CPU and GPU give the same bits.
OPTIONS = ('--fmad=false',)

#: What is found of a tensor, int32: elements clipped, what is to blame for a
#: wire that is not finite, elements decoded that are not, and the bits of the
#: largest magnitude in a decoded wire.
FINDINGS = 4

_IN = ('raw int64 rows, raw float32 scales, int32 tensors, float32 prescale, '
       'float32 epsilon')
_FIND = '''
    const Tensor *t = tensor_of((const Tensor *)&rows[0], tensors, i);
    int number = (int)(t - (const Tensor *)&rows[0]);
    const float *s = &scales[5 * number];
    int *finding = (int *)&found[4 * number];
    long long at = ((long long)i - t->start) * GRAIN;
    (void)s;
'''
_TABLE = '''
#ifdef __CUDACC__
#define ADD(place, value) atomicAdd(place, value)
#define OR(place, value) atomicOr(place, value)
#define RAISE(place, value) \\
    do { if (*(volatile int *)(place) < (value)) atomicMax(place, value); \\
    } while (0)
#else
#define ADD(place, value) (*(place) += (value))
#define OR(place, value) (*(place) |= (value))
#define RAISE(place, value) (*(place) = e5m2_max(*(place), value))
#endif
typedef struct {
    long long start, stop;
    const float *gradient, *parameter;
    float *out;
    const float *residual;
    float *left;
    long long elements;
} Tensor;

/* The tensor of an entry. */
E5M2_FUNCTION const Tensor *tensor_of(const Tensor *first, int count,
                                      long long entry)
{
    int low = 0, high = count - 1;
    while (low < high) {
        int middle = (low + high) / 2;
        if (first[middle].stop <= entry)
            low = middle + 1;
        else
            high = middle;
    }
    return first + low;
}
'''


def _floats(dtype: str, encode: str, decode: str) -> tuple[str, str]:
    """Each gradient as a number of its own."""
    return (f'''
    float value = t->gradient[at] * prescale;
    {dtype} code = ({dtype}){encode}(value);
    (({dtype} *)&wire[0])[i] = code;
    if (!e5m2_is_finite({decode}(code)))
        OR(&finding[1], 1);
    ''', f'''
    float value = e5m2_one_nan({decode}(((const {dtype} *)&wire[0])[i]));
    t->out[at] = value;
    if (!e5m2_is_finite(value))
        ADD(&finding[2], 1);
    ''')


def _fp8(rounding: int) -> tuple[str, str]:
    return (f'''
    float value = t->residual ? t->gradient[at] + t->residual[at]
                              : t->gradient[at];
    float weight = e5m2_weight(t->parameter[at], epsilon);
    float ratio = e5m2_ratio(value, weight, s[0]);
    unsigned int code = e5m2_encode_ratio(ratio, value, {rounding});
    wire[i] = (unsigned char)code;
    if (t->residual)
        t->left[at] = e5m2_residual(value, code, weight, s[1], s[4]);
    if (e5m2_is_nonfinite(ratio, value))
        OR(&finding[1], e5m2_is_finite(t->gradient[at]) ? 2 : 1);
    else if (e5m2_is_large(ratio))
        ADD(&finding[0], 1);
    ''', '''
    float ratio = e5m2_decode(wire[i]);
    float value = e5m2_from_ratio(
        ratio, e5m2_weight(t->parameter[at], epsilon), s[3]);
    t->out[at] = value;
    RAISE(&finding[3], e5m2_magnitude(ratio));
    if (!e5m2_is_finite(value))
        ADD(&finding[2], 1);
    ''')


_THERE = '''
    int there = t->elements - at < RECORD ? (int)(t->elements - at) : RECORD;
'''
_RECORDS = (_THERE + '''
    if (encode_record(t->gradient + at, s[0],
                      t->residual ? t->residual + at : nullptr,
                      t->left + at,
                      (u8 *)&wire[RECORD_BYTES * (long long)i], there))
        OR(&finding[1], 1);
    ''', _THERE + '''
    int code = decode_record((const u8 *)&wire[RECORD_BYTES * (long long)i],
                             s[2], t->out + at, there, 0);
    RAISE(&finding[3], e5m2_magnitude(scale_value(code)));
    for (int j = 0; j < there; ++j)
        if (!e5m2_is_finite(t->out[at + j]))
            ADD(&finding[2], 1);
    ''')

#: How entries are encoded and decoded, and their elements, by name.
_CODINGS = {
    'float32': (*_floats('float', '', ''), 1),
    'float16': (*_floats('unsigned short', 'half_encode', 'half_decode'), 1),
    'bfloat16': (*_floats('unsigned short', 'bfloat_encode',
                          'bfloat_decode'), 1),
    'nearest': (*_fp8(0), 1), 'truncate': (*_fp8(1), 1),
    'int4': (*_RECORDS, 32)}


class Kernel(NamedTuple):
    """As ``cupy.ElementwiseKernel`` is given it, over the entries of a wire.
    """

    in_params: str
    out_params: str
    operation: str


#: By direction and name.
KERNELS = {f'{direction}_{name}': Kernel(
    _IN + ', raw uint8 wire' * (direction == 'decode'),
    'raw uint8 wire, ' * (direction == 'encode') + 'raw int32 found',
    _FIND.replace('GRAIN', str(grain)) + operation)
    for name, (*operations, grain) in _CODINGS.items()
    for direction, operation in zip(('encode', 'decode'), operations,
                                    strict=True)}
# The largest of what is finite; see coding.h.
KERNELS['largest'] = Kernel(_IN, 'raw int32 found', _FIND.replace(
    'GRAIN', '1') + '''
    int size = e5m2_finite_size(t->gradient[at]);
    RAISE(&finding[0], e5m2_ratio_size(
        t->gradient[at], e5m2_weight(t->parameter[at], epsilon), size));
    RAISE(&finding[1], size);
    ''')


@functools.cache
def preamble() -> str:
    """The arithmetic of one element and of one record: the headers."""
    folder = resources.files(__package__)
    return ''.join(folder.joinpath(f'{name}.h').read_text(encoding='utf-8')
                   for name in ('e5m2', 'int4')) + _TABLE


@functools.cache
def kernel(name: str) -> Any:
    """A kernel of :data:`KERNELS`, for the current device and stream."""
    import cupy
    return cupy.ElementwiseKernel(
        *KERNELS[name], f'fp8pipe_{name}', preamble=preamble(),
        options=OPTIONS, no_return=True)
