"""A way to run a job: layout, schedule, codec, algorithm, overlap."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...pipeline.schedules import make_schedule
from ..partition.partition_plan import PartitionPlan, load_plan
from ..sizes import counted

#: What a codec does to a mean, by the communicator's name.
ACCURACY = {'float32': 'exact', 'float16': 'near-exact', 'fp8': 'near-exact',
            'int5': 'near-exact', 'int4': 'near-exact', 'naive': 'exact'}
#: Those whose exchanges are predicted; ChainerMN's naive is only tried.
CODECS = tuple(ACCURACY)[:-1]
#: Those that are chosen from unless a user names others.
USUAL_CODECS = 'float32', 'float16', 'fp8'
#: What a configuration may say.
_CHOICES: dict[str, tuple[Any, ...]] = {
    'codec': tuple(ACCURACY),
    'algorithm': ('direct', 'ring', 'torus2d', 'mpi_op'),
    'overlap': (False, True, 'next_forward')}


@dataclass(frozen=True)
class Configuration:
    """A way to run a job.

    Attributes:
        replicas: Of the model, each on ``stages`` ranks.
        stages: Ranks of a pipeline.
        micro_batches: Into how many each pipeline cuts its share of a batch;
            1 without a pipeline.
        cut: Where the model is cut, with the schedule; None without a
            pipeline.
        codec: Name of the replicas' communicator.
        algorithm: Of its all-reduce.
        overlap: As the communicator's option.
        options: Further options of the communicator.
    """

    replicas: int = 1
    stages: int = 1
    micro_batches: int = 1
    cut: PartitionPlan | None = None
    codec: str = 'float32'
    algorithm: str = 'direct'
    overlap: bool | str = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def schedule(self) -> str:
        """Name of the pipeline's schedule; '' without a pipeline."""
        return self.cut.schedule if self.cut else ''

    def communicator_options(self) -> dict[str, Any]:
        """What the communicator is given beside its name."""
        if self.codec == 'naive':
            return dict(self.options)
        given: dict[str, Any] = {'algorithm': self.algorithm, **self.options}
        if self.overlap:
            given['overlap'] = self.overlap
        return given

    def __str__(self) -> str:
        parts = []
        if self.stages > 1:
            again = self.cut is not None and any(self.cut.recompute)
            parts.append(
                f'{self.stages} stages x {self.replicas}, '
                f'{counted(self.micro_batches, "micro-batch")}'
                + f', {self.schedule}' * bool(self.cut)
                + ', recomputing' * again)
        else:
            parts.append(f'{self.replicas} replicas'
                         if self.replicas > 1 else 'one rank')
        if self.replicas > 1:
            overlap = {True: 'overlapped',
                       'next_forward': 'waiting in the next forward'}
            parts.append(' '.join([
                self.codec, *[self.algorithm][:self.codec != 'naive'],
                *(f'{name}={_said(value)}'
                  for name, value in sorted(self.options.items()))]))
            if self.overlap:
                parts.append(overlap[self.overlap])
        return ', '.join(parts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; :func:`configuration_of` reads it."""
        found = asdict(self)
        found['cut'] = self.cut.as_dict() if self.cut else None
        return found


def simplicity(way: Configuration) -> tuple:
    """A key by which exact ways come first, and of these the simplest."""
    exact = way.replicas == 1 or ACCURACY[way.codec] == 'exact'
    return (not exact, (False, True, 'next_forward').index(way.overlap)
            + 3 * (way.stages > 1), way.codec != 'naive', way.stages,
            way.algorithm != 'direct')


def configuration_of(data: Mapping[str, Any]) -> Configuration:
    """Reads what :meth:`Configuration.as_dict` gave, and checks it.

    Raises:
        ValueError: The parts contradict each other, or one is no value.
    """
    cut = load_plan(data['cut']) if data['cut'] else None
    options = {name: tuple(value) if isinstance(value, list) else value
               for name, value in data['options'].items()}
    found = Configuration(**{**data, 'cut': cut, 'options': options})
    for name in 'replicas', 'stages', 'micro_batches':
        value = getattr(found, name)
        if type(value) is not int or value < 1:
            raise ValueError(f'{name} must be a number of at least 1, not '
                             f'{value!r}')
    for name, known in _CHOICES.items():
        value = getattr(found, name)
        if value not in known:
            raise ValueError(f'{name} must be one of '
                             f'{", ".join(map(repr, known))}, not {value!r}')
    if (found.stages > 1) != (cut is not None):
        raise ValueError(f'{found.stages} stages need '
                         + ('a cut' if found.stages > 1 else 'no cut'))
    if cut is not None and (cut.stages != found.stages
                            or cut.micro_batches != found.micro_batches):
        raise ValueError(
            f'the cut is for {cut.stages} stages and {cut.micro_batches} '
            f'micro-batches, the plan for {found.stages} and '
            f'{found.micro_batches}')
    if cut is not None:         # which must be possible
        make_schedule(cut.schedule, cut.stages, cut.micro_batches, cut.chunks)
    return found


def _said(value: Any) -> str:
    return ('x'.join(map(str, value)) if isinstance(value, (list, tuple))
            else str(value))
