"""``python -m chainer_fp8pipe export``: a trained model as ONNX, proven."""
# onnx_chainer makes a graph of the functions that one call of the model has
# called.  What forward computes beside Chainer's functions, with NumPy, is a
# constant of the graph, and right for the example only: the proof also
# computes an input of another mean, largest value and norm.
from __future__ import annotations

import copy
import importlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from unittest import mock

import chainer
import numpy

from .command_line import Parser, check_script
from .report.record import written_whole

_DESCRIPTION = """
Writes the model of a snapshot as ONNX, which runs without Chainer.  Chainer
and onnxruntime then compute the example, and values drawn anew; the largest
difference of each output is printed.

exit codes: 0: proven; 1: the outputs differ by more than 1e-4 of their largest
value, and the file is FILE.unproven; 2: what was given is wrong, or ONNX has
no such function, and nothing is written
"""
#: Of the file's format, and of its functions: onnx would write the newest,
#: which an older runtime refuses.
_IR_VERSION, _OPSET = 6, 11
_TOLERANCE = 1e-4

_Arrays = dict[str, numpy.ndarray]


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
        model = make_model(options.model_class)
        place = load(model, options.model)
        print(f'{options.model}{place and ", below "}{place}: '
              f'{len(list(model.params()))} parameters')
        example = read_example(model, options.example)
        generator = numpy.random.default_rng(0)
        cases = {what: (inputs, compute(model, inputs)) for what, inputs in (
            ('the example', example), ('values drawn anew', {
                name: _drawn(x, generator) for name, x in example.items()}))}
        graph = convert(model, example, [*cases['the example'][1]])
        is_proven = prove(graph, cases)
        output += '' if is_proven else '.unproven'
        with written_whole(output, 'wb') as file:
            file.write(graph)
    except Exception as error:
        parser.error(' '.join(f'{type(error).__name__}: {error}'.split()))
    print(f'{output}: {len(graph):,} bytes, opset {_OPSET}')
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
    return parser


def make_model(text: str) -> chainer.Link:
    """The model of ``--class``, whose module is imported, not run."""
    place, _, expression = map(str.strip, text.partition(':'))
    if not place or not expression:
        raise ValueError(f'--class: write {text!r} as in train.py:Net or '
                         "'models.cnn:Net(100)'")
    folder, name = os.getcwd(), place
    if place.endswith('.py'):
        check_script(place)
        folder, name = os.path.split(os.path.abspath(place[:-3]))
    sys.path.insert(0, folder)
    with mock.patch.object(sys, 'argv', [place]), mock.patch.object(
            chainer.training.Trainer, 'run', side_effect=RuntimeError(
                f'{place} starts to train when it is imported; that belongs '
                'under "if __name__ == \'__main__\':"')):
        module = importlib.import_module(name)
    model = eval(expression, {**vars(module)})
    model = model() if isinstance(model, type) else model
    if not isinstance(model, chainer.Link):
        raise TypeError(f'--class {text} is a {type(model).__name__}, and no '
                        'Chain or other Link')
    return model


def load(model: chainer.Link, file: str) -> str:
    """Loads a model from where all its names are in a file; the place."""
    serializer = chainer.serializers.DictionarySerializer()
    serializer.save(model)
    wanted = serializer.target
    with numpy.load(file, allow_pickle=False) as archive:
        places = [place for place in sorted({'', *(
            key[:at.end()] for key in archive.files
            for at in re.finditer('/', key))}) if {
                key[len(place):] for key in archive.files
                if key.startswith(place)} == {*wanted}]
        if len(places) != 1:
            raise ValueError(
                f'{file} has {len(places)} models with the parameters '
                f'{", ".join(sorted(wanted))}; write the model alone with '
                'save_npz, or name its class and arguments in --class')
        found = {key: archive[places[0] + key] for key in wanted}
    for key, own in wanted.items():
        if own.dtype != object and own.shape != found[key].shape:
            raise ValueError(
                f'{key} has shape {found[key].shape} in {file}, and '
                f'{own.shape} in the model; do the arguments in --class '
                'differ from those of the training?')
    chainer.serializers.NpzDeserializer(found).load(model)
    return places[0]


def read_example(model: chainer.Link, file: str) -> _Arrays:
    """The arrays that a file has for forward, by its parameters' names."""
    loaded = numpy.load(file, allow_pickle=False)
    arrays = {'arr_0': loaded} if isinstance(loaded, numpy.ndarray) else {
        name: loaded[name] for name in loaded.files}
    # ``__call__`` is what a class of Chainer 3 has.
    signature = inspect.signature(getattr(model, 'forward', model))
    try:
        found = signature.bind(*arrays.values()) if 'arr_0' in arrays else (
            signature.bind(**arrays))
    except TypeError as error:
        raise ValueError(f'--example: {file} has {", ".join(arrays)}, and '
                         f'forward takes {signature}: {error}') from None
    return {name if not isinstance(value, tuple) else f'{name}_{n}': one
            for name, value in found.arguments.items() for n, one in enumerate(
                value if isinstance(value, tuple) else [value])}


def _drawn(x: numpy.ndarray, generator: numpy.random.Generator
           ) -> numpy.ndarray:
    """Values that forward may get where it gets these."""
    if x.dtype.kind in 'iu':        # labels of classes, words
        return generator.integers(x.min(), x.max(), x.shape, x.dtype,
                                  endpoint=True)
    found = generator.permutation(x.reshape(-1)).reshape(x.shape)
    return found if x.dtype.kind == 'b' else (
        found * generator.uniform(0.3, 1.5, x.shape)).astype(x.dtype)


def compute(model: chainer.Link, inputs: _Arrays) -> _Arrays:
    """What Chainer computes, by the outputs' names."""
    # A call may change the model's state.
    model = copy.deepcopy(model)
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        found = model(*(chainer.Variable(array.copy())
                        for array in inputs.values()))
    if isinstance(found, chainer.Variable):
        found = {'output': found}
    elif not isinstance(found, Mapping):
        found = {f'output_{n}': value for n, value in enumerate(found)}
    return {name: value.array for name, value in found.items()}


def convert(model: chainer.Link, example: _Arrays, names: Sequence[str]
            ) -> bytes:
    """The model as onnx_chainer converts it, or its error on a function."""
    import onnx_chainer
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        made = onnx_chainer.export(
            model, tuple(one.copy() for one in example.values()),
            opset_version=_OPSET, input_names=list(example),
            output_names=list(names))
    made.ir_version = _IR_VERSION
    return made.SerializeToString()


def prove(graph: bytes, cases: Mapping[str, tuple[_Arrays, _Arrays]]) -> bool:
    """Whether onnxruntime computes what Chainer has computed; says how near.

    ``cases`` are inputs and outputs by what they are.
    """
    import onnxruntime
    session = onnxruntime.InferenceSession(
        graph, providers=['CPUExecutionProvider'])
    differing: list[str] = []
    for what, (inputs, outputs) in cases.items():
        found = session.run([*outputs], {
            one.name: inputs[one.name] for one in session.get_inputs()})
        for (name, ours), theirs in zip(outputs.items(), found, strict=True):
            finite = numpy.isfinite(ours)
            is_alike = ours.shape == theirs.shape and numpy.array_equal(
                ours[~finite], theirs[~finite], True) and finite.any()
            part = abs(ours[finite].astype(float) - theirs[finite]).max() / (
                abs(ours[finite]).max() or 1) if is_alike else numpy.inf
            print(f'output {name}: {ours.dtype} {ours.shape}, {what}: largest '
                  f'difference {part:.2g} of its largest value')
            if not part <= _TOLERANCE:
                differing.append(what)
    if differing:
        print(f'Not proven: it differs with {", ".join(differing)}. What '
              "forward computes without Chainer's functions, such as from "
              'x.array or x.shape, is a constant in it')
    return not differing
