"""How much of gradients survives a sum in fp8, by rounding and order."""
from chainer_fp8pipe import formats

import numpy

ELEMENTS = 100_000

def encode(values, rounding):
    codes = numpy.empty(values.size, numpy.uint8)
    formats.encode(values, codes, rounding=rounding)
    return codes

def decode(codes):
    values = numpy.empty(codes.size, numpy.float32)
    formats.decode(codes, values)
    return values

def add(a, b, rounding):        # exact, or far from a tie, and rounded once
    return encode(decode(a) + decode(b), rounding)

def ring(wires, rounding):      # P - 1 sums in fp8, one after the other
    total = wires[0]
    for wire in wires[1:]:
        total = add(total, wire, rounding)
    return total

def tree(wires, rounding):      # log2(P) sums in fp8, in pairs
    while len(wires) > 1:
        wires = [add(a, b, rounding)
                 for a, b in zip(wires[::2], wires[1::2], strict=True)]
    return wires[0]

def direct(wires, rounding):    # sums in float32, rounded once
    return encode(sum(map(decode, wires)), rounding)

def share(algorithm, rounding, ranks, common):
    random = numpy.random.default_rng(0)
    gradients = random.standard_normal((ranks, ELEMENTS), numpy.float32)
    gradients += common * random.standard_normal(ELEMENTS, numpy.float32)
    exact = gradients.sum(axis=0, dtype=float)
    codes = algorithm([encode(gradient, rounding)
                       for gradient in gradients], rounding)
    result = decode(codes)
    return result @ exact / (exact @ exact)

for rounding in 'truncate', 'nearest':
    for algorithm in ring, tree, direct:
        print(rounding, algorithm.__name__, *(
            f'{share(algorithm, rounding, ranks, common):.2f}'
            for common in (0, 1) for ranks in (4, 16, 64)))
