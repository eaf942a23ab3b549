"""The digits in float32, fp8 and int4, for demo.py: OUT PERCENT."""
import argparse
import json
import os
import sys

import common
import train_digits
from chainer.training import extensions
from mpi4py import MPI

COMM = MPI.COMM_WORLD
_ACCURACY = 'validation/main/accuracy'


def train(name, out, percent):
    """Trains until so many of the test images are right; what it took."""
    sys.argv[1:] = ['--communicator', name, '--network', 'dense',
                    '--batchsize', '24', '--lr', '0.2', '--epoch', '16',
                    '--warmup', '4', '--out', os.path.join(out, name)]
    options = train_digits.parse()
    trainer, comm = train_digits.make_trainer(options)

    def is_over(trainer):
        if not trainer.updater.is_new_epoch:
            return False
        good = 100 * trainer.observation.get(_ACCURACY, 0) >= percent
        return trainer.updater.epoch >= options.epoch or COMM.bcast(good)
    trainer.stop_trigger = is_over
    if COMM.rank == 0:
        trainer.extend(extensions.LogReport())
        trainer.extend(lambda trainer: print('.', end='', flush=True),
                       name='progress', trigger=(1, 'epoch'))
        print(f'{name} on {COMM.size} ranks, a point per epoch ', end='',
              flush=True)
    trainer.run()
    comm.finalize()
    if COMM.rank:
        return None
    last = trainer.get_extension('LogReport').log[-1]
    final, seconds = 100 * last[_ACCURACY], last['elapsed_time']
    print(f' {final:.2f} % after {seconds:.1f} s', flush=True)
    return {'name': name, 'final': final, 'seconds': seconds,
            'bytes': last['comm/bytes'], 'images': len(common.digits()[1])}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('out', help='folder of the runs')
    parser.add_argument('percent', type=float, help='accuracy at the end')
    given = parser.parse_args()
    out = given.out
    runs = [train(name, out, given.percent)
            for name in ('float32', 'fp8', 'int4')]
    if COMM.rank == 0:
        with open(os.path.join(out, 'summary.json'), 'w') as file:
            json.dump(runs, file, indent=1)


if __name__ == '__main__':
    main()
