"""``python -m chainer_fp8pipe export``: a trained model as ONNX, proven."""
# onnx_chainer makes a graph of the functions that one call of the model has
# called.  What forward computes beside them, with NumPy, is a constant of the
# graph, and right for the example only: the proof also computes an input of
# another mean, largest value and norm.
from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from unittest import mock

import chainer
import numpy

from .command_line import Parser
from .report.record import written_whole

_DESCRIPTION = """
Writes the model of a snapshot as ONNX, which runs without Chainer, if Chainer
and onnxruntime compute the same of the example, and of values drawn anew.

exit codes: 0; 1: the outputs differ by more than 1e-4 of their largest value;
2: what was given is wrong, or ONNX has no such function
"""
#: Of the file's format, and of its functions: onnx would write the newest,
#: which an older runtime refuses.
_IR_VERSION, _OPSET = 6, 11
_TOLERANCE = 1e-4

_Arrays = dict[str, numpy.ndarray]


def main(arguments: Sequence[str]) -> int:
    """Runs the command; its exit code.

    SystemExit if an argument is wrong, ImportError without a library.
    """
    parser = Parser(prog='python -m chainer_fp8pipe export',
                    description=_DESCRIPTION)
    add = parser.add_argument
    add('model', metavar='MODEL', help='a file of save_npz or of snapshots')
    add('--class', required=True, dest='model_class', metavar='WHERE:MODEL',
        help='a module or a script, which is imported, not run, and a class '
        "in it, or what makes the model: 'train.py:Net(100)'")
    add('--example', required=True, metavar='FILE',
        help='a batch: a .npy, or a .npz with the arguments of forward')
    add('-o', '--output', metavar='FILE', help='the file to write (default: '
        'MODEL with the ending .onnx)')
    options = parser.parse_args(arguments)
    for library in 'onnx', 'onnxruntime':   # before the model is computed
        importlib.import_module(library)
    output = options.output or os.path.splitext(options.model)[0] + '.onnx'
    try:
        model = make_model(options.model_class)
        print(f'{options.model}, {load(model, options.model) or "whole"}: '
              f'{len(list(model.params()))} parameters')
        if not (graph := proven(model, read_example(model, options.example))):
            return 1
        with written_whole(output, 'wb') as file:
            file.write(graph)
    except Exception as error:
        parser.error(' '.join(f'{type(error).__name__}: {error}'.split()))
    print(f'{output}: {len(graph):,} bytes, opset {_OPSET}')
    return 0


def make_model(text: str) -> chainer.Link:
    """The model of ``--class``, whose module is imported, not run."""
    place, _, expression = text.partition(':')
    folder, name = os.path.split(os.path.abspath(place.removesuffix('.py')))
    sys.path.insert(0, folder)
    with mock.patch.object(sys, 'argv', [place]):
        module = importlib.import_module(name)
    model = eval(expression or 'None', {**vars(module)})
    model = model() if isinstance(model, type) else model
    if not isinstance(model, chainer.Link):
        raise TypeError(f'--class {text} names no Chain or other Link; write '
                        'it as in train.py:Net')
    return model


def load(model: chainer.Link, file: str) -> str:
    """Loads a model from where all its names are in a file; the place."""
    saved = chainer.serializers.DictionarySerializer()
    saved.save(model)
    own, found = saved.target, {}
    last = max(own, default='')
    with numpy.load(file, allow_pickle=False) as archive:
        for place in {name.removesuffix(last) for name in archive.files
                      if name.endswith(last)}:
            keys = {key.removeprefix(place) for key in archive.files
                    if key.startswith(place)}
            if place[-1:] not in ('', '/') or keys != own.keys():
                continue
            arrays = {key: _read(archive, place + key) for key in own}
            # A parameter without values takes those of any shape.
            if all(value.dtype == object or value.shape == arrays[key].shape
                   for key, value in own.items()):
                found[place] = arrays
    if len(found) != 1:
        raise ValueError(
            f'{file} has {len(found)} models with the parameters of --class '
            f'({", ".join(sorted(own))}) and their shapes; name class and '
            'arguments of the training')
    (place, arrays), = found.items()
    chainer.serializers.NpzDeserializer(arrays).load(model)
    return place


def _read(archive: Mapping[str, numpy.ndarray], key: str) -> numpy.ndarray:
    try:
        return archive[key]
    except ValueError:      # a pickle: Chainer's serializers have it for None
        return numpy.asarray(None)


def read_example(model: chainer.Link, file: str) -> _Arrays:
    """The arrays of a file, by the names of forward's parameters."""
    loaded = numpy.load(file, allow_pickle=False)
    given = {**loaded} if isinstance(loaded, Mapping) else {'arr_0': loaded}
    # ``__call__`` is what a class of Chainer 3 has.
    forward = inspect.signature(getattr(model, 'forward', model))
    arrays = (forward.bind(*given.values()) if 'arr_0' in given
              else forward.bind(**given)).args
    names = [*forward.parameters, *map('input_{}'.format, range(len(arrays)))]
    return dict(zip(names, arrays, strict=False))


def compute(model: chainer.Link, inputs: _Arrays) -> _Arrays:
    """What Chainer computes, by the outputs' names."""
    # A call may change the model's state.
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        found = copy.deepcopy(model)(*map(chainer.Variable, inputs.values()))
    if not isinstance(found, Mapping):
        found = {f'output_{n}': one for n, one in enumerate(
            [found] if isinstance(found, chainer.Variable) else found)}
    return {name: value.array for name, value in found.items()}


def proven(model: chainer.Link, example: _Arrays) -> bytes:
    """The graph if onnxruntime computes the same, which is said; else b''."""
    import onnx_chainer
    import onnxruntime
    draw = numpy.random.default_rng(0)
    anew = {name: draw.choice(x.reshape(-1), x.shape) * (
        draw.uniform(0.3, 1.5, x.shape).astype(x.dtype)
        if x.dtype.kind == 'f' else x.dtype.type(1))
        for name, x in example.items()}
    cases = [(what, inputs, compute(model, inputs)) for what, inputs in (
        ('the example', example), ('values drawn anew', anew))]
    names = [*cases[0][2]]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        made = onnx_chainer.export(
            model, (*example.values(),), opset_version=_OPSET,
            input_names=[*example], output_names=names)
    made.ir_version = _IR_VERSION
    graph = made.SerializeToString()
    session = onnxruntime.InferenceSession(
        graph, providers=['CPUExecutionProvider'])
    for what, inputs, outputs in cases:
        found = session.run(names, {
            one.name: inputs[one.name] for one in session.get_inputs()})
        part = numpy.max([       # NaN where one is
            abs(ours - theirs.astype(float)).max() / (abs(ours).max() or 1)
            for ours, theirs in zip(outputs.values(), found, strict=True)])
        print(f'{what}: {", ".join(names)} differ by {part:.2g} of their '
              'largest value')
        if not part <= _TOLERANCE:
            print(f'Not proven: it differs with {what}. What forward computes '
                  "without Chainer's functions, such as from x.array or "
                  'x.shape, would be a constant in the file')
            return b''
    return graph
