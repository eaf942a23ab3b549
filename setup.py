"""Builds what is compiled: loops of number formats, and what runs all-reduces.

The rest is in setup.cfg, but for the description.
"""
import pathlib
import re

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

README = pathlib.Path(__file__).with_name('README.md')

LOOPS = [f'chainer_fp8pipe/formats/{part}.h'
         for part in ('e5m2', 'int4', 'vector', 'loops',
                      'coding')]
OF_LOOPS = [
    '-O3',
    # No contraction of a * b + c: the GPU, and a CPU without FMA, must give
    # the same bits.
    '-ffp-contract=off',
    # Lets the compiler compute both sides of a choice, which vector code
    # must; no bits depend on it.
    '-fno-trapping-math',
]


def description():
    """The README without its links and pictures within the checkout.

    On a package index they would lead nowhere.
    """
    text = re.sub(r'!\[[^]]*\]\((?!https?:)[^)]*\)\n*', '', README.read_text())
    return re.sub(r'\[([^]^]+)\]\((?!https?:)[^)]*\)', r'\1', text)


class WhereItCan(build_ext):
    """Leaves out what cannot be compiled, but where the package is developed.

    What is missing then says so itself: chainer_fp8pipe/compat/__init__.py.
    """

    def run(self):
        for extension in self.extensions:
            extension.optional = not (self.inplace or self.editable_mode)
        super().run()
        # A Python that is started in the checkout takes the package there; not
        # what is built elsewhere, as with sanitizers.
        if self.get_finalized_command('build').build_base == 'build':
            self.copy_extensions_to_source()


setup(
    cmdclass={'build_ext': WhereItCan},
    long_description=description(),
    long_description_content_type='text/markdown',
    ext_modules=[
        Extension(
            'chainer_fp8pipe.formats._formats',
            sources=['chainer_fp8pipe/formats/_formats.c'],
            depends=LOOPS,
            extra_compile_args=OF_LOOPS,
        ),
        Extension(
            'chainer_fp8pipe.allreduce._engine',
            sources=['chainer_fp8pipe/allreduce/_engine.c'],
            depends=LOOPS + ['chainer_fp8pipe/formats/coding.h'],
            extra_compile_args=OF_LOOPS,
        ),
    ],
)
