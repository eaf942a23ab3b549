"""A model over several ranks: cut by what they have memory for."""
import os

from chainer_fp8pipe import deferred, partition
from chainer_fp8pipe.planning import DoesNotFit

from filling import most_layers


def make_stage(options, build, example, grid):
    """This rank's part of the model; with --fill, of the largest that fits.

    Args:
        options: Of the command line; gets the number of layers.
        build: Makes the model of so many layers.
        example: Arrays of one micro-batch.
        grid: The ranks.

    Raises:
        ValueError: The model does not fit.
    """
    def cut(layers):
        with deferred(seed=options.seed):       # nothing is allocated
            model = build(layers)
        return partition(
            model, example, grid, memory=options.memory,
            micro_batches=options.micro_batches, schedule=options.schedule,
            chunks=2 if options.schedule == 'interleaved' else 1)

    def fits(layers):
        try:
            cut(layers)
        except DoesNotFit:
            return False
        return True

    if options.fill:
        options.layers = most_layers(fits, grid.stages)
    return cut(options.layers)


def save_plan(model, out):
    """Writes how the model was cut; on rank 0.

    Returns:
        The files, by what is in them.
    """
    files = {'plan': os.path.join(out, 'plan.json')}
    model.plan.save(files['plan'])
    return files
