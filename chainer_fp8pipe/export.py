"""``python -m chainer_fp8pipe export``: a trained model as ONNX, proven."""
# onnx_chainer makes a graph of the functions that one call of the model has
# called.  It knows no files and no classes, stops at the first function that
# it cannot convert, and nobody has run what it makes.  All that is here.
from __future__ import annotations

import contextlib
import copy
import importlib
import inspect
import linecache
import os
import re
import sys
import traceback
import warnings
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType, ModuleType
from typing import Any, NamedTuple
from unittest import mock

import chainer
import chainer.functions as F
import numpy

from .command_line import Parser, check_script, did_you_mean, reason
from .report.record import written_whole

_DESCRIPTION = """
Writes the model of a snapshot as ONNX, which runs without Chainer.  Chainer
and onnxruntime then compute the example, and values drawn anew; the largest
difference of each output is printed.  Functions that cannot be converted are
named, with the lines that call them.

exit codes: 0: proven; 1: ONNX has no such function or no such model, and
nothing is written, or the outputs differ, and the file is FILE.unproven; 2:
what was given is wrong
"""
_OPSETS = range(7, 12)      # those that onnx_chainer has been made for
#: Of the file's format, not of its functions.  onnx would write the newest,
#: which an older runtime refuses; this one is as old as opset 11.
_IR_VERSION = 6
#: Modules that the user has not written.
_LIBRARIES = {*sys.stdlib_module_names, 'chainer', 'chainer_fp8pipe', 'numpy',
              'onnx', 'onnx_chainer'}


class ExportError(Exception):
    """The model cannot be converted, or onnxruntime cannot run it."""


class _Case(NamedTuple):
    what: str       # in words
    inputs: Mapping[str, numpy.ndarray]
    outputs: Mapping[str, numpy.ndarray]


def main(arguments: Sequence[str]) -> int:
    """Runs the command; its exit code.

    SystemExit if an argument is wrong, ImportError without onnxruntime.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    for library in 'onnx', 'onnxruntime':   # before the model is computed
        importlib.import_module(library)
    output = options.output or os.path.splitext(options.model)[0] + '.onnx'
    try:
        if not 0 <= options.tolerance < 1:
            raise ValueError(
                f'--tolerance: {options.tolerance} is no part of 1')
        if not os.path.isdir(folder := os.path.dirname(output) or '.'):
            raise ValueError(f'-o: there is no folder {folder}')
        model = make_model(options.model_class)
        place = load(model, options.model, options.path)
        example = read_example(model, options.example)
        cases = list(_cases(model, example, options.any_batch))
        print(f'{options.model}{place and ", below "}{place}: '
              f'{len(list(model.params()))} parameters')
        if any(hasattr(link, 'reset_state') for link in model.links()):
            print('the model has a state; as ONNX it is its first call, after '
                  'reset_state')
        for name, array in example.items():
            print(f'input {name}: {_kind(array)}')
        graph = convert(model, example, options.opset, options.any_batch)
        is_proven = prove(graph, cases, options.tolerance)
        output += '' if is_proven else '.unproven'
        with written_whole(output, 'wb') as file:
            file.write(graph)
    except ExportError as error:
        print(f'{parser.prog}: {error}', file=sys.stderr)
        return 1
    except OSError as error:
        parser.error(f'-o: {output} cannot be written: {reason(error)}')
    except ValueError as error:
        parser.error(str(error))
    print(f'{output}: {len(graph):,} bytes, opset {options.opset}')
    return int(not is_proven)


def _parser() -> Parser:
    parser = Parser(prog='python -m chainer_fp8pipe export',
                    description=_DESCRIPTION)
    add = parser.add_argument
    add('model', metavar='MODEL', help='a file of save_npz or of snapshots')
    add('--class', required=True, dest='model_class', metavar='WHERE:MODEL',
        help='a module or a script, which is imported, not run, and a class '
        "in it, or what makes the model: 'train.py:Net(100)'")
    add('--example', required=True, metavar='FILE',
        help='a batch as forward gets it: a .npy, or a .npz with its '
        'parameters, by their names or in their order')
    add('-o', '--output', metavar='FILE', help='the file to write (default: '
        'MODEL with the ending .onnx)')
    add('--path', metavar='KEYS', help='where in MODEL the parameters are, '
        'such as updater/model:main/ (default: where their names are)')
    add('--any-batch', action='store_true', help='leave the first axis of '
        "each input open (default: the example's batch size); the proof then "
        'computes a batch twice as large, too')
    add('--opset', type=int, choices=_OPSETS, default=_OPSETS[-1],
        help='version of the functions in the file (default: %(default)s)')
    add('--tolerance', type=float, default=1e-4, metavar='X',
        help='largest difference that is proof, as a part of the largest '
        'value of an output (default: %(default)s)')
    return parser


def make_model(text: str) -> chainer.Link:
    """The model of ``--class``; ValueError if there is none."""
    place, _, expression = map(str.strip, text.partition(':'))
    if not place or not expression:
        raise ValueError(f'--class: write {text!r} as in train.py:Net or '
                         "'models.cnn:Net(100)'")
    names = {**vars(_import(place))}
    links = {name: f'{name}{inspect.signature(value)}'
             for name, value in names.items()
             if isinstance(value, type) and issubclass(value, chainer.Link)}
    try:
        model = eval(compile(expression, '<class>', 'eval'), names)
        if isinstance(model, type):
            model = model()
        if not isinstance(model, chainer.Link):
            raise TypeError(f'this is a {type(model).__name__}, and no Chain '
                            'or other Link')
        return model
    except Exception as error:
        hint = did_you_mean(getattr(error, 'name', None) or '', links) or (
            f'; its links are {_some([*links.values()])}' * bool(links))
        raise ValueError(f'--class {text}: {_in_words(error)}{hint}'
                         ) from error


def _import(place: str) -> ModuleType:
    """A module by its name or its file, which is imported, not run."""
    folder, name = os.getcwd(), place
    if place.endswith('.py'):
        check_script(place)
        folder, name = os.path.split(os.path.abspath(place[:-3]))
    training = RuntimeError('it starts to train')
    try:
        with mock.patch.object(sys, 'argv', [place]), mock.patch.object(
                chainer.training.Trainer, 'run', side_effect=training):
            sys.path.insert(0, folder)
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:
        hint = ('; what it is to do when it is run belongs under '
                '"if __name__ == \'__main__\':"')
        raise ValueError(
            f'--class: {place} cannot be imported: {_in_words(error)}' + hint
            * (error is training or isinstance(error, SystemExit))) from error
    if place.endswith('.py') and not os.path.samefile(
            place, module.__file__ or os.devnull):
        raise ValueError(f'--class: {place} is called as {module.__file__}, '
                         'which is imported already; rename it')
    return module


@contextlib.contextmanager
def _reading(file: str, option: str = '') -> Iterator[Any]:
    """What numpy.load gives; ValueError if it, or the block, cannot read."""
    try:
        yield numpy.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error
            ) as error:
        why = ('it is no .npy or .npz of numbers' if 'pickle' in str(error)
               else reason(error))
        raise ValueError(f'{option}{file} cannot be read: {why}') from None


def load(model: chainer.Link, file: str, given: str | None = None) -> str:
    """Loads a model from where its names are in a file, or below ``given``.

    Returns the place; ValueError if names or shapes differ.
    """
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    wanted = serializer.target
    with _reading(file) as archive:
        keys = getattr(archive, 'files', None)
    if keys is None:
        raise ValueError(f'{file} is one array, and no file of save_npz')
    below = {place: {key[len(place):] for key in keys if key.startswith(place)}
             for place in {'', *(key[:at.end()] for key in keys
                                 for at in re.finditer('/', key))}}
    if given is not None:
        given = given.strip('/') + '/' * bool(given.strip('/'))
        if given not in below:
            raise ValueError(f'--path: {file} has nothing below {given}'
                             + did_you_mean(given, below))
        below = {given: below[given]}
    # Where all names are, else where the fewest differ.
    place, *others = sorted(
        one for one, names in below.items() if names == set(wanted)) or [min(
            below, key=lambda one: len(below[one] ^ set(wanted)))]
    if others:
        raise ValueError(f'{file} has such models below '
                         f'{_some([place, *others])}; choose one with --path')
    problems = [f'{kind} {_some(sorted(names))}' for kind, names in (
        ('there are no', set(wanted) - below[place]),
        ('the model has no', below[place] - set(wanted))) if names]
    found = {}
    with _reading(file) as archive:
        for key, own in wanted.items() if not problems else ():
            try:
                found[key] = archive[place + key]
            except ValueError:      # None, which is pickled: no parameter yet
                found[key] = numpy.asarray(None)
            shape = 'no value' if found[key].dtype == object else (
                found[key].shape)
            if own.dtype != object and own.shape != shape:
                problems.append(f'{key} has {shape} in the file, {own.shape} '
                                'in the model')
    if problems:
        raise ValueError(f'{file} is of another model: '
                         + ', and '.join(problems[:3]) + '; do the arguments '
                         'in --class differ from those of the training?')
    chainer.serializers.NpzDeserializer(found).load(model)
    return place


def read_example(model: chainer.Link, file: str) -> dict[str, numpy.ndarray]:
    """The arrays that a file has for forward, by its parameters' names."""
    with _reading(file, '--example: ') as loaded:
        arrays = {'arr_0': loaded} if isinstance(loaded, numpy.ndarray) else {
            name: loaded[name] for name in loaded.files}
    # In the order of their numbers, so arr_10 comes after arr_9.
    keys = sorted(arrays, key=lambda key: (len(key), key))
    has_names = len(keys) > 1 and not all(key[:4] == 'arr_' for key in keys)
    signature = _signature(model)
    try:
        found = (signature.bind(**arrays) if has_names else
                 signature.bind(*map(arrays.get, keys))).arguments
    except TypeError as error:
        raise ValueError(f'--example: {file} has {_some(keys)}, and forward '
                         f'takes {signature}: {error}') from None
    example: dict[str, numpy.ndarray] = {}
    for name, value in found.items():
        if isinstance(value, tuple):        # of *inputs
            value = {f'input_{n}': one
                     for n, one in enumerate(value, len(example))}
        example.update(value if isinstance(value, dict) else {name: value})
    return example


def _signature(model: chainer.Link) -> inspect.Signature:
    """Of forward, or of the ``__call__`` that a class of Chainer 3 has."""
    return inspect.signature(getattr(model, 'forward', model))


def _cases(model: chainer.Link, example: Mapping[str, numpy.ndarray],
           any_batch: bool) -> Iterator[_Case]:
    """Inputs, and what Chainer computes from them: the example, and others.

    What forward computes beside Chainer's functions, with NumPy, is a constant
    of the graph, and right for the example only.  So the others have another
    mean, largest value and norm.
    """
    if any_batch and not all(array.ndim for array in example.values()):
        raise ValueError('--any-batch: a number in the example has no batch')
    before = dict(model.namedparams(include_uninit=False))
    generator = numpy.random.default_rng(0)

    def anew(x: numpy.ndarray) -> numpy.ndarray:
        return _drawn(x, generator)
    changes = {'the example': lambda x: x, 'values drawn anew': anew,
               'values drawn once more': anew,
               'a batch of the example twice': lambda x: numpy.concatenate(
                   [x, x])}
    for what, change in list(changes.items())[:3 + any_batch]:
        inputs = {name: change(array) for name, array in example.items()}
        called = copy.deepcopy(model)    # whose state a call may change
        try:
            with (chainer.using_config('train', False),
                  chainer.no_backprop_mode()):
                outputs = _call(called, what, {
                    name: chainer.Variable(array.copy())
                    for name, array in inputs.items()})
        except ValueError as error:
            if 'drawn' not in what:
                raise
            print(f'{error}; so the proof is for the example only')
            continue
        if drawn := sorted(name for name, _ in called.namedparams(
                include_uninit=False) if name not in before):
            raise ValueError('forward uses parameters that have no value in '
                             f'the file: {_some(drawn)}')
        yield _Case(what, inputs, {
            name: value.array for name, value in outputs.items()})


def _drawn(x: numpy.ndarray, generator: numpy.random.Generator
           ) -> numpy.ndarray:
    """Values that forward may get where it gets these."""
    if not x.size or x.dtype.kind not in 'iufc':
        return generator.permutation(x.reshape(-1)).reshape(x.shape)
    if x.dtype.kind in 'iu':        # labels of classes, words
        return generator.integers(x.min(), x.max(), x.shape, x.dtype,
                                  endpoint=True)
    found = generator.choice(x.reshape(-1), x.shape)
    return (found * generator.uniform(0.3, 1.5, x.shape)).astype(x.dtype)


def _call(model: chainer.Link, what: str,
          inputs: Mapping[str, chainer.Variable]
          ) -> dict[str, chainer.Variable]:
    """The outputs by their names; ValueError if forward fails."""
    by_order = any(one.kind is one.VAR_POSITIONAL
                   for one in _signature(model).parameters.values())
    try:
        found = model(*inputs.values()) if by_order else model(**inputs)
    except Exception as error:
        kinds = ', '.join(f'{name}: {_kind(one)}'
                          for name, one in inputs.items())
        raise ValueError(f'forward fails with {what} ({kinds}): '
                         f'{_in_words(error)}') from error
    outputs: dict[str, chainer.Variable] = {}
    for name, value in [*_outputs(found, '')] or [('output', None)]:
        if not isinstance(value, chainer.Variable):
            raise ValueError(f'forward returns no Variable as {name}, but '
                             f'{type(value).__name__}')
        # A name means one value of the graph, which has one name.
        has_name = any(value is other
                       for other in (*inputs.values(), *outputs.values()))
        outputs[name + '_output' * (name in inputs)] = (
            F.identity(value) if has_name else value)
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


def convert(model: chainer.Link, example: Mapping[str, numpy.ndarray],
            opset: int = _OPSETS[-1], any_batch: bool = False) -> bytes:
    """The model as onnx_chainer converts it; ExportError if it cannot."""
    import onnx_chainer
    names: list[str] = []

    def flat(**inputs):
        outputs = _call(model, 'the example', inputs)
        names.extend(outputs)
        return outputs

    vars(flat).update(namedlinks=model.namedlinks,
                      namedparams=model.namedparams)
    problems: dict[str, None] = {}
    shapes = [('batch', *array.shape[1:]) for array in example.values()]
    try:
        with warnings.catch_warnings(), _noting(problems):
            warnings.simplefilter('ignore')
            made = onnx_chainer.export(
                flat, {name: one.copy() for name, one in example.items()},
                opset_version=opset, input_names=list(example),
                output_names=names, input_shapes=shapes if any_batch else None)
        made.ir_version = _IR_VERSION
        # Parameters that are inputs, too, are no constants for a runtime.
        constants = {tensor.name for tensor in made.graph.initializer}
        for one in [*made.graph.input]:
            if one.name in constants:
                made.graph.input.remove(one)
    except Exception as error:
        problem = f'onnx_chainer fails: {_in_words(error)}'
    else:
        problem = ''
    if problems:
        problem = (
            'onnx_chainer cannot convert these; write them with functions '
            'that it knows, the keys of onnx_chainer.mapping.converters:\n  '
            + '\n  '.join(problems))
    if problem:
        raise ExportError(problem)
    return made.SerializeToString()


@contextlib.contextmanager
def _noting(problems: dict[str, None]) -> Iterator[None]:
    """Names calls that onnx_chainer cannot convert, with their lines."""
    from onnx_chainer.graph import Graph
    apply, make_nodes = chainer.FunctionNode.apply, Graph.create_node

    def noting(function, inputs):
        line = _line(traceback.walk_stack(sys._getframe(1)))
        getattr(function, 'function', function)._line = line
        return apply(function, inputs)

    def create_node(graph, name, function, *names):
        shape = name == 'Reshape' and function.outputs[0]().shape
        if shape and 0 not in shape:
            # F.linear reshapes to (x.shape[0], -1), a batch of one size.
            function.shape = (-1, *shape[1:])
        try:
            return make_nodes(graph, name, function, *names)
        except Exception as error:
            why = f': {type(error).__name__}: {error}'
            problems[f'{function._line}{name}'
                     + why * (name in graph.converters)] = None
            return []

    with (mock.patch.object(chainer.FunctionNode, 'apply', noting),
          mock.patch.object(Graph, 'create_node', create_node)):
        yield


def prove(graph: bytes, cases: Sequence[_Case], tolerance: float) -> bool:
    """Whether onnxruntime computes what Chainer has computed; says how near.

    The tolerance is a part of the largest value of an output.
    """
    import onnxruntime
    settings = onnxruntime.SessionOptions(), onnxruntime.RunOptions()
    for one in settings:
        one.log_severity_level = 4      # an exception says the same
    differing: list[str] = []
    largest: dict[str, tuple[float, float]] = {}
    for case in cases:
        try:
            session = onnxruntime.InferenceSession(
                graph, settings[0], providers=['CPUExecutionProvider'])
            found = session.run(list(case.outputs), {
                one.name: case.inputs[one.name]
                for one in session.get_inputs()}, settings[1])
        except Exception as error:
            raise ExportError(f'onnxruntime fails with {case.what}: '
                              + ' '.join(str(error).split())) from error
        for (name, ours), theirs in zip(case.outputs.items(), found,
                                        strict=True):
            difference = _difference(ours, theirs)
            largest[name] = max(largest.get(name, difference), difference)
            if not difference[0] <= tolerance:
                differing.append(f'{name} differs with {case.what}')
    for name, (part, most) in largest.items():
        print(f'output {name}: {_kind(cases[0].outputs[name])}: largest '
              f'difference {most:.2g}, {part:.2g} of its largest value')
    if differing:
        print('Not proven: ' + '; '.join(differing))
        if not any(text.endswith('the example') for text in differing):
            print('It is right for the example only: values that forward '
                  "computes without Chainer's functions, such as from "
                  'x.array or x.shape, are constants in it')
    return not differing


def _difference(ours: numpy.ndarray, theirs: numpy.ndarray
                ) -> tuple[float, float]:
    """The largest, as a part of the largest value, and as it is.

    Infinite where shapes, dtypes or what is not finite differ; NaN where no
    value is finite, which proves nothing.
    """
    finite = numpy.isfinite(ours)
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype) or not (
            numpy.array_equal(ours[~finite], theirs[~finite], True)):
        return numpy.inf, numpy.inf
    exact = ours[finite].astype(float)
    most = abs(exact - theirs[finite]).max() if finite.any() else numpy.nan
    return float(most / (abs(exact).max(initial=0) or 1)), float(most)


def _line(frames: Iterable[tuple[FrameType, int]]) -> str:
    """``net.py, line 12: h = self.lstm(x)``: the innermost one of the user."""
    for frame, number in frames:        # the innermost one comes first
        file, module = frame.f_code.co_filename, frame.f_globals['__name__']
        if file == __file__:
            break
        if module.partition('.')[0] not in _LIBRARIES and file[0] != '<':
            return (f'{os.path.relpath(file)}, line {number}: '
                    + linecache.getline(file, number).strip() + ': ')
    return ''


def _in_words(error: BaseException) -> str:
    """The user's line, and what is wrong there, in one line."""
    line = _line(reversed([*traceback.walk_tb(error.__traceback__)]))
    return f'{line}{type(error).__name__}: ' + ' '.join(str(error).split())


def _some(names: Sequence[str]) -> str:
    more = f' and {len(names) - 3} more' if len(names) > 3 else ''
    return ', '.join(names[:3]) + more


def _kind(array: Any) -> str:
    return f'{array.dtype} {array.shape}'
