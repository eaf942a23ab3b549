"""What an update would take if each rank had a host of its own."""
from chainer_fp8pipe.planner.forecast import Forecast
from chainer_fp8pipe.planning.job.configuration import CODECS

# Elements and parameters of ResNet-50.
_LARGE = 25_500_000, 161
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
        print(f'Measuring the model and the codecs (some 5 s), to predict '
              f'updates on {comm.size} hosts with {gbit:g} Gbit/s', flush=True)
    codecs = {'float32', 'fp8'} | {
        name for name, _ in communicators.values()} & set(CODECS)
    forecast = Forecast(comm, model, batch, rate=gbit * 1e9 / 8 * _USED,
                        optimizer=optimizer, codecs=sorted(codecs))
    steps = {run: forecast.step(name, **options)
             for run, (name, options) in communicators.items()}
    return ({run: step and 1000 * step.seconds.value
             for run, step in steps.items()},
            {name: 1000 * forecast.exchange(name, *_LARGE)
             for name in ('float32', 'fp8')})
