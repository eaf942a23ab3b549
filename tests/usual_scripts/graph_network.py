"""A graph network on molecules, with ChainerMN: atoms and bonds in arrays."""
import argparse

import chainer
import chainer.functions as F
import chainer.links as L
import chainermn
import numpy
from chainer import training
from chainer.training import extensions


class GGNNUpdate(chainer.Chain):
    def __init__(self, hidden_channels, num_edge_type=2):
        super(GGNNUpdate, self).__init__()
        with self.init_scope():
            self.message = L.Linear(
                hidden_channels, num_edge_type * hidden_channels)
            self.update_layer = L.GRU(2 * hidden_channels, hidden_channels)
        self.num_edge_type = num_edge_type

    def __call__(self, h, adj):
        mb, atom, ch = h.shape
        m = F.reshape(self.message(F.reshape(h, (mb * atom, ch))),
                      (mb, atom, ch, self.num_edge_type))
        m = F.transpose(m, (0, 3, 1, 2))
        m = F.sum(F.matmul(adj, m), axis=1)
        out = self.update_layer(F.concat(
            (F.reshape(h, (mb * atom, ch)), F.reshape(m, (mb * atom, ch))),
            axis=1))
        return F.reshape(out, (mb, atom, ch))

    def reset_state(self):
        self.update_layer.reset_state()


class GGNN(chainer.Chain):
    def __init__(self, out_dim=1, hidden_channels=8, n_layers=2):
        super(GGNN, self).__init__()
        with self.init_scope():
            self.embed = L.EmbedID(10, hidden_channels)
            self.update_layers = GGNNUpdate(hidden_channels)
            self.i_layer = L.Linear(2 * hidden_channels, out_dim)
        self.n_layers = n_layers

    def __call__(self, atom_array, adj):
        self.update_layers.reset_state()
        h = h0 = self.embed(atom_array)
        for _ in range(self.n_layers):
            h = self.update_layers(h, adj)
        g = self.i_layer(F.concat((h, h0), axis=2), n_batch_axes=2)
        return F.sum(g, axis=1)


class Regressor(chainer.Chain):
    def __init__(self, predictor):
        super(Regressor, self).__init__()
        with self.init_scope():
            self.predictor = predictor

    def __call__(self, *args):
        x, t = args[:-1], args[-1]
        loss = F.mean_squared_error(self.predictor(*x), t)
        chainer.report({'loss': loss}, self)
        return loss


def molecules(n):
    rand = numpy.random.RandomState(0)
    for _ in range(n):
        atoms = rand.randint(1, 10, 5).astype(numpy.int32)
        adj = rand.randint(0, 2, (2, 5, 5)).astype(numpy.float32)
        adj = numpy.maximum(adj, adj.transpose(0, 2, 1))
        yield atoms, adj, numpy.array([adj.sum() / 10], numpy.float32)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--batchsize', '-b', type=int, default=16)
    parser.add_argument('--communicator', default='naive')
    parser.add_argument('--out', '-o', default='result')
    args = parser.parse_args()
    comm = chainermn.create_communicator(args.communicator)
    numpy.random.seed(0)
    model = Regressor(GGNN())
    optimizer = chainermn.create_multi_node_optimizer(
        chainer.optimizers.Adam(0.01), comm)
    optimizer.setup(model)
    data = list(molecules(24)) if comm.rank == 0 else None
    train = chainermn.scatter_dataset(data and data[:16], comm)
    test = chainermn.scatter_dataset(data and data[16:], comm)
    train_iter = chainer.iterators.SerialIterator(
        train, args.batchsize // comm.size, shuffle=False)
    test_iter = chainer.iterators.SerialIterator(
        test, 4, repeat=False, shuffle=False)
    updater = training.StandardUpdater(train_iter, optimizer, device=-1)
    trainer = training.Trainer(updater, (6, 'epoch'), out=args.out)
    trainer.extend(chainermn.create_multi_node_evaluator(
        extensions.Evaluator(test_iter, model, device=-1), comm))
    if comm.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(extensions.PrintReport(
            ['epoch', 'main/loss', 'validation/main/loss']))
        trainer.extend(extensions.snapshot_object(
            model, 'model.npz'), trigger=(6, 'epoch'))
    trainer.run()


if __name__ == '__main__':
    main()
