"""Trains a transformer on Python's standard library, byte by byte.

    mpiexec -n 4 python examples/train_language.py

divides the model, written as for one process, over 2 ranks; 2 such replicas
average their gradients in fp8.  Without mpiexec the same model is trained in
one process.
"""
import math
import os

from chainer_fp8pipe import (
    PipelineUpdater,
    ProcessGrid,
    ReplicaIterator,
    create_communicator,
    deferred,
    partition,
)
from chainer_fp8pipe.training.extensions import save_whole_model

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import common
import numpy
from chainer import training
from chainer.dataset import concat_examples
from chainer.initializers import Normal
from chainer.training import extensions
from mpi4py import MPI

MICRO_BATCHES = 4
TEXTS = 128         # of a validation


class Decoder(chainer.Chain):
    """A transformer that sees the past alone, normalised before each part.

    The tokens that go in and those that come out share their vectors, which
    are longer on the way in (Vaswani et al. 2017, section 3.4).

    Args:
        vocabulary: Number of tokens.
        length: Tokens that it sees at most.
        units: Width of all layers.
        layers: Blocks of attention and dense layers.
        heads: Of each attention; ``units`` is a multiple.
    """

    def __init__(self, vocabulary, length, units, layers, heads):
        super().__init__()
        self.scale = units ** 0.5
        with self.init_scope():
            self.embed = L.EmbedID(vocabulary, units, initialW=Normal(0.02))
            self.place = L.EmbedID(length, units, initialW=Normal(0.02))
            self.blocks = chainer.ChainList(*[
                Block(units, heads) for _ in range(layers)])
            self.norm = L.LayerNormalization(units)

    def forward(self, x, t):
        """The mean cross-entropy of the tokens, in nats."""
        logits = F.reshape(self.logits(x), (x.size, -1))
        loss = F.softmax_cross_entropy(logits, t.reshape(-1))
        chainer.report({'loss': loss}, self)
        return loss

    def logits(self, x):
        """Of the next token, at each place: (batch, length, vocabulary)."""
        places = self.xp.arange(x.shape[1], dtype=numpy.int32)
        h = self.embed(x) * self.scale + self.place(places)
        for block in self.blocks:
            h = block(h)
        h = everywhere(self.norm, h)
        return F.linear(h, self.embed.W, n_batch_axes=2)


class Block(chainer.Chain):
    """Attention, then two dense layers; each adds to what goes in."""

    def __init__(self, units, heads):
        super().__init__()
        self.heads = heads
        with self.init_scope():
            self.norm1 = L.LayerNormalization(units)
            self.inputs = dense(units, 3 * units)
            self.outputs = dense(units, units)
            self.norm2 = L.LayerNormalization(units)
            self.fc1 = dense(units, 4 * units)
            self.fc2 = dense(4 * units, units)

    def forward(self, x):
        x = x + self.attention(everywhere(self.norm1, x))
        h = F.relu(self.fc1(everywhere(self.norm2, x), n_batch_axes=2))
        return x + self.fc2(h, n_batch_axes=2)

    def attention(self, x):
        batch, length, units = x.shape
        h = F.reshape(self.inputs(x, n_batch_axes=2), (
            batch, length, 3 * self.heads, units // self.heads))
        query, key, value = F.split_axis(
            F.transpose(h, (0, 2, 1, 3)), 3, axis=1)
        scores = F.matmul(query, key, transb=True) * (
            units // self.heads) ** -0.5
        # Added to the scores: what comes later counts for nothing.
        future = self.xp.triu(
            self.xp.full((length, length), -1e9, x.dtype), 1)
        h = F.matmul(F.softmax(scores + future, axis=3), value)
        h = F.reshape(F.transpose(h, (0, 2, 1, 3)), x.shape)
        return self.outputs(h, n_batch_axes=2)


def dense(inputs, outputs):
    """A dense layer with the initial values of GPT-2."""
    return L.Linear(inputs, outputs, initialW=Normal(0.02))


def everywhere(link, x):
    """What a link makes of each place of each text."""
    h = link(F.reshape(x, (-1, x.shape[-1])))
    return F.reshape(h, (*x.shape[:-1], -1))


def parse():
    parser = common.make_parser(__doc__, 'language', 1, 32, 3e-3)
    common.add_counts(
        parser,
        ('pipeline', 2 - MPI.COMM_WORLD.size % 2,
         'ranks that share a model, a divisor of all'),
        ('characters', 300_000, 'of both texts together'),
        ('length', 64, 'characters that the model sees'),
        ('units', 128, 'width of the layers'), ('layers', 4, 'blocks'),
        ('heads', 4, 'of each attention'))
    return common.parse(parser)


def main():
    options = parse()
    grid = ProcessGrid(MPI.COMM_WORLD, options.pipeline)
    train_set, test_set = common.texts(options.characters, options.length)
    updates = len(train_set) * options.epoch // options.batchsize
    with deferred(seed=options.seed):       # nothing is allocated
        model = Decoder(256, options.length, options.units, options.layers,
                        options.heads)
    size = options.batchsize // (MICRO_BATCHES * grid.replicas)
    model = partition(model, concat_examples(train_set[:size]), grid,
                      micro_batches=MICRO_BATCHES)
    common.say(model)

    optimizer = chainer.optimizers.Adam(options.lr)
    if grid.replicas > 1:
        comm = create_communicator('fp8', grid.data, warmup=updates // 20)
        optimizer = chainermn.create_multi_node_optimizer(optimizer, comm)
    optimizer.setup(model)
    optimizer.add_hook(chainer.optimizer_hooks.GradientClipping(1.0))

    iterator = ReplicaIterator(train_set, options.batchsize, grid=grid,
                               seed=options.seed)
    updater = PipelineUpdater(iterator, optimizer, grid,
                              micro_batches=MICRO_BATCHES, seed=options.seed)
    trainer = training.Trainer(updater, (options.epoch, 'epoch'), options.out)
    trainer.extend(common.follow_cosine(options.lr, updates, 'alpha', 0.1),
                   trigger=(1, 'iteration'))
    iterator = ReplicaIterator(test_set[:TEXTS], options.batchsize, grid=grid,
                               repeat=False, shuffle=False)
    evaluator = extensions.Evaluator(iterator, model,
                                     eval_func=updater.evaluate)
    if grid.replicas > 1:
        evaluator = chainermn.create_multi_node_evaluator(evaluator, comm)
    trainer.extend(evaluator)
    common.run(trainer, grid, options,
               ['main/loss', 'validation/main/loss'])

    save_whole_model(os.path.join(options.out, 'model.npz'), model, grid)
    if grid.comm.rank == 0:
        loss = float(trainer.observation['validation/main/loss'])
        print(f'{loss / math.log(2):.2f} bits per character of text that it '
              f'has not seen (at first 8), after {trainer.elapsed_time:.0f} s '
              f'on {grid.stages} stages x {grid.replicas} replicas')


if __name__ == '__main__':
    main()
