"""The plan of a job: a way to run it, what that takes, and why no other."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from ..allreduce.plan import ALGORITHMS
from ..codecs import CODECS
from ..pipeline.schedules import make_schedule
from ..report import stored
from ..report.quantities import columns, counted, size
from .partition_plan import PartitionPlan

if TYPE_CHECKING:
    AlgorithmName = str
else:       # plan files are checked by it
    AlgorithmName = Literal[tuple(
        row.name for row in ALGORITHMS.values() if not row.has_servers)]

#: Those of this package that are tried, from the most bytes on.
TRIED = tuple(name for name, row in reversed(CODECS.items())
              if not row.for_study)
#: What a codec does to a mean, by the communicator's name; ChainerMN's naive
#: is tried, but not predicted.
ACCURACY = {**{name: 'exact' if CODECS[name].exact else 'near-exact'
               for name in TRIED}, 'naive': 'exact'}
#: Those that are chosen from unless a user names others.
USUAL_CODECS = 'float32', 'float16', 'fp8'

_KIND = 'plan of a job'
if TYPE_CHECKING:
    CodecName = str
else:
    CodecName = Literal[tuple(ACCURACY)]
_Shape = tuple[int, ...] | None


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

    Raises:
        ValueError: The parts contradict each other.
    """

    replicas: int = 1
    stages: int = 1
    micro_batches: int = 1
    cut: PartitionPlan | None = None
    codec: CodecName = 'float32'
    algorithm: AlgorithmName = next(iter(ALGORITHMS))
    overlap: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_numbers(self, 'replicas', 'stages', 'micro_batches')
        cut = self.cut
        if (self.stages > 1) != (cut is not None):
            raise ValueError(f'{self.stages} stages need '
                             + ('a cut' if self.stages > 1 else 'no cut'))
        if cut is not None and (cut.stages, cut.micro_batches) != (
                self.stages, self.micro_batches):
            raise ValueError(
                f'the cut is for {cut.stages} stages and {cut.micro_batches} '
                f'micro-batches, the plan for {self.stages} and '
                f'{self.micro_batches}')

    @property
    def schedule(self) -> str:
        """Name of the pipeline's schedule; '' without a pipeline."""
        return self.cut.schedule if self.cut else ''

    @property
    def is_exact(self) -> bool:
        """Whether gradients are those of a single process."""
        return self.replicas == 1 or ACCURACY[self.codec] == 'exact'

    def communicator_options(self) -> dict[str, Any]:
        """What the communicator is given beside its name."""
        if self.codec == 'naive':
            return dict(self.options)
        given: dict[str, Any] = {'algorithm': self.algorithm, **self.options}
        if self.overlap:
            given['overlap'] = self.overlap
        return given

    def simplicity(self) -> tuple:
        """A key by which exact ways come first, and of these the simplest."""
        return (not self.is_exact, self.overlap + 2 * (self.stages > 1),
                self.codec != 'naive', self.stages,
                self.algorithm != next(iter(ALGORITHMS)))

    @property
    def exchange(self) -> str:
        """Codec, algorithm and options in words."""
        return ' '.join([
            self.codec, *[self.algorithm][:self.codec != 'naive'],
            *(f'{name}={_said(value)}'
              for name, value in sorted(self.options.items())),
            *[f'overlap={self.overlap!r}'] * bool(self.overlap)])

    def __str__(self) -> str:
        parts = [layout(self.stages, self.replicas)]
        if self.cut is not None:
            parts += [counted(self.micro_batches, 'micro-batch'),
                      self.schedule,
                      *['recomputing'] * any(self.cut.recompute)]
        return ', '.join([*parts, *[self.exchange] * (self.replicas > 1)])


@dataclass(frozen=True)
class Timing:
    """What an update takes in a way to run the job.

    Attributes:
        way: In words.
        seconds: Of an update: the median, where the way was tried, or else
            predicted; 0 where the way is impossible.
        spread: Half of the distance of the quartiles, relative, where the
            way was tried.
        reason: Why the way is impossible; '': it is not.
    """

    way: str
    seconds: float = 0.0
    spread: float = 0.0
    reason: str = ''


@dataclass(frozen=True)
class JobPlan:
    """How a job is to be run.

    Attributes:
        choice: The fastest way.
        ranks: That it is for.
        batch: Samples of an update, of all replicas together.
        model: Shapes of the model's parameters, by path; None: unknown.
        memory_limit: Bytes that a rank may use; None: no limit.
        seconds: Of an update: measured, if the choice is among ``trials``,
            or else predicted.
        spread: Relative, of these; 0: predicted.
        parts: Predicted seconds by name (``forward and backward``, ``waiting
            for stages``, ``exchange``, ``update``, ``other``), scaled so that
            they add up to the whole.
        memory: Predicted bytes of each stage's ranks.
        alternatives: The best of other kinds, which were not tried.
        remarks: What was noticed while measuring.
        looked_at: How many ways there were.
        trials: What the most promising ways took, the fastest first; ():
            none was tried.

    Raises:
        ValueError: The parts contradict each other.
    """

    choice: Configuration
    ranks: int
    batch: int
    model: Mapping[str, _Shape] = field(default_factory=dict)
    memory_limit: float | None = None
    seconds: float = 0.0
    spread: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[float, ...] = ()
    alternatives: tuple[Timing, ...] = ()
    remarks: tuple[str, ...] = ()
    looked_at: int = 0
    trials: tuple[Timing, ...] = ()

    def __post_init__(self) -> None:
        choice = self.choice
        _check_numbers(self, 'ranks', 'batch')
        if choice.stages * choice.replicas != self.ranks:
            raise ValueError(f'{choice.stages} stages x {choice.replicas} '
                             f'replicas are not {self.ranks} ranks')
        if self.batch < choice.replicas * choice.micro_batches:
            raise ValueError(
                f'batch {self.batch} cannot be cut into choice.micro_batches '
                f'{choice.micro_batches} for each of {choice.replicas} '
                'replicas')
        if choice.cut is not None:
            # Which must be possible, and not take for ever to find out.
            make_schedule(choice.schedule, choice.stages,
                          choice.micro_batches, choice.cut.chunks)
        if self.model and choice.cut is not None:
            for group in choice.cut.order:
                for name in group:
                    if name not in self.model:
                        raise ValueError(f'choice.cut.order has {name}, which '
                                         'is no parameter of the model')

    @property
    def is_tried(self) -> bool:
        """Whether the seconds were measured."""
        return str(self.choice) in [one.way for one in self.trials]

    @staticmethod
    def before_made(data: Any, where: str) -> Any:
        """What a file has, without what says that it is of a job."""
        if not isinstance(data, Mapping) or data.get('kind') != _KIND:
            raise ValueError('this is no plan of a job' + (
                "; a cut of partition()'s is given to partition(plan=...)"
                if isinstance(data, Mapping) and 'cuts' in data else ''))
        return {name: value for name, value in data.items() if name != 'kind'}

    def save(self, path: str) -> None:
        """Writes the plan to a JSON file, which can be edited."""
        stored.save(path, self.as_dict())

    def as_dict(self) -> dict[str, Any]:
        """The content of the file that :meth:`save` writes."""
        return {'kind': _KIND, **asdict(self)}

    def problem(self, shapes: Mapping[str, Any], ranks: int | None) -> str:
        """Why the plan is not for a model or job; '' if it is.

        Args:
            shapes: Of the model's parameters, by path; None: unknown.
            ranks: Of the job; None: not checked.
        """
        if ranks is not None and ranks != self.ranks:
            return (f'the plan is for {self.ranks} ranks, and there are '
                    f'{ranks}; start so many, or make a plan for {ranks}')
        problem = ''
        for name in {**self.model, **shapes}:
            here, there = shapes.get(name), self.model.get(name)
            if name not in shapes or name not in self.model:
                problem = ('is only in the '
                           + ('plan' if name in self.model else 'model'))
            elif here and there and tuple(here) != tuple(there):
                problem = (f'has shape {tuple(here)}, in the plan '
                           f'{tuple(there)}')
            if problem:
                return ('the plan was made for another model: parameter '
                        f'{name} {problem}; make the plan again')
        return ''

    def __str__(self) -> str:
        stages = self.choice.stages > 1
        update = (f'an update of {counted(self.batch, "sample")} on '
                  f'{counted(self.ranks, "rank")}')
        lines = [str(self.choice), update + (
            f' takes {_ms(self.seconds)} +- {100 * self.spread:.0f} %, '
            'measured here:' if self.is_tried else
            f' is predicted to take {_ms(self.seconds)}; it was not tried:')]
        lines += [f'  {name:<22}{_ms(seconds):>12}'
                  for name, seconds in self.parts.items() if seconds]
        if self.memory:
            lines.append('memory per rank, beyond the interpreter, predicted: '
                         + ', '.join(f'stage {stage}: ' * stages + size(most)
                                     for stage, most in enumerate(self.memory))
                         + (f' of {size(self.memory_limit)}'
                            if self.memory_limit else ''))
        if self.choice.replicas > 1:
            lines.append(f'gradients are {ACCURACY[self.choice.codec]} '
                         f'({self.choice.codec})')
        if self.trials:
            lines += ['', 'tried on these ranks, an update takes:', *_rows([
                (_ms(one.seconds), f'+- {100 * one.spread:.0f} %', one.way,
                 '<- this plan' if one.way == str(self.choice) else '')
                for one in self.trials]), '']
        lines += [f'note: {remark}' for remark in self.remarks]
        if self.alternatives:
            lines += ['', f'not tried (the best of each kind, of '
                      f'{self.looked_at} ways, predicted):', *_rows([
                          ('-' if one.reason else _ms(one.seconds), one.way,
                           one.reason)
                          for one in self.alternatives])]
        return '\n'.join(lines)


def load_job_plan(source: Any, **options: Any) -> JobPlan:
    """Reads a plan, and checks all that can be checked without its model.

    Args:
        source: The path of a file that :meth:`JobPlan.save` has written, its
            content, or a plan or :class:`.PlannedJob`, whose plan is returned.
        options: As for :func:`.stored.load`.

    Raises:
        ValueError: Why the source is no plan that can be carried out.
    """
    return stored.load(JobPlan, getattr(source, 'plan', source), **options)


def layout(stages: int, replicas: int) -> str:
    """Stages and replicas in words."""
    if stages == 1:
        return f'{replicas} replicas' if replicas > 1 else 'one process'
    return f'{stages} stages' + f', {replicas} replicas each' * (replicas > 1)


def _check_numbers(plan: Any, *names: str) -> None:
    for name in names:
        if getattr(plan, name) < 1:
            raise ValueError(f'{name} must be at least 1, not '
                             f'{getattr(plan, name)!r}')


def _said(value: Any) -> str:
    return ('x'.join(map(str, value)) if isinstance(value, (list, tuple))
            else str(value))


def _ms(seconds: float) -> str:
    return f'{seconds * 1e3:.4g} ms'


def _rows(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f'  {line}' for line in columns(rows)]
