"""Code of Chainer's world gets names that libraries have removed."""
import collections.abc
import importlib
import itertools
import math
import sys
import textwrap
import traceback
from pathlib import Path

from chainer_fp8pipe.compat import old_names

import chainer
import numpy
import pytest
import six

from tests.ranks import run_script

_numbers = itertools.count()


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """Imports a module of a given text, and others beside it."""
    monkeypatch.syspath_prepend(tmp_path)

    def imported(text, **others):
        name = f'of_a_user_{next(_numbers)}'
        for module, source in {**others, name: text}.items():
            (tmp_path / f'{module}.py').write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return importlib.import_module(name)
    return imported


def found(imported, text):
    return imported(f'import chainer\n{textwrap.dedent(text)}').found


@pytest.mark.parametrize(('text', 'right'), [
    # NumPy 1.20 to 2.4
    ('import numpy as np\nfound = np.float, np.int, np.object, np.str',
     (float, int, object, str)),
    ('import numpy\nfound = numpy.asscalar(numpy.ones(1)[0])', 1.),
    ('import numpy\nfound = numpy.product([2, 3]), numpy.alltrue([1, 0])',
     (6, False)),
    ('import numpy\nfound = numpy.Inf, -numpy.NINF, numpy.float_',
     (math.inf, math.inf, numpy.float64)),
    ('import numpy\nfound = numpy.math.factorial(4)', 24),
    ('from numpy import float, ones, product as p\n'
     'found = float, int(ones(3)[0]), p([2, 2])', (float, 1, 4)),
    ('import numpy\nfound = numpy.arange(4).ptp()', 3),
    ('import numpy\nnumpy.float\nfound = [name for name in list(vars()) '
     'if not name.startswith("__")]', ['chainer', 'numpy']),
    ('import numpy\nfound = numpy.ones(1, "u1").tostring()', b'\1'),
    ('import numpy\nfound = float(numpy.ones((1, 1))), int(numpy.ones(1))',
     (1., 1)),
    ('import builtins\nfrom unittest import mock\nbuiltins.mine = 3\n'
     'with mock.patch("builtins.open", abs):\n'
     '    found = open(-2), mine, __builtins__.len is len\n'
     'del builtins.mine', (2, 3, True)),
    # NumPy 1.24
    ('import numpy\nfound = numpy.array([[1], [2, 3]]).tolist()',
     [[1], [2, 3]]),
    ('import numpy\nfound = sorted(numpy.random.permutation([[1], [2, 3]]))',
     [[1], [2, 3]]),
    ('import numpy\nfound = numpy.vstack(iter([[1], [2]])).tolist()',
     [[1], [2]]),
    ('import numpy\nfound = numpy.histogram([0, 1], 2, normed=True)[0]'
     '.tolist()', [1., 1.]),
    # A GPU is told from a CPU by this.
    ('import numpy, numpy as np\nx = np.float\n'
     'found = chainer.backend.get_array_module(np.ones(1)) is np is numpy',
     True),
    # SciPy, Pillow, Python
    ('from scipy.misc import comb, logsumexp\nimport scipy.misc\n'
     'found = comb(4, 2), logsumexp([0.]), scipy.misc.factorial(3)',
     (6, 0, 6)),
    ('from PIL import Image\nfound = Image.ANTIALIAS == Image.LANCZOS', True),
    ('from collections import (\n    Iterable, OrderedDict as o,\n)\n'
     'found = Iterable, o', (collections.abc.Iterable,
                             collections.OrderedDict)),
    ('import inspect\nfound = inspect.getargspec(lambda a, *b: 0)[0]', ['a']),
    ('import time\nfound = time.clock() > 0', True),
    ('import numpy, onnx.mapping, onnx.mapping as m\n'
     'found = m is onnx.mapping, m.NP_TYPE_TO_TENSOR_TYPE[numpy.dtype("f")]\n',
     (True, 1)),
    ('import pkg_resources\n'
     'found = pkg_resources.get_distribution("chainer").version[:11]',
     '7.8.1+today'),
    ('from pkg_resources import parse_version as v\nfound = v("2") < v("10")',
     True),
    # NumPy 2: what is refused
    ('import numpy\nfound = numpy.array([1], "f", copy=False).tolist()', [1.]),
    ('import numpy\nfound = numpy.fromstring(b"\\1\\0", "u1").tolist()',
     [1, 0]),
    ('import numpy\nfound = numpy.reshape([1, 2], newshape=(2, 1)).tolist()',
     [[1], [2]]),
    ('import numpy\nfound = numpy.zeros(2)\n'
     'found[1] = numpy.ones((1, 1))\nfound = found.tolist()', [0., 1.]),
    ('import numpy\nfound = numpy.bool8, numpy.int0, numpy.lib.pad',
     (numpy.bool_, numpy.intp, numpy.pad)),
    ('from scipy import sparse\nfound = sparse.eye(1).A.tolist()', [[1.]]),
    ('import matplotlib.cm\nfound = matplotlib.cm.get_cmap("jet").name',
     'jet'),
    ('import imp, math\nfound = imp.reload(math) is math', True),
    # What a module has itself.
    ('import collections.abc\nmatch {}:\n'
     '    case collections.abc.Mapping():\n        found = 1', 1),
    ('from numpy import *\nfound = product([2, 3]), round(2.5)', (6, 2)),
    ('from numpy import *\nfrom itertools import product\n'
     'found = [*product([0], [1])]', [(0, 1)]),
    ('from chainer.functions import *\nfound = Linear.__name__', 'Linear'),
    ('try:\n    from imp import nothing\nexcept ImportError:\n'
     '    found = 3', 3),
    (f'found = len({" + ".join(["str(1)"] * 900)})', 900),
    ('import numpy\ndef int(x):\n    return x.shape\n'
     'found = int(numpy.ones(1))', (1,)),
    # Chainer 1, and modules that moved
    ('from chainer.links.connection.lstm import LSTM\n'
     'found = LSTM', chainer.links.LSTM),
    ('import chainer.links as L, pickle\n'
     'model = chainer.FunctionSet(a=L.Linear(1, 1))\n'
     'model.b = L.Linear(1, 1)\n'
     'found = [name for name, _ in '
     'pickle.loads(pickle.dumps(model.collect_parameters())).namedparams()]',
     ['/a/W', '/a/b', '/b/W', '/b/b']),
    ('import chainer.links as L\n'
     'found = len(chainer.FunctionSet(a=L.Linear(1, 1)).parameters)', 2),
    ('import chainer.functions as F\n'
     'from chainer.functions.pooling import max_pooling_2d as m\n'
     'from chainer.functions.activation.lstm import lstm\n'
     'import numpy\n'
     'x = numpy.arange(16, dtype="f").reshape(1, 1, 4, 4)\n'
     'pooled, = m.MaxPooling2D(2, 1).apply((x,))\n'
     'same = pooled.array == F.max_pooling_2d(x, 2, 1).array\n'
     'found = m.max_pooling_2d is F.max_pooling_2d and lstm is F.lstm '
     'and bool(same.all())', True),
    ('import chainer.functions as F, numpy\nones = numpy.ones(9, "f")\n'
     'found = [given.array.min() for given in (F.dropout(ones, train=False), '
     'F.dropout(ones, .5, False), F.Dropout(0)(ones))]', [1., 1., 1.]),
    ('import chainer.functions as F, numpy\npool = F.MaxPooling2D(2)\n'
     'ones = numpy.ones((1, 1, 2, 2), "f")\n'
     'found = [pool(one * ones).array.item() for one in (1, 2)]', [1., 2.]),
    ('import chainer.links as L, numpy\n'
     'y = L.BatchNormalization(1)(numpy.full((2, 1), 3, "f"), test=True)\n'
     'found = round(float(y.array[0, 0]), 3)', 3.),
    ('import chainer.links as L\nfound = float(L.Linear('
     '1, 1, initialW=7, wscale=0).W.data)', 7.),
    ('import chainer.functions as F, numpy\n'
     'model = F.Linear(2, 1, wscale=0, bias=3)\n'
     'optimizer = chainer.optimizers.SGD().setup(model)\n'
     'optimizer.zero_grads()\n'
     'loss = F.sum(model(numpy.zeros((1, 2), "f")))\nloss.backward()\n'
     'optimizer.weight_decay(1)\nfound = [float(model.b.grad)]\n'
     'optimizer.clip_grads(2)\n'
     'found += [float(loss.data), round(float(model.b.grad), 4)]',
     [4., 3., 2.]),
    ('import chainer.functions as F, numpy\nfound = float('
     'F.softmax_cross_entropy(numpy.zeros((1, 1), "f"), '
     'numpy.zeros(1, "i"), use_cudnn=False).data)', 0.),
    ('from chainer.training import extensions as e\n'
     'found = e.snapshot(trigger=(1, "epoch")).trigger', (1, 'epoch')),
    ('from unittest import mock\nimport chainer\n'
     't = chainer.training.Trainer(mock.MagicMock())\n'
     't.extend(lambda t: 0, "e", invoke_before_training=True)\n'
     'found = t._extensions["e"].call_before_training', True),
    ('import numpy\nx = chainer.Variable(numpy.ones(1), volatile="on")\n'
     'found = x.requires_grad, x.volatile', (False, True)),
    ('import chainer.links as L\n'
     'found = hasattr(L.BatchNormalization(2, use_gamma=False), "gamma")',
     False),
])
def test_a_name_is_what_it_was(imported, monkeypatch, text, right):
    if 'pkg_resources' in text:
        monkeypatch.setitem(sys.modules, 'pkg_resources', None)
    for library in 'onnx', 'PIL':
        if library in text:
            pytest.importorskip(library)
    value = found(imported, text)
    assert value == right and type(value) is type(right) or (
        isinstance(value, numpy.generic) and value == right)


ASKS = 'import numpy\nfound = numpy.product([2, 3])'


def test_who_does_not_use_chainer_gets_nothing(imported):
    with pytest.raises(AttributeError, match='product'):
        imported(ASKS)


@pytest.mark.parametrize('text', [
    'from chainer import training',
    'try:\n    import chainermn\nexcept ImportError:\n    pass'])
def test_who_imports_chainer_gets_them(imported, text):
    assert imported(f'{text}\n{ASKS}').found == 6


def test_a_package_gets_them_from_the_first_import_of_chainer_on(
        imported, tmp_path):
    (tmp_path / 'partly').mkdir()
    (tmp_path / 'partly' / '__init__.py').write_text('import chainer')
    (tmp_path / 'partly' / 'helper.py').write_text(ASKS)
    assert imported('from partly.helper import found').found == 6


def test_an_installed_package_gets_them_if_it_imports_chainer(
        imported, monkeypatch, tmp_path):
    monkeypatch.setattr(old_names, '_INSTALLED', (str(tmp_path),))
    monkeypatch.setenv(old_names.MAIN, 'script.py')
    with pytest.raises(AttributeError, match='product'):
        imported(ASKS)
    with pytest.raises(AttributeError, match='product'):
        imported(f'import blockchainer\n{ASKS}', blockchainer='')
    assert imported(f'import chainer\n{ASKS}').found == 6


@pytest.mark.parametrize(('text', 'error'), [
    ('numpy.no_such_name', AttributeError),
    ('numpy.ones(1).product', AttributeError),
    ('"abc".clock', AttributeError),
    ('float(numpy.ones(2))', TypeError),
    ('float("a")', ValueError),
    ('numpy.array([[1], [2, 3]], "f")', ValueError),
])
def test_what_never_was_stays_an_error_of_its_line(imported, text, error):
    module = imported(f'''
        import chainer, numpy
        old = numpy.product
        def asked():
            return [
                {text}]
        ''')
    with pytest.raises(error) as caught:
        module.asked()
    line, = (
        frame for frame in traceback.extract_tb(caught.value.__traceback__)
        if frame.filename == module.__file__)
    assert (line.lineno, line.line) == (6, f'{text}]')


def test_a_remedy_of_the_script_itself_works(imported, monkeypatch):
    monkeypatch.setattr(numpy, 'float', None, raising=False)
    del numpy.float
    assert imported("""
        import chainer
        import numpy as np
        if not hasattr(np, 'float'):
            np.float = int
        found = np.float
        """).found is numpy.float is int


def test_a_script_gets_them_in_its_workers_too(tmp_path):
    (tmp_path / 'helper.py').write_text(ASKS)
    # What Chainer imports itself may lie beside the script as well.
    (tmp_path / 'six.py').write_text(Path(six.__file__).read_text())
    script = tmp_path / 'script.py'
    script.write_text(textwrap.dedent("""
        import multiprocessing, sys
        import chainer, numpy
        import helper

        ONE = numpy.product([1])

        def worker(number):
            return int(number * helper.found * ONE), sys.argv

        if __name__ == '__main__':
            with multiprocessing.get_context('forkserver').Pool(1) as pool:
                print(pool.map(worker, [1, 2]))
        """))
    run = run_script(
        0, '-c', 'import sys; sys.path[0] = sys.argv[1]\n'
        'from chainer_fp8pipe.compat.old_names import run_path\n'
        'sys.argv[1:] = ["-x"]; run_path("script.py")', tmp_path,
        cwd=tmp_path)
    given = ['script.py', '-x']
    assert (run.stdout, run.stderr) == (f'{[(6, given), (12, given)]}\n', '')
