"""The plan of a job: the way to train it that was the fastest of some."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..chains.names import Names
from ..chains.plan import PartitionPlan
from ..codecs import CODECS
from ..communicators.factory import CHAINERMN
from ..communicators.options import FAMILIES, make_options
from ..pipeline.schedules import make_schedule
from ..report import stored
from ..report.quantities import columns, counted, seconds, size

#: Communicators whose means are those of float32; others round gradients.
EXACT = frozenset((*CHAINERMN, *FAMILIES)) - {
    name for name, row in CODECS.items() if not row.exact}
_KIND = 'plan of a job'
_REMEDY = ('correct it, or make the plan again: '
           'python -m chainer_fp8pipe plan -o FILE SCRIPT')


@dataclass(frozen=True)
class Way:
    """A way to train a model on some ranks.

    Attributes:
        replicas: Of the model; each has its share of every batch.
        cut: Where each replica is cut into stages of a pipeline, with its
            micro-batches and schedule; None: a replica is one rank.
        communicator: Name of the replicas' communicator.
        options: Of :func:`~chainer_fp8pipe.create_communicator`.

    Raises:
        ValueError: There is no such communicator, option or schedule.
    """

    replicas: int = 1
    cut: PartitionPlan | None = None
    communicator: str = 'float32'
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ValueError('choice.replicas must be at least 1, not '
                             f'{self.replicas}')
        name = self.communicator
        if name not in FAMILIES and name not in CHAINERMN:
            raise ValueError(
                'choice.communicator must be one of '
                f'{", ".join([*FAMILIES, *CHAINERMN])}, not {name!r}')
        if name in FAMILIES:
            try:
                make_options(name, dict(self.options))
            except (TypeError, ValueError) as error:
                raise ValueError(f'choice.options: {error}') from None
        elif unknown := sorted(set(self.options) - set(CHAINERMN[name])):
            raise ValueError(f'choice.options: communicator {name!r} has no '
                             f'option {unknown[0]!r}')
        if self.cut is not None:    # must not take for ever to find out
            make_schedule(self.cut.schedule, self.cut.stages,
                          self.cut.micro_batches, self.cut.chunks)

    @property
    def stages(self) -> int:
        """Ranks of each replica."""
        return self.cut.stages if self.cut else 1

    @property
    def micro_batches(self) -> int:
        """Parts of a replica's share of a batch."""
        return self.cut.micro_batches if self.cut else 1

    @property
    def ranks(self) -> int:
        """Of all stages and replicas."""
        return self.stages * self.replicas

    @property
    def is_exact(self) -> bool:
        """Whether gradients are those of a single process."""
        return self.replicas == 1 or self.communicator in EXACT and not any(
            'float16' in str(one) for one in self.options.values())

    def simplicity(self) -> tuple:
        """A key by which exact ways come first, and of these the simplest."""
        return (not self.is_exact, self.ranks > 1, self.stages,
                len(self.options), self.communicator not in CHAINERMN,
                self.micro_batches)

    def __str__(self) -> str:
        if self.ranks == 1:
            return 'one process'
        parts = []
        if self.cut is not None:
            parts += [counted(self.stages, 'stage'),
                      counted(self.micro_batches, 'micro-batch'),
                      self.cut.schedule]
        if self.replicas > 1:
            parts += [counted(self.replicas, 'replica'), ' '.join([
                self.communicator, *(f'{name}={value}' for name, value
                                     in sorted(self.options.items()))])]
        return ', '.join(parts)


@dataclass(frozen=True)
class Trial:
    """What updates took in a way that was tried.

    Attributes:
        way: In words.
        seconds: Of an update of the slowest rank: the median of blocks.
        spread: How uncertain that is, as a share of it: half of the distance
            of the blocks' quartiles, over the root of their number.
        memory: Most bytes of a rank's arrays; 0: not measured.
    """

    way: str
    seconds: float
    spread: float = 0.0
    memory: float = 0.0


@dataclass(frozen=True)
class JobPlan:
    """How a job is to be trained, and what was measured.

    Attributes:
        choice: The way.
        ranks: On which it was the fastest.
        batch: Samples of an update, of all replicas together.
        model: Shapes of the model's parameters, by path; None: unknown.
        trials: What was tried, the fastest first.
        remarks: What was not, and why; and more for the user.
        communicates: Whether it is of a script that creates a communicator,
            as ChainerMN's do.

    Raises:
        ValueError: The parts contradict each other.
    """

    choice: Way
    ranks: int
    batch: int
    model: Mapping[str, tuple[int, ...] | None] = field(default_factory=dict)
    trials: tuple[Trial, ...] = ()
    remarks: tuple[str, ...] = ()
    communicates: bool = False

    def __post_init__(self) -> None:
        choice = self.choice
        if choice.ranks not in (1, self.ranks) or not self.ranks:
            raise ValueError(f'{choice.stages} stages x {choice.replicas} '
                             f'replicas are not {self.ranks} ranks')
        if self.batch < choice.replicas * choice.micro_batches:
            raise ValueError(
                f'batch {self.batch} cannot be cut into '
                f'{counted(choice.micro_batches, "micro-batch")} for each of '
                + counted(choice.replicas, 'replica'))
        for name in (name for group in (choice.cut.order if choice.cut else ())
                     for name in group):
            if self.model and name not in self.model:
                raise ValueError(f'choice.cut.order has {name}, which is no '
                                 'parameter of the model')

    @staticmethod
    def before_made(data: Any, where: str) -> Any:
        """What a file has, without what says that it is of a job."""
        if not isinstance(data, Mapping) or data.get('kind') != _KIND:
            raise ValueError('this is no plan of a job' + (
                "; a cut of partition()'s is given to partition(plan=...)"
                if isinstance(data, Mapping) and 'cuts' in data else ''))
        return {name: value for name, value in data.items() if name != 'kind'}

    @classmethod
    def load(cls, source: Any) -> JobPlan:
        """Reads a plan, and checks all that can be checked without a model.

        Args:
            source: The path of a file that :meth:`save` has written, its
                content, or a plan.

        Raises:
            ValueError: It is no plan that can be carried out; the message
                names file, field and remedy.
        """
        return stored.load(cls, source, _REMEDY)

    def as_dict(self) -> dict[str, Any]:
        """The content of the file that :meth:`save` writes."""
        return {'kind': _KIND, **asdict(self)}

    def save(self, path: str) -> None:
        """Writes the plan to a JSON file, which can be edited."""
        stored.save(path, self.as_dict())

    def __str__(self) -> str:
        lines = [str(self.choice), '',
                 f'tried on {counted(self.ranks, "rank")}, an update of '
                 f'{counted(self.batch, "sample")} takes:']
        lines += [f'  {line}' for line in columns([
            (seconds(one.seconds), f'+- {100 * one.spread:.0f} %',
             size(one.memory) if one.memory else '', one.way,
             '<- this plan' if one.way == str(self.choice) else '')
            for one in self.trials])]
        return '\n'.join([*lines, '', *(
            f'note: {remark}' for remark in self.remarks)]).rstrip()

    def problem(self, shapes: Mapping[str, Any], ranks: int | None) -> str:
        """Why the plan is not for a model or job; '' if it is.

        Args:
            shapes: Of the model's parameters, by path; None: unknown.
            ranks: Of the job; None: not checked.
        """
        if ranks is not None and ranks != self.ranks:
            return (f'the plan is for {self.ranks} ranks, and there are '
                    f'{ranks}; start so many, or make a plan for {ranks}')
        for name in {**self.model, **shapes}:
            here, there = shapes.get(name), self.model.get(name)
            if name not in shapes or name not in self.model:
                problem = ('is only in the '
                           + ('plan' if name in self.model else 'model'))
            elif here and there and tuple(here) != tuple(there):
                problem = f'has shape {tuple(here)}, in the plan {there}'
            else:
                continue
            return ('the plan was made for another model: parameter '
                    f'{name} {problem}; make the plan again')
        return ''


def shapes_of(model: Any) -> dict[str, Any]:
    """Of all parameters, by path; None: unknown yet."""
    return {name: None if one._data[0] is None else tuple(one._data[0].shape)
            for name, one in Names(model).parameters.items()}
