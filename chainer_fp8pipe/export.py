"""``python -m chainer_fp8pipe export``: a trained model as ONNX, proven."""
# onnx_chainer, a part of Chainer's distribution, makes a graph of the
# functions that one call of the model has called.  It knows no files and no
# classes, stops at the first function that it cannot convert, without a word
# about where the model calls it, and nobody has run what it makes.  All that
# is here.
#
# The proof has Chainer and onnxruntime compute the example, and the example's
# values in reverse order.  What forward computes beside Chainer's functions,
# with NumPy, is a constant of the graph, and right for the first only.
from __future__ import annotations

import argparse
import contextlib
import copy
import functools
import importlib
import inspect
import itertools
import linecache
import os
import re
import sys
import sysconfig
import textwrap
import traceback
import warnings
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import chainer
import chainer.functions as F
import numpy

from .command_line import Parser, check_script, did_you_mean
from .report.record import written_whole

_DESCRIPTION = """
Writes the model of a snapshot as ONNX, which runs without Chainer:

    python -m chainer_fp8pipe export model.npz --class train.py:Net \\
        --example example.npz -o model.onnx

Chainer and onnxruntime then both compute the outputs, for the example and for
its values in reverse order, and the largest difference of each output is
printed.  Functions that cannot be converted are named, with the lines that
call them.

MODEL is a file of save_npz, of extensions.snapshot, or of this package's
snapshots.  Where the model is in it, such as below updater/model:main/ or
predictor/, is found by the names of its parameters, and said.

--class is a module or a script, and after a colon what makes the model: a
class, or an expression in the names of that module:

    --class train.py:Net
    --class 'models.cnn:Net(100, n_out=10)'
    --class 'chainer.links:ResNet50Layers(None)'

A script is imported: what it does under "if __name__ == '__main__':" is not
done.  The model works as in a prediction, with chainer.config.train False.

--example has what forward is called with, a batch, in the shapes and dtypes
that it is to have as ONNX:

    numpy.save('example.npy', x)                    one array
    numpy.savez('example.npz', x=x, mask=mask)      by forward's parameters
    numpy.savez('example.npz', x, mask)             in their order
"""
_EPILOG = """
exit codes: 0: proven; 1: something cannot be converted, and nothing is
written, or the proof has failed, and the file is FILE.unproven; 2: what was
given is wrong
"""
_OPSETS = range(7, 12)      # those that onnx_chainer has been made for
#: Of the file's format, not of its functions.  onnx would write the newest,
#: which an older runtime refuses; this one is as old as opset 11.
_IR_VERSION = 6
#: Keys of numpy.savez for arrays without a name.
_UNNAMED = re.compile(r'arr_(\d+)')


class ExportError(Exception):
    """The model cannot be converted, or computes something else as ONNX."""


class _Case(NamedTuple):
    """Inputs and outputs by their names, and what they are, in words."""

    what: str
    inputs: Mapping[str, numpy.ndarray]
    outputs: Mapping[str, numpy.ndarray]


def main(arguments: Sequence[str]) -> int:
    """Runs the command with the arguments that follow its name.

    Returns:
        The exit code.

    Raises:
        SystemExit: Help was wanted, or the arguments are wrong.
        ImportError: onnx or onnxruntime is missing.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    for library in 'onnx', 'onnxruntime':   # before the model is computed
        importlib.import_module(library)
    output = options.output or os.path.splitext(options.model)[0] + '.onnx'
    try:
        if not os.path.isdir(folder := os.path.dirname(output) or '.'):
            raise ValueError(f'-o: there is no folder {folder}')
        model = make_model(options.model_class)
        place = load(model, options.model, options.path)
        example = read_example(model, options.example)
        cases = _cases(model, example, options.any_batch)
    except ValueError as error:
        parser.error(str(error))
    print(f'{options.model}' + f', below {place}' * bool(place)
          + f': {sum(1 for _ in model.params())} parameters')
    if any(hasattr(link, 'reset_state') for link in model.links()):
        print('the model has a state; as ONNX it is its first call, after '
              'reset_state')
    for name, array in example.items():
        print(f'input {name}: {_kind(array)}')
    try:
        graph = convert(model, example, options.opset, options.any_batch)
        is_proven = prove(graph, cases, options.tolerance)
    except ExportError as error:
        print(f'{parser.prog}: {error}', file=sys.stderr)
        return 1
    if not is_proven:
        output += '.unproven'
    try:
        with written_whole(output, 'wb') as file:
            file.write(graph)
    except OSError as error:
        parser.error(f'-o: {output} cannot be written: {error}')
    print(f'{output}: {len(graph):,} bytes, opset {options.opset}')
    return int(not is_proven)


def _parser() -> Parser:
    parser = Parser(prog='python -m chainer_fp8pipe export',
                    description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument('model', metavar='MODEL', help='the file with the '
                        "model's parameters, .npz")
    parser.add_argument(
        '--class', required=True, dest='model_class', metavar='WHERE:MODEL',
        help="what makes the model, such as 'train.py:Net(100)'")
    parser.add_argument('--example', required=True, metavar='FILE',
                        help='what forward is called with, .npz or .npy')
    parser.add_argument('-o', '--output', metavar='FILE', help='the file to '
                        'write (default: MODEL with the ending .onnx)')
    parser.add_argument(
        '--path', metavar='KEYS', help='where in MODEL the parameters are, '
        'such as updater/model:main/ (default: where their names are)')
    parser.add_argument(
        '--any-batch', action='store_true', help='leave the first axis of '
        "each input open (default: the example's batch size); the proof then "
        'computes a batch twice as large, too')
    parser.add_argument(
        '--opset', type=int, choices=_OPSETS, default=_OPSETS[-1],
        help='version of the functions in the file (default: %(default)s)')
    parser.add_argument(
        '--tolerance', type=_tolerance, default=1e-4, metavar='X',
        help='largest difference that is proof, as a part of the largest '
        'value of an output (default: %(default)s)')
    return parser


def _tolerance(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) < 1:
            return float(text)
    raise argparse.ArgumentTypeError(
        f'{text!r} is no part of 1, such as 1e-4')


# --- the model ---------------------------------------------------------------

def make_model(text: str) -> chainer.Link:
    """What ``--class`` says.

    Args:
        text: ``'train.py:Net(10)'``, or with a module for the script.

    Raises:
        ValueError: There is no such module or name, or it makes no link.
    """
    place, _, expression = map(str.strip, text.partition(':'))
    if not place or not expression:
        raise ValueError(f'--class: write {text!r} as in train.py:Net or '
                         "'models.cnn:Net(100)'")
    module = _import(place)
    names = {**vars(module)}
    try:
        model = eval(compile(expression, '<class>', 'eval'), names)
        if isinstance(model, type):
            model = model()
    except Exception as error:
        hint = ''
        if isinstance(error, NameError) and error.name:
            classes = [name for name, value in names.items()
                       if isinstance(value, type)
                       and issubclass(value, chainer.Link)]
            hint = (did_you_mean(error.name, classes)
                    or f'; its links are {_some(classes)}' * bool(classes))
        elif isinstance(error, TypeError) and 'argument' in str(error):
            hint = f"; give arguments as in --class '{place}:Net(100)'"
        raise ValueError(f'--class {text}: {_in_words(error)}{hint}'
                         ) from error
    if not isinstance(model, chainer.Link):
        raise ValueError(f'--class {text}: this is a {type(model).__name__}, '
                         'and no Chain or other Link')
    return model


def _import(place: str) -> ModuleType:
    """A module by its name or its file, which is imported, not run."""
    folder, name = os.getcwd(), place
    if place.endswith('.py'):
        check_script(place)
        folder, name = os.path.split(os.path.abspath(place[:-3]))
    try:
        with (mock.patch.object(sys, 'argv', [place]),
              mock.patch.object(chainer.training.Trainer, 'run', _refuse)):
            sys.path.insert(0, folder)
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        hint = ''
        if isinstance(error, SystemExit | _Training):
            hint = ('; what it is to do when it is run belongs under '
                    '"if __name__ == \'__main__\':"')
        raise ValueError(f'--class: {place} cannot be imported: '
                         f'{_in_words(error)}{hint}') from error
    if place.endswith('.py') and not os.path.samefile(
            place, module.__file__ or os.devnull):
        raise ValueError(f'--class: {place} is called as {module.__file__}, '
                         'which is imported already; rename it')
    return module


class _Training(Exception):
    """A script trains when it is imported."""


def _refuse(*_: Any, **__: Any) -> None:
    raise _Training('it starts to train')


def load(model: chainer.Link, file: str, place: str | None = None) -> str:
    """Loads the parameters of a model, wherever they are in a file.

    Args:
        model: Gets them.
        file: Path of the ``.npz``.
        place: What their keys begin with; None: where the names below it are
            those of the model, all of them and no others.

    Returns:
        The place.

    Raises:
        ValueError: Keys are missing, or are there that the model does not
            have, or shapes differ; or it is no such file.
    """
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    wanted = serializer.target
    try:
        archive = numpy.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f'{file} cannot be read: {error}') from None
    if not isinstance(archive, numpy.lib.npyio.NpzFile):
        raise ValueError(f'{file} is one array, and no file of save_npz')
    with archive:
        place = _place(archive.files, set(wanted), file, place)
        found = {key: _read(archive, place + key, file) for key in wanted}
    problems = [
        f'{key} has {"no value" if value.dtype == object else value.shape} '
        f'in the file, {wanted[key].shape} in the model'
        for key, value in found.items() if wanted[key].dtype != object
        and (value.dtype == object or value.shape != wanted[key].shape)]
    if problems:
        raise ValueError(f'{file} is of another model: {_some(problems)}; do '
                         'the arguments in --class differ from those of the '
                         'training?')
    chainer.serializers.NpzDeserializer(found).load(model)
    return place


def _place(keys: Iterable[str], wanted: set[str], file: str,
           given: str | None) -> str:
    """The beginning that all keys of a model have in common in a file."""
    below: dict[str, set[str]] = defaultdict(set)
    for key in keys:
        for end in (0, *(at.end() for at in re.finditer('/', key))):
            below[key[:end]].add(key[end:])
    if given is not None:
        given = given.strip('/') + '/' if given.strip('/') else ''
        if given not in below:
            raise ValueError(f'--path: {file} has nothing below {given}'
                             + did_you_mean(given, below))
        places = [given]
    else:
        places = [one for one, names in below.items() if names == wanted]
        # Else where the fewest names differ.
        places = places or [min(
            below, key=lambda one: len(below[one] ^ wanted), default='')]
    if len(places) > 1:
        raise ValueError(f'{file} has such models below {_some(places)}; '
                         'choose one with --path')
    place, = places
    problems = [f'{kind} {_some(sorted(names))}' for kind, names in (
        ('there are no', wanted - below[place]),
        ('the model has no', below[place] - wanted)) if names]
    if problems:
        raise ValueError(
            f'{file} is of another model: ' + f'below {place} ' * bool(place)
            + ', and '.join(problems))
    return place


def _read(archive: Any, key: str, file: str) -> numpy.ndarray:
    try:
        return archive[key]
    except ValueError:      # None, which is pickled, and is no parameter yet
        return numpy.asarray(None)
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error
            ) as error:
        raise ValueError(f'{file} is damaged: {key}: {error}') from None


# --- the example -------------------------------------------------------------

def read_example(model: chainer.Link, file: str) -> dict[str, numpy.ndarray]:
    """The arrays with which a model is called, by its parameters' names.

    Raises:
        ValueError: They cannot be read, or forward does not take them.
    """
    try:
        found = numpy.load(file, allow_pickle=False)
        arrays = {'arr_0': found} if isinstance(found, numpy.ndarray) else {
            name: found[name] for name in found.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f'--example: {file} cannot be read: {error}'
                         ) from None
    parameters = _parameters(model)
    names = [name for name, one in parameters.items()
             if one.kind is one.POSITIONAL_OR_KEYWORD]
    takes = f'forward takes {", ".join(map(str, parameters.values()))}'
    if len(arrays) == 1 or all(map(_UNNAMED.fullmatch, arrays)):
        # In the order of their numbers, so arr_10 comes after arr_9.
        values = [arrays[key] for key in sorted(arrays, key=lambda key: (
            len(key), key))]
        if len(values) > len(names):
            if not _takes_any_number(parameters):
                raise ValueError(f'--example: {file} has {len(values)} '
                                 f'arrays, and {takes}')
            names += [f'input_{n}' for n in range(len(names), len(values))]
        arrays = dict(zip(names, values, strict=False))
    elif unknown := sorted(set(arrays) - set(names)):
        raise ValueError(f'--example: {file} has {_some(unknown)}, and '
                         f'{takes}')
    missing = [name for name, one in parameters.items()
               if name not in arrays and one.default is one.empty
               and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    if missing:
        raise ValueError(f'--example: {file} has no {missing[0]}, and {takes}')
    return {name: arrays[name] for name in names if name in arrays}


def _parameters(model: chainer.Link) -> Mapping[str, inspect.Parameter]:
    """Of forward, or of the ``__call__`` that a class of Chainer 3 has."""
    return inspect.signature(getattr(model, 'forward', model)).parameters


def _takes_any_number(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(one.kind is one.VAR_POSITIONAL for one in parameters.values())


def _cases(model: chainer.Link, example: Mapping[str, numpy.ndarray],
           any_batch: bool) -> list[_Case]:
    """Inputs, and what Chainer computes from them: the example, and others.

    Raises:
        ValueError: forward fails, or needs a parameter that has no value.
    """
    if any_batch and not all(array.ndim for array in example.values()):
        raise ValueError('--any-batch: a number in the example has no batch')
    cases = [_case(model, 'the example', example)]
    try:
        cases.append(_case(model, 'the example in reverse order', {
            name: numpy.ascontiguousarray(numpy.flip(array))
            for name, array in example.items()}))
    except ValueError as error:
        print(f'{error}; so the proof is for the example only')
    if any_batch:
        cases.append(_case(model, 'a batch of the example twice', {
            name: numpy.concatenate([array, array])
            for name, array in example.items()}))
    return cases


def _case(model: chainer.Link, what: str,
          inputs: Mapping[str, numpy.ndarray]) -> _Case:
    model = copy.deepcopy(model)    # whose state a call may change
    before = set(dict(model.namedparams(include_uninit=False)))
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        outputs = _call(model, {name: chainer.Variable(array.copy())
                                for name, array in inputs.items()}, what)
    if drawn := set(dict(model.namedparams(include_uninit=False))) - before:
        raise ValueError('forward uses parameters that have no value in the '
                         f'file: {_some(sorted(drawn))}')
    return _Case(what, inputs, {
        name: value.array for name, value in outputs.items()})


def _call(model: chainer.Link, inputs: Mapping[str, chainer.Variable],
          what: str) -> dict[str, chainer.Variable]:
    """The outputs by their names.

    Raises:
        ValueError: forward fails, or returns something else than variables.
    """
    try:
        found = (model(*inputs.values()) if _takes_any_number(
            _parameters(model)) else model(**inputs))
    except Exception as error:
        raise ValueError(
            f'forward fails with {what} ('
            + ', '.join(f'{name}: {_kind(one)}'
                        for name, one in inputs.items())
            + f'): {_in_words(error)}') from error
    # A name means one value of the graph.
    outputs = {name + '_output' * (name in inputs): value
               for name, value in _outputs(found, '')}
    for name, value in outputs.items():
        if not isinstance(value, chainer.Variable):
            raise ValueError(
                f'forward returns no Variable as {name}, but '
                f'{type(value).__name__}, of which it is not known how it is '
                'computed')
    if not outputs:
        raise ValueError('forward returns nothing')
    return outputs


def _outputs(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Lists the returned values, however nested: ``y``, ``output_0``."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _outputs(item, f'{name}{name and "_"}{key}')
    elif isinstance(value, tuple | list):
        for n, item in enumerate(value):
            yield from _outputs(item, f'{name or "output"}_{n}')
    elif value is not None:
        yield name or 'output', value


# --- the conversion ----------------------------------------------------------

def convert(model: chainer.Link, example: Mapping[str, numpy.ndarray],
            opset: int = _OPSETS[-1], any_batch: bool = False) -> bytes:
    """The model as onnx_chainer converts it.

    Args:
        model: With its parameters.
        example: Inputs by their names.
        opset: Version of ONNX's functions.
        any_batch: Whether the first axes of the inputs stay open.

    Raises:
        ExportError: It cannot be converted.
    """
    import onnx
    import onnx_chainer
    calls, flat = _Calls(), _Flat(model, list(example))
    shapes = [('batch', *array.shape[1:]) for array in example.values()]
    try:
        with warnings.catch_warnings(), calls:
            warnings.simplefilter('ignore')
            graph = onnx_chainer.export(
                flat, [array.copy() for array in example.values()],
                opset_version=opset, input_names=list(example),
                output_names=flat.names, external_converters=calls.converters,
                input_shapes=shapes if any_batch else None)
        if not calls.problems:
            graph.ir_version = _IR_VERSION
            _without_parameters_as_inputs(graph.graph)
            onnx.checker.check_model(graph)
            return graph.SerializeToString()
    except Exception as error:
        if not calls.problems:
            raise ExportError('onnx_chainer fails: ' + _in_words(error)
                              ) from error
    raise ExportError(
        'onnx_chainer cannot convert these; write them with functions that it '
        'knows, the keys of onnx_chainer.mapping.converters:\n  '
        + '\n  '.join(dict.fromkeys(calls.problems)))


class _Flat:
    """A model whose outputs are a list, whatever forward returns.

    Args:
        model: The model.
        inputs: Their names.

    Attributes:
        names: Of the outputs, once it has been called.
    """

    def __init__(self, model: chainer.Link, inputs: Sequence[str]) -> None:
        self._model, self._inputs = model, inputs
        self.namedlinks, self.namedparams = model.namedlinks, model.namedparams
        self.names: list[str] = []

    def __call__(self, *inputs: chainer.Variable) -> list[chainer.Variable]:
        outputs = _call(self._model, dict(
            zip(self._inputs, inputs, strict=True)), 'the example')
        self.names += outputs
        found: list[chainer.Variable] = []
        for output in outputs.values():
            # One that has a name already needs another for the same value.
            is_named = any(output is other for other in (*inputs, *found))
            found.append(F.identity(output) if is_named else output)
        return found


class _Calls(chainer.FunctionHook):
    """Knows the lines that call functions, and has them converted.

    Attributes:
        converters: By the name of a function, for onnx_chainer.
        problems: A line for each call that it cannot convert.
    """

    name = 'chainer_fp8pipe.export'

    def __init__(self) -> None:
        self.converters: dict[str, Callable[[Any], Any]] = {}
        self.problems: list[str] = []
        self._lines: dict[int, tuple[Any, str]] = {}

    def forward_preprocess(self, function: Any, in_data: Any) -> None:
        """Chainer calls it before a function."""
        from onnx_chainer import mapping
        if isinstance(function, chainer.function.FunctionAdapter):
            function = function.function
        name = getattr(function, 'custom_function_node_name',
                       type(function).__name__)
        # The function is kept, or another one might get its id.
        self._lines[id(function)] = function, _line(
            (frame.f_code.co_filename, number)
            for frame, number in traceback.walk_stack(sys._getframe(1)))
        self.converters[name] = functools.partial(
            self._convert, name, mapping.converters.get(name))

    def _convert(self, name: str, convert: Any, parameters: Any) -> Any:
        problem = ''
        if convert is not None:
            if name == 'Reshape':
                _open_first_axis(parameters.func)
            try:
                return convert(parameters)
            except Exception as error:
                problem = f': {type(error).__name__}: {error}'
        _, line = self._lines[id(parameters.func)]
        self.problems.append(f'{line}{line and ": "}{name}{problem}')
        return ()


def _open_first_axis(reshape: Any) -> None:
    """Writes the first axis as -1, what is left, and the others as they are.

    ``F.linear`` reshapes to ``(x.shape[0], -1)``, a batch of one size.
    """
    shape = reshape.outputs[0]().shape
    if shape and 0 not in shape:
        reshape.shape = (-1, *shape[1:])


def _without_parameters_as_inputs(graph: Any) -> None:
    """Parameters that are inputs, too, are no constants for a runtime."""
    parameters = {tensor.name for tensor in graph.initializer}
    inputs = [one for one in graph.input if one.name not in parameters]
    del graph.input[:]
    graph.input.extend(inputs)


# --- the proof ---------------------------------------------------------------

def prove(graph: bytes, cases: Sequence[_Case], tolerance: float) -> bool:
    """Whether onnxruntime computes what Chainer has computed; says both.

    Args:
        graph: The model as ONNX.
        cases: The first one is the example.
        tolerance: A part of the largest value of an output.

    Raises:
        ExportError: onnxruntime cannot run the example.
    """
    differing: list[str] = []
    largest: dict[str, tuple[float, float]] = {}
    for case in cases:
        try:
            found = _run(graph, case)
        except Exception as error:
            text = (f'onnxruntime fails with {case.what}: '
                    + ' '.join(str(error).split()))
            if case is cases[0]:
                raise ExportError(text) from error
            differing.append(text)
            continue
        for (name, ours), theirs in zip(case.outputs.items(), found,
                                        strict=True):
            difference = _difference(ours, theirs)
            largest[name] = max(largest.get(name, difference), difference)
            if not difference[0] <= tolerance:
                differing.append(f'{name} differs with {case.what}')
    for name, array in cases[0].outputs.items():
        part, most = largest[name]
        print(f'output {name}: {_kind(array)}: largest difference {most:.2g}, '
              f'{part:.2g} of its largest value')
    if not differing:
        return True
    print('Not proven: ' + '; '.join(differing))
    if not any(text.endswith('the example') for text in differing):
        print('It is right for the example, not for other inputs: what '
              'forward computes without functions of Chainer, such as from '
              'x.array or x.shape, is a constant in it')
    return False


def _run(graph: bytes, case: _Case) -> list[numpy.ndarray]:
    import onnxruntime
    settings = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    for one in settings:
        one.log_severity_level = 4      # an exception says the same
    session = onnxruntime.InferenceSession(
        graph, settings[0], providers=['CPUExecutionProvider'])
    used = {one.name for one in session.get_inputs()}
    return session.run(list(case.outputs), {
        name: array for name, array in case.inputs.items() if name in used},
        settings[1])


def _difference(ours: numpy.ndarray, theirs: numpy.ndarray
                ) -> tuple[float, float]:
    """The largest, as a part of the largest value, and as it is.

    Infinite where shapes or dtypes differ, or one is NaN; NaN where no value
    is finite, which proves nothing.
    """
    finite = numpy.isfinite(ours)
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype) or (
            not numpy.array_equal(ours[~finite], theirs[~finite],
                                  equal_nan=True)):
        return numpy.inf, numpy.inf
    if not finite.any():
        return numpy.nan, numpy.nan
    exact = ours[finite].astype(float)
    most = float(abs(exact - theirs[finite]).max())
    return most / (float(abs(exact).max()) or 1.), most


# --- words -------------------------------------------------------------------

_CHAINER = os.path.dirname(os.path.abspath(chainer.__file__))
_LINKS = os.path.join(_CHAINER, 'links', '')
_PYTHON = os.path.join(sysconfig.get_path('stdlib'), '')
#: Folders of what the user has not written.
_LIBRARIES = tuple(os.path.join(folder, '') for folder in (
    _CHAINER, *(os.path.join(os.path.dirname(_CHAINER), name)
                for name in ('onnx_chainer', 'onnx')),
    os.path.dirname(os.path.abspath(numpy.__file__)),
    os.path.dirname(os.path.abspath(__file__))))


def _line(frames: Iterable[tuple[str, int]]) -> str:
    """``net.py, line 12: h = self.lstm(x)``: the innermost one of the user.

    Of a model of chainer.links its line there; '' if there is neither.

    Args:
        frames: Files and numbers of lines, up to this file's at most.
    """
    inside = ''
    frames = itertools.dropwhile(lambda frame: frame[0] == __file__, frames)
    for file, number in frames:
        if file == __file__:
            break
        near = os.path.relpath(file)
        source = linecache.getline(file, number).strip()
        text = (f'{file if near.startswith(os.pardir) else near}, '
                f'line {number}: {textwrap.shorten(source, 70)}')
        if not file.startswith((*_LIBRARIES, '<')) and not (
                file.startswith(_PYTHON) and 'site-packages' not in file):
            return text
        if file.startswith(_LINKS):
            inside = inside or text
    return inside


def _in_words(error: BaseException) -> str:
    """The user's line, and what is wrong there, in one line."""
    line = _line(reversed([
        (frame.f_code.co_filename, number)
        for frame, number in traceback.walk_tb(error.__traceback__)]))
    return (f'{line}{line and ": "}{type(error).__name__}: '
            + ' '.join(str(error).split()))


def _some(names: Sequence[str]) -> str:
    more = f' and {len(names) - 3} more' if len(names) > 3 else ''
    return ', '.join(names[:3]) + more


def _kind(array: Any) -> str:
    return f'{array.dtype} {array.shape}'
