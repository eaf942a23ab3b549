"""Vectors, tables, graphs, and everything else that a chain may do."""
from __future__ import annotations

import copy

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np
from chainer import Chain, ChainList, Parameter, report

from .inputs import (
    Case,
    adjacency,
    arrays,
    floats,
    integers,
    keywords,
    net,
    some,
)


@net(lambda units=16: dict(
    l1=L.Linear(None, units), l2=L.Linear(None, units),
    l3=L.Linear(None, units), l4=L.Linear(None, 10)))
def SkipMLP(self, x):
    """Skips of different reach: h3 sees the input, the output sees h1."""
    h1 = F.relu(self.l1(x))
    h2 = F.relu(self.l2(h1))
    h3 = F.relu(self.l3(F.concat((h2, x))))
    return self.l4(h1 + h3)


class Layers(ChainList):
    """A list of layers, by index and in a loop."""

    def __init__(self, *widths):
        super().__init__()
        for width in widths:
            self.add_link(L.Linear(None, width))

    def __call__(self, x):
        for layer in self[:-1]:
            x = F.sigmoid(layer(x))
        return self[len(self) - 1](x)


@net(lambda units=16, layers=4: dict(
    first=L.Linear(None, units),
    highways=L.Highway(units, activate=F.tanh).repeat(layers),
    last=L.Linear(units, 10)))
def HighwayNet(self, x):
    return self.last(self.highways(self.first(x)))


@net(lambda: dict(m1=L.Maxout(12, 16, 3), m2=L.Maxout(16, 10, 2)))
def MaxoutNet(self, x):
    return self.m2(F.dropout(self.m1(x), .2))


@net(lambda n_in=12, n_out=10, experts=4: dict(
    gate=L.Linear(n_in, experts),
    experts=ChainList(*[chainer.Sequential(L.Linear(n_in, 16), F.relu,
        L.Linear(16, n_out)) for _ in range(experts)])))
def Experts(self, x, t):
    """Every expert answers, a gate says how much of it counts."""
    gate = F.softmax(self.gate(x))
    answers = F.stack([expert(x) for expert in self.experts], axis=1)
    weights = F.broadcast_to(gate[..., None], answers.shape)
    y = F.sum(weights * answers, axis=1)
    load = F.mean(gate, axis=0)
    balance = F.sum(load * load) * len(self.experts)
    loss = F.softmax_cross_entropy(y, t)
    report({'loss': loss, 'balance': balance,
            'accuracy': F.accuracy(y, t)}, self)
    return loss + .01 * balance


@net(lambda n_in=12, experts=3: dict(
    gate=L.Linear(n_in, experts), experts=L.Linear(n_in, 10).repeat(experts)))
def SparseExperts(self, x):
    """Only the expert that the gate prefers runs; a loop of masks."""
    gate = F.softmax(self.gate(x))
    chosen = gate.array.argmax(axis=1)
    parts, rows = [], []
    for i, expert in enumerate(self.experts):
        mine, = np.nonzero(chosen == i)
        if len(mine):
            weight = F.broadcast_to(gate[mine, i:i + 1],
                                    (len(mine), 10))
            parts.append(weight * expert(x[mine]))
            rows.append(mine)
    back = np.argsort(np.concatenate(rows)).astype('i')
    return F.permutate(F.concat(parts, axis=0), back)


@net(lambda atoms=8, units=12, layers=3: dict(
    layers=layers, embed=L.EmbedID(atoms, units, ignore_label=-1),
    neighbour=L.Linear(units, units), itself=L.Linear(units, units),
    update=L.StatelessGRU(units, units), readout=L.Linear(units, 1)))
def Graph(self, atoms, adjacency, target):
    """Graph convolution by adjacency matrix, then a sum over nodes."""
    n, nodes = atoms.shape
    h = self.embed(atoms)
    for _ in range(self.layers):
        messages = F.matmul(adjacency,
                            self.neighbour(h, n_batch_axes=2))
        messages = F.relu(messages + self.itself(h, n_batch_axes=2))
        h = self.update(F.reshape(h, (n * nodes, -1)),
                        F.reshape(messages, (n * nodes, -1)))
        h = F.reshape(h, (n, nodes, -1))
    y = F.reshape(self.readout(F.sum(h, axis=1)), (n,))
    loss = F.mean_squared_error(y, target)
    report({'loss': loss, 'mae': F.mean_absolute_error(y, target)}, self)
    return loss


@net(lambda n_in=6, units=8, heads=2: dict(
    W=ChainList(*(L.Linear(n_in, units, nobias=True) for _ in range(heads))),
    a=ChainList(*(L.Linear(units, 2) for _ in range(heads))),
    out=L.Linear(heads * units, 3)))
def GraphAttention(self, x, adjacency, label):
    outputs = []
    for W, a in zip(self.W, self.a, strict=True):
        h = W(x, n_batch_axes=2)
        source, target = F.separate(a(h, n_batch_axes=2), axis=2)
        e = F.leaky_relu(F.expand_dims(source, 2)
                         + F.expand_dims(target, 1))
        e = F.where(adjacency > 0, e, self.xp.full(e.shape, -1e4, 'f'))
        outputs.append(F.elu(F.matmul(F.softmax(e, axis=2), h)))
    y = self.out(F.max(F.dstack(outputs), axis=1))
    return F.softmax_cross_entropy(y, label)


@net(lambda units=12: dict(
    inward=L.Linear(12, units), step=L.Linear(units, units),
    out=L.Linear(units, 10)))
def ThinkingTime(self, x):
    """More iterations when it is tested than when it is trained."""
    h = start = self.inward(x)
    for _ in range(2 if chainer.config.train else 5):
        h = F.tanh(start + self.step(h))
    return self.out(h)


@net(lambda units=12: dict(
    inward=L.Linear(12, units), cell=L.StatelessGRU(units, units),
    halt=L.Linear(units, 1, initial_bias=-.5), out=L.Linear(units, 10)))
def Halting(self, x, t):
    """It goes on until it says that it is sure, at most four times."""
    e = F.tanh(self.inward(x))
    h = e
    sure = self.xp.zeros((len(x), 1), 'f')
    answer = ponder = 0
    for _ in range(4):
        h = self.cell(h, e)
        p = F.sigmoid(self.halt(h)) * (1 - sure)
        answer += F.broadcast_to(p, (len(x), 10)) * self.out(h)
        sure = sure + p
        ponder += F.mean(1 - sure)
        if sure.array.min() > .9:
            break
    loss = F.softmax_cross_entropy(answer, t) + .01 * ponder
    report({'loss': loss, 'ponder': ponder}, self)
    return loss


class Normaliser(chainer.Link):
    """Running statistics of the input, which are saved with the model."""

    def __init__(self, size):
        super().__init__()
        self.add_persistent('mean', np.zeros(size, 'f'))
        self.add_persistent('var', np.ones(size, 'f'))
        self.count = 0
        self.register_persistent('count')

    def forward(self, x):
        if chainer.config.train:
            self.count += 1
            rate = max(1 / self.count, .05)
            self.mean += rate * (x.mean(axis=0) - self.mean)
            self.var += rate * (x.var(axis=0) - self.var)
        return (x - self.mean) / self.xp.sqrt(self.var + 1e-2)


@net(lambda size=12: dict(
    norm=Normaliser(size), l1=L.Linear(size, 16), l2=L.Linear(16, 2)))
def Regression(self, x, t):
    """Running statistics that are no parameters; operators as loss."""
    y = self.l2(F.tanh(self.l1(self.norm(x))))
    error = (y - t) ** 2
    return F.sum(error) / error.size


@net(lambda size=6: dict(
    w=Parameter(chainer.initializers.Normal(1), (size,)),
    a=Parameter(np.array(.5, 'f')), b=Parameter(np.array(0, 'f'))))
def Arithmetic(self, x, t):
    """No link at all: parameters, operators, and ``xp``."""
    xp = self.xp
    features = xp.where(x > 0, x, .1 * x)
    w = abs(self.w) / F.broadcast_to(F.sum(abs(self.w)), self.w.shape)
    y = F.sum(features * F.broadcast_to(w, x.shape), axis=1)
    y = F.broadcast_to(self.a, y.shape) * y - F.broadcast_to(
        self.b, y.shape)
    loss = (y - t) ** 2
    loss = loss / (1 + loss)
    self.y = y
    report({'y': xp.mean(y.array), 'above': (y.array > t).mean()}, self)
    return F.mean(loss)


@net(lambda units=16: dict(
    l1=L.Linear(12, units), bn=L.BatchNormalization(units),
    l2=L.Linear(units, units), ln=L.LayerNormalization(),
    l3=L.Linear(units, units),
    brn=L.BatchRenormalization(units, rmax=2, dmax=1),
    l4=L.Linear(units, units), gn=L.GroupNormalization(4),
    out=L.Linear(units, 10)))
def DropoutAndNorms(self, x):
    """Every normalisation; dropout between them."""
    h = F.dropout(F.relu(self.bn(self.l1(x))))
    h = F.dropout(F.relu(self.ln(self.l2(h))), ratio=.25)
    h = F.relu(self.brn(self.l3(h)))
    h = F.relu(self.gn(self.l4(h)))
    with chainer.using_config('dropout_ratio', .1):
        h = F.dropout(h, chainer.config.dropout_ratio)
    return self.out(h)


class Regularised(Chain):
    """Any predictor, its parameters squared in the loss."""

    def __init__(self, predictor, decay=1e-3):
        super().__init__(predictor=predictor)
        self.decay = decay

    def forward(self, *args):
        *xs, t = args
        y = self.predictor(*xs)
        loss = F.softmax_cross_entropy(y, t)
        squares = sum(F.sum(param ** 2) for name, param
                      in sorted(self.namedparams()) if name[-1] != 'b')
        report({'loss': loss, 'squares': squares}, self)
        return loss + self.decay * squares


@net(lambda n_in=4, units=12: dict(
    phi=chainer.Sequential(L.Linear(n_in, units), F.relu, L.Linear(units,
        units)), rho=L.Linear(2 * units, 3)))
def DeepSets(self, elements, label):
    """A function of the set: elements by one link, then sum and max."""
    n, count, size = elements.shape
    h = self.phi(elements.reshape(n * count, size))
    h = F.reshape(h, (n, count, -1))
    h = F.concat((F.sum(h, axis=1) / count, F.max(h, axis=1)))
    return F.softmax_cross_entropy(self.rho(h), label)


@net(lambda features=30, size=6: dict(
    w=L.EmbedID(features, 1),
    v=L.EmbedID(features, size, initialW=chainer.initializers.Normal(.3)),
    bias=L.Bias(axis=0, shape=())))
def FactorisationMachine(self, ids, t):
    v = self.v(ids)
    pairs = F.sum(F.square(F.sum(v, 1)) - F.sum(F.square(v), 1), 1)
    y = self.bias(F.sum(self.w(ids), axis=(1, 2)) + .5 * pairs)
    loss = F.sigmoid_cross_entropy(y, t)
    report({'loss': loss, 'accuracy': F.binary_accuracy(y, t)}, self)
    return loss


class WideAndDeep(Chain):
    """A dict of features; some columns are embedded, some are missing."""

    def __init__(self, sizes):
        super().__init__()
        self.sizes = sizes
        with self.init_scope():
            self.wide = L.Linear(4, 1)
            self.deep = Layers(16, 8, 1)
        for name, size in sizes.items():
            with self.init_scope():
                setattr(self, f'embed_{name}',
                        L.EmbedID(size, 4, ignore_label=-1))

    def forward(self, *, clicked, numbers, **columns):
        parts = [chainer.as_variable(numbers)]
        for name in self.sizes:
            parts.append(self[f'embed_{name}'](columns[name]))
        y = self.wide(numbers) + self.deep(F.concat(parts))
        return F.sigmoid_cross_entropy(y, clicked[:, None])


@net(lambda n_in=6, n_out=4, condition=3: dict(
    n_out=n_out, make=L.Linear(condition, n_in * n_out),
    last=L.Linear(n_out, 3)))
def HyperNetwork(self, x, condition, label):
    """The weights of a layer are what another one returns."""
    n, n_in = x.shape
    W = self.make(condition).reshape(n, self.n_out, n_in)
    h = F.matmul(W, x[:, :, None]).reshape(n, self.n_out)
    return F.softmax_cross_entropy(self.last(F.tanh(h)), label)


class DeepQ(Chain):
    """A second network, a copy, says what the first one should."""

    def __init__(self, n_in=6, actions=3):
        super().__init__()
        q = chainer.Sequential(L.Linear(n_in, 16), F.relu)
        with self.init_scope():
            self.q = q
            self.advantage = L.Linear(16, actions)
            self.value = L.Linear(16, 1)
            self.target = chainer.Sequential(
                copy.deepcopy(q), L.Linear(16, actions))

    def q_values(self, x):
        h = self.q(x)
        advantage, value = F.broadcast(self.advantage(h), self.value(h))
        mean = F.mean(advantage, axis=1, keepdims=True)
        return value + advantage - F.broadcast_to(mean, advantage.shape)

    def forward(self, state, action, reward, after):
        q = F.select_item(self.q_values(state), action)
        with chainer.no_backprop_mode():
            best = F.max(self.target(after), axis=1)
        wanted = reward + .9 * best.array
        loss = F.mean(F.huber_loss(q, wanted, 1., reduce='no'))
        report({'loss': loss, 'q': F.mean(q)}, self)
        return loss


@net(lambda n_in=6, actions=3: dict(
    body=L.Linear(n_in, 16), pi=L.Linear(16, actions), v=L.Linear(16, 1)))
def ActorCritic(self, state, action, reward):
    """The advantage is a number, not a variable."""
    h = F.tanh(self.body(state))
    log_pi = F.log_softmax(self.pi(h))
    v = F.squeeze(self.v(h), axis=1)
    advantage = reward - v.data
    policy = -F.mean(F.select_item(log_pi, action) * advantage)
    value = F.mean_squared_error(v, reward)
    entropy = -F.mean(F.sum(F.exp(log_pi) * log_pi, axis=1))
    report({'policy': policy, 'value': value, 'entropy': entropy,
            'advantage': float(advantage.mean())}, self)
    return policy + .5 * value - .01 * entropy


class Distilled(Chain):
    """A teacher that is not trained, and runs as if in a test."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.teacher = chainer.Sequential(
                L.Linear(12, 16), L.BatchNormalization(16), F.dropout,
                L.Linear(16, 10))
            self.student = Layers(12, 10)
        self.teacher.disable_update()

    def forward(self, x, t):
        with chainer.using_config('train', False), \
                chainer.no_backprop_mode():
            soft = F.softmax(self.teacher(x) / 2.)
        y = self.student(x)
        hard = F.softmax_cross_entropy(y, t)
        match = -F.sum(soft * F.log_softmax(y / 2.)) / len(x)
        report({'hard': hard, 'match': match}, self)
        return hard + match


class Forgetful(Chain):
    """The middle is computed again in backward: ``F.forget``."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.l1 = L.Linear(12, 16)
            self.l2 = L.Linear(16, 16)
            self.l3 = L.Linear(16, 16)
            self.l4 = L.Linear(16, 10)

    def middle(self, h):
        return F.relu(self.l3(F.relu(self.l2(h))))

    def forward(self, x):
        return self.l4(F.forget(self.middle, F.relu(self.l1(x))))


class Frozen(Chain):
    """Half of it is not updated: cut by ``.array``, and by switch."""

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.features = L.Linear(12, 16)
            self.middle = L.Linear(16, 16)
            self.head = L.Linear(16, 10)
        self.middle.disable_update()

    def forward(self, x):
        h = F.relu(self.features(x)).array
        return self.head(F.relu(self.middle(h)))


class Methods(Chain):
    """A loss as a chain of its own; links are used by their methods."""

    class Body(Chain):
        def __init__(self):
            super().__init__()
            with self.init_scope():
                self.encode_ = L.Linear(12, 8)
                self.classify_ = L.Linear(8, 10)
                self.rebuild_ = L.Linear(8, 12)

        def encode(self, x):
            return F.selu(self.encode_(x))

        def classify(self, h):
            return self.classify_(h)

        def rebuild(self, h):
            return self.rebuild_(h)

    def __init__(self):
        super().__init__()
        with self.init_scope():
            self.body = self.Body()
            # Learned, of the two losses (Kendall et al. 2018).
            self.log_var = Parameter(0., (2,))
        self.compute_accuracy = True

    def forward(self, x, t):
        h = self.body.encode(x)
        y = self.body.classify(h)
        losses = F.stack([
            F.softmax_cross_entropy(y, t),
            F.mean_squared_error(self.body.rebuild(h), x)])
        total = F.sum(F.exp(-self.log_var) * losses + self.log_var)
        if self.compute_accuracy:
            report({'accuracy': F.accuracy(y, t)}, self)
        report({'loss': total}, self)
        return total


@net(lambda: dict(
    left=L.Linear(12, 4), right=L.Linear(12, 5),
    bilinear=L.Bilinear(4, 5, 6, nobias=True),
    centres=Parameter(chainer.initializers.Normal(1.), (4, 6))))
def OuterProduct(self, x, t):
    """Bilinear of two views of x, a covariance, and a hinge."""
    h = self.bilinear(self.left(x), self.right(x))
    a, b = F.broadcast(h[:, None], self.centres[None])
    y = -F.sum((a - b) ** 2, axis=2)
    loss = F.hinge(y, t)
    # About the batch as a whole, so it differs in a micro-batch.
    return loss + .01 * F.cross_covariance(h[:, :3], h[:, 3:])


class SharedParameters(Chain):
    """One link under two names, one parameter in two links."""

    def __init__(self, units=12):
        super().__init__()
        with self.init_scope():
            self.a = L.Linear(units, units)
            self.b = self.a
            self.c = L.Linear(units, units)
            self.c.W = self.a.W
            self.out = L.Linear(units, 10)

    def forward(self, x):
        return self.out(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))))


class Moving(Chain):
    """Predicts from an average of what it computed in earlier updates."""

    def __init__(self, units=8):
        super().__init__()
        with self.init_scope():
            self.embed = L.Linear(6, units)
            self.out = L.Linear(units, 3)
        self.add_persistent('average', np.zeros(units, 'f'))

    def forward(self, x, t):
        h = F.tanh(self.embed(x))
        if chainer.config.train:
            self.average[...] *= .9
            self.average[...] += .1 * h.array.mean(axis=0)
        centred = h - self.xp.broadcast_to(self.average, h.shape)
        return F.softmax_cross_entropy(self.out(centred), t)


@net(lambda units=12, layers=4: dict(
    # Names of a Sequential's layers are not in their order.
    blocks=ChainList(*L.Linear(units, units).repeat(layers)),
    out=L.Linear(units, 10)))
def LayerDrop(self, x):
    """Stochastic depth: a coin says which of the layers run."""
    h = x
    for block in self.blocks:
        if not chainer.config.train:
            h = h + .5 * F.relu(block(h))
        elif np.random.rand() < .5:
            h = h + F.relu(block(h))
    return self.out(h)


@net(lambda: dict(
    l1=L.Linear(12, 16), l2=L.Linear(16, 4),
    class_weight=np.array([1, 2, .5, 1], 'f')))
def Weighted(self, x, t, weight):
    """Some labels are missing; a class weight; a sample weight."""
    y = self.l2(F.relu(self.l1(x)))
    loss = F.softmax_cross_entropy(
        y, t, class_weight=self.class_weight, ignore_label=-1,
        reduce='no')
    return F.average(loss, weights=chainer.as_variable(
        np.abs(weight) + np.float32(.1)))


_LABELLED = arrays(floats(12), integers(10))
_GRAPHS = {'atoms': integers(8, 6), 'adjacency': adjacency(6),
           'target': floats()}

CASES = [
    Case('skip_mlp', lambda: L.Classifier(SkipMLP()), _LABELLED),
    Case('chain_list', lambda: L.Classifier(Layers(16, 16, 10)), _LABELLED),
    Case('highway', lambda: L.Classifier(HighwayNet()), _LABELLED),
    Case('maxout', lambda: L.Classifier(MaxoutNet()), _LABELLED, draws=True),
    Case('experts', Experts, _LABELLED),
    # A micro-batch may choose fewer experts than the batch.
    Case('sparse_experts', lambda: L.Classifier(SparseExperts()), _LABELLED,
         samples=16),
    Case('graph', Graph, keywords(**_GRAPHS)),
    Case('graph_attention', GraphAttention,
         arrays(floats(5, 6), adjacency(5), integers(3))),
    Case('thinking_time', lambda: L.Classifier(ThinkingTime()), _LABELLED),
    Case('halting', Halting, _LABELLED),
    # The input's running statistics.
    Case('regression', Regression, arrays(floats(12), floats(2)),
         stateful=True),
    Case('arithmetic', Arithmetic, arrays(floats(6), floats())),
    # Batch renormalisation trains by its running statistics.
    Case('dropout_and_norms', lambda: L.Classifier(DropoutAndNorms()),
         _LABELLED, draws=True, stateful=True),
    Case('regularised', lambda: Regularised(Layers(16, 10)), _LABELLED),
    Case('deep_sets', DeepSets, arrays(floats(5, 4), integers(3))),
    Case('factorisation_machine', FactorisationMachine,
         arrays(integers(30, 4), integers(2))),
    Case('wide_and_deep', lambda: WideAndDeep({'user': 9, 'item': 7}),
         keywords(numbers=floats(4), user=some(9), item=integers(7),
                  clicked=integers(2))),
    Case('hyper_network', HyperNetwork,
         arrays(floats(6), floats(3), integers(3))),
    Case('deep_q', DeepQ,
         arrays(floats(6), integers(3), floats(), floats(6))),
    Case('actor_critic', ActorCritic,
         arrays(floats(6), integers(3), floats())),
    Case('distilled', Distilled, _LABELLED),
    Case('forgetful', lambda: L.Classifier(Forgetful()), _LABELLED),
    Case('frozen', lambda: L.Classifier(Frozen()), _LABELLED),
    Case('methods', Methods, _LABELLED),
    Case('bilinear', OuterProduct, arrays(floats(12), integers(4))),
    Case('shared_parameters', lambda: L.Classifier(SharedParameters()),
         _LABELLED),
    Case('moving_average', Moving, arrays(floats(6), integers(3)),
         stateful=True),
    Case('layer_drop', lambda: L.Classifier(LayerDrop()), _LABELLED,
         draws=True),
    Case('weighted', Weighted,
         arrays(floats(12), some(4), floats())),
]
