"""``python -m chainer_fp8pipe export``: a trained model as ONNX, proven."""
# onnx_chainer makes a graph of the functions that one call of the model has
# called.  What forward computes beside them, with NumPy, is a constant of the
# graph, and right for the example only: the proof draws another input.
from __future__ import annotations

import copy
import importlib
import os
import sys
import warnings
from collections.abc import Mapping, Sequence
from unittest.mock import patch

import chainer
import numpy
import onnx_chainer
import onnxruntime

from .command_line import Parser
from .report.record import written_whole

_DESCRIPTION = """
Writes the model of a snapshot as ONNX, which runs without Chainer, if Chainer
and onnxruntime compute the same of the example, and of values drawn anew.

exit codes: 0; 1: the outputs differ by more than 1e-4 of their largest value;
2: what was given is wrong, or ONNX has no such function
"""
#: Of the format and its functions: an older runtime refuses the newest.
_IR_VERSION, _OPSET = 6, 11


def main(arguments: Sequence[str]) -> None:
    """Runs the command.  SystemExit if it fails."""
    parser = Parser(prog='python -m chainer_fp8pipe export',
                    description=_DESCRIPTION)
    add = parser.add_argument
    add('model', metavar='MODEL', help='a file of save_npz or of snapshots')
    add('--class', required=True, dest='model_class', metavar='WHERE:MODEL',
        help="a script, imported, and the model in it: 'train.py:Net(100)'")
    add('--example', required=True, metavar='FILE',
        help='a batch: a .npy, or a .npz with the arguments of forward')
    add('-o', '--output', metavar='FILE', help='to write (MODEL.onnx)')
    options = parser.parse_args(arguments)
    output = options.output or os.path.splitext(options.model)[0] + '.onnx'
    try:
        model = make_model(options.model_class)
        print(f'{options.model}, {load(model, options.model) or "whole"}: '
              f'{len(list(model.params()))} parameters')
        graph = proven(model, options.example)
        with written_whole(output, 'wb') as file:
            file.write(graph)
    except Exception as error:
        parser.error(' '.join(f'{type(error).__name__}: {error}'.split()))
    print(f'{output}: {len(graph):,} bytes, opset {_OPSET}')


def make_model(text: str) -> chainer.Link:
    """The model of ``--class``, whose module is imported, not run."""
    place, _, expression = text.partition(':')
    folder, name = os.path.split(os.path.abspath(place.removesuffix('.py')))
    sys.path.insert(0, folder)
    refusal = RuntimeError(f'{place} trains while it is imported; put its '
                           "training below if __name__ == '__main__':")
    with patch.object(sys, 'argv', [place]), patch.object(
            chainer.training.Trainer, 'run', side_effect=refusal), \
            patch.object(chainer.Variable, 'backward', side_effect=refusal):
        module = importlib.import_module(name)
    model = eval(expression or 'None', {**vars(module)})
    model = model() if isinstance(model, type) else model
    if not isinstance(model, chainer.Link):
        raise TypeError(f'{text} is no Link; write it as in train.py:Net')
    return model


def load(model: chainer.Link, file: str) -> str:
    """Loads a model from where all its names are in a file; the place."""
    saved = chainer.serializers.DictionarySerializer()
    saved.save(model)
    own, found, last = saved.target, {}, max(saved.target, default='')
    with numpy.load(file, allow_pickle=False) as archive:
        for place in {name.removesuffix(last) for name in archive.files
                      if name.endswith(last)}:
            arrays = {name.removeprefix(place): _read(archive, name)
                      for name in archive.files if name.startswith(place)}
            # A parameter without values takes those of any shape.
            if place[-1:] in ('', '/') and arrays.keys() == own.keys() and all(
                    value.dtype == object or value.shape == arrays[key].shape
                    for key, value in own.items()):
                found[place] = arrays
    if len(found) != 1:
        raise ValueError(
            f'{file} has {len(found)} models with the names and shapes of '
            f'--class ({", ".join(sorted(own))}); give it as in the training')
    (place, arrays), = found.items()
    chainer.serializers.NpzDeserializer(arrays).load(model)
    return place


def _read(archive: Mapping[str, numpy.ndarray], name: str) -> numpy.ndarray:
    try:
        return archive[name]
    except ValueError:      # a pickle: Chainer's serializers have it for None
        return numpy.asarray(None)


def proven(model: chainer.Link, file: str) -> bytes:
    """The graph, if onnxruntime computes the same; or else SystemExit."""
    loaded = numpy.load(file, allow_pickle=False)
    example = {**loaded} if isinstance(loaded, Mapping) else {'arr_0': loaded}
    draw = numpy.random.default_rng(0)
    anew = {name: draw.choice(x.reshape(-1), x.shape) * (
        draw.uniform(0.3, 1.5, x.shape).astype(x.dtype)
        if x.dtype.kind == 'f' else x.dtype.type(1))
        for name, x in example.items()}
    outputs = [*compute(model, example)]
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        made = onnx_chainer.export(
            copy.deepcopy(model), [*example.values()], opset_version=_OPSET,
            input_names=[*example], output_names=outputs)
    made.ir_version = _IR_VERSION
    graph = made.SerializeToString()
    session = onnxruntime.InferenceSession(
        graph, providers=['CPUExecutionProvider'])
    for what, values in (('the example', example),
                         ('values drawn anew', anew)):
        ours, theirs = compute(model, values), session.run(outputs, values)
        part = numpy.max([       # NaN where one is
            abs(one - other.astype(float)).max() / (abs(one).max() or 1)
            for one, other in zip(ours.values(), theirs, strict=True)])
        print(f'{what}: {", ".join(outputs)} differ by {part:.2g} of their '
              'largest value')
        if not part <= 1e-4:
            sys.exit(f'Not proven: {what} differ. What forward computes from '
                     'x.array or x.shape would be a constant in the file')
    return graph


def compute(model: chainer.Link, inputs: Mapping[str, numpy.ndarray]
            ) -> dict[str, numpy.ndarray]:
    """What Chainer computes, by the outputs' names."""
    # A call may change the model's state.
    with chainer.using_config('train', False), chainer.no_backprop_mode():
        found = copy.deepcopy(model)(*map(chainer.Variable, inputs.values()))
    if not isinstance(found, Mapping):
        found = {f'output_{n}': one for n, one in enumerate(
            [found] if isinstance(found, chainer.Variable) else found)}
    return {name: value.array for name, value in found.items()}
