"""Deep Q-learning: an own loop, a target network, a memory of steps."""
from __future__ import print_function

import argparse
import collections
import copy
import os
import random

import chainer
import chainer.functions as F
import chainer.links as L
import numpy as np


class QFunction(chainer.Chain):
    def __init__(self, obs_size, n_actions, n_units=16):
        super(QFunction, self).__init__(
            l0=L.Linear(obs_size, n_units),
            l1=L.Linear(n_units, n_actions))

    def __call__(self, x):
        return self.l1(F.relu(self.l0(x)))


class Corridor(object):
    """Right is good."""

    def reset(self):
        self.at = 2
        return self.observe()

    def observe(self):
        return np.eye(6)[self.at].astype(np.float32)

    def step(self, action):
        self.at = min(max(self.at + (1 if action else -1), 0), 5)
        return (self.observe(), float(self.at == 5), self.at in (0, 5), {})


class DQN(object):
    def __init__(self, n_obs, n_actions):
        self.q = QFunction(n_obs, n_actions)
        self.target_q = copy.deepcopy(self.q)
        self.optimizer = chainer.optimizers.RMSpropGraves(
            lr=0.01, alpha=0.95, momentum=0.0)
        self.optimizer.setup(self.q)
        self.memory = collections.deque(maxlen=1000)

    def act(self, obs, epsilon):
        if np.random.rand() < epsilon:
            return np.random.randint(2)
        with chainer.no_backprop_mode():
            return int(np.argmax(self.q(obs[None]).data))

    def update(self):
        batch = random.sample(list(self.memory), 8)
        obs, action, reward, next_obs, done = (
            np.asarray(column) for column in zip(*batch))
        y = F.select_item(self.q(obs), action.astype(np.int32))
        with chainer.no_backprop_mode():
            best = F.max(self.target_q(next_obs), axis=1).data
        t = (reward + 0.9 * (1 - done) * best).astype(np.float32)
        loss = F.mean(F.huber_loss(y[:, None], t[:, None], 1.0))
        self.q.cleargrads()
        loss.backward()
        self.optimizer.update()
        return float(loss.data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument('--episodes', type=int, default=20)
    parser.add_argument('--outdir', default='result')
    args = parser.parse_args()
    random.seed(0)
    np.random.seed(0)
    if not os.path.exists(args.outdir):
        os.makedirs(args.outdir)
    env, agent, step = Corridor(), DQN(6, 2), 0
    for episode in range(args.episodes):
        obs, done, R, loss = env.reset(), False, 0, None
        while not done:
            action = agent.act(obs, 0.5)
            next_obs, reward, done, _ = env.step(action)
            agent.memory.append((obs, action, reward, next_obs, done))
            obs, R, step = next_obs, R + reward, step + 1
            if len(agent.memory) >= 16:
                loss = agent.update()
            if step % 20 == 0:
                agent.target_q.copyparams(agent.q)
        print('episode:', episode, 'R:', R, 'loss:', loss)
    chainer.serializers.save_npz(
        os.path.join(args.outdir, 'model.npz'), agent.q)


if __name__ == '__main__':
    main()
