"""Builds what is compiled: loops of the fp8 format, an index of JPEGs.

The rest is in setup.cfg.
"""
from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            'chainer_fp8pipe.fp8._loops',
            sources=['chainer_fp8pipe/fp8/_loops.c'],
            depends=['chainer_fp8pipe/fp8/e5m2.h',
                     'chainer_fp8pipe/fp8/loops.h',
                     'chainer_fp8pipe/fp8/long_loops.h'],
            extra_compile_args=[
                '-O3',
                # No contraction of a * b + c: the GPU, and a CPU without
                # FMA, must give the same bits.
                '-ffp-contract=off',
                # Lets the compiler compute both sides of a choice, which
                # vector code must; no bits depend on it.
                '-fno-trapping-math',
            ],
        ),
        Extension(
            'chainer_fp8pipe.images._jpeg',
            sources=['chainer_fp8pipe/images/_jpeg.c'],
            depends=[f'chainer_fp8pipe/images/jpeg_{part}.h'
                     for part in ('bits', 'huffman', 'header', 'index',
                                  'cut')],
            extra_compile_args=['-O3'],
        ),
    ],
)
