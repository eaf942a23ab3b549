"""What an update would take if each rank had a host of its own."""
from chainer_fp8pipe.allreduce.plan import ALGORITHMS
from chainer_fp8pipe.planner.example import Example
from chainer_fp8pipe.planner.plan import measure
from chainer_fp8pipe.planner.trials import Trained
from chainer_fp8pipe.planning.choices import Wanted
from chainer_fp8pipe.planning.job_plan import CODECS, Configuration
from chainer_fp8pipe.planning.step import predict as parts_of

# Elements of ResNet-50's parameters.
_LARGE = 25_500_000
# Of a link's bits, those that TCP leaves for messages.
_USED = 0.95


def predict(comm, communicators, model, batch, optimizer, gbit):
    """Measures the model and the codecs; call it on all ranks.

    Args:
        comm: mpi4py's.
        communicators: By run: the communicator's name and its options.
        model: As it is before training, and stays.
        batch: Of one rank.
        optimizer: That will train the model.
        gbit: Gbit/s of a host's link.

    Returns:
        Two dictionaries of milliseconds: an update by run, None where nobody
        knows, and by codec the exchange alone of a model as large as
        ResNet-50.
    """
    if comm.rank == 0:
        print(f'Measuring the model and the codecs (some 10 s), to predict '
              f'updates on {comm.size} hosts with {gbit:g} Gbit/s', flush=True)
    ways = {run: _way(name, options, comm.size)
            for run, (name, options) in communicators.items()}
    codecs = sorted({'float32', 'fp8'} | {
        way.codec for way in ways.values() if way})
    example = Example(batch)
    wanted = Wanted(example.samples * comm.size, None, tuple(codecs), (1,))
    measured = measure(comm, Trained(model, optimizer, example, wanted.batch),
                       wanted, 8.0)
    profile = measured.on_hosts(comm.size, gbit * 1e9 / 8 * _USED)
    alone = {name: profile.exchange(Configuration(comm.size, codec=name)).of(
        _LARGE) if comm.size > 1 else 0.0 for name in ('float32', 'fp8')}

    def milliseconds(way):
        return 1000 * sum(parts_of(profile, wanted.batch, way).values())
    return ({run: way and milliseconds(way) for run, way in ways.items()},
            {name: 1000 * seconds for name, seconds in alone.items()})


def _way(name, options, replicas):
    """The communicator as plans have it; None: they do not."""
    algorithm = options.get('algorithm', 'direct')
    if name not in CODECS or not ALGORITHMS[algorithm].differs(4):
        return None
    return Configuration(replicas, codec=name, algorithm=algorithm,
                         overlap=options.get('overlap', False))
