"""The plan of a job: the way to train it that was the fastest of some."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..chains.plan import PartitionPlan
from ..codecs import CODECS
from ..communicators.factory import CHAINERMN
from ..communicators.options import FAMILIES
from ..report import stored
from ..report.quantities import columns, counted, seconds

#: Communicators whose means are those of float32; others round gradients.
EXACT = frozenset((*CHAINERMN, *FAMILIES)) - {
    name for name, row in CODECS.items() if not row.exact}
_REMEDY = 'make the plan again: python -m chainer_fp8pipe plan -o FILE SCRIPT'


@dataclass(frozen=True)
class Way:
    """A way to train a model on some ranks."""

    replicas: int = 1           # of the model; each has its share of a batch
    #: Where each replica is cut into stages of a pipeline, with micro-batches
    #: and schedule; None: a replica is one rank.
    cut: PartitionPlan | None = None
    communicator: str = 'float32'       # of the replicas, and its options
    options: Mapping[str, Any] = field(default_factory=dict)

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
        parts = ['one process'] * (self.ranks == 1)
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

    The median of blocks, on the slowest rank, and as a share of it how
    uncertain that is: half of the quartiles' distance over the root of their
    number.
    """

    way: str
    seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class JobPlan:
    """How a job is to be trained, and what was measured.

    Attributes:
        choice: The way.
        ranks: On which it was the fastest.
        batch: Samples of an update, of all replicas together.
        trials: What was tried, the fastest first.
        remarks: What was not, and why; and more for the user.
        communicates: Whether it is of a script that creates a communicator,
            as ChainerMN's do.
    """

    choice: Way
    ranks: int
    batch: int
    trials: tuple[Trial, ...] = ()
    remarks: tuple[str, ...] = ()
    communicates: bool = False

    def __post_init__(self) -> None:
        choice = self.choice
        if choice.ranks not in (1, self.ranks) or not self.ranks:
            raise ValueError(f'{choice.stages} stages x {choice.replicas} '
                             f'replicas are not {self.ranks} ranks')
        if choice.communicator not in {*FAMILIES, *CHAINERMN}:
            raise ValueError('choice.communicator must be one of '
                             f'{", ".join([*FAMILIES, *CHAINERMN])}, not '
                             f'{choice.communicator!r}')

    @classmethod
    def load(cls, source: Any) -> JobPlan:
        """The plan in a file that :meth:`save` has written, or its content.

        Raises ValueError, which names file, field and remedy, if it is none.
        """
        return stored.load(cls, source, _REMEDY)

    def save(self, path: str) -> None:
        """Writes the plan to a JSON file."""
        stored.save(path, asdict(self))

    def __str__(self) -> str:
        lines = [str(self.choice), '',
                 f'tried on {counted(self.ranks, "rank")}, an update of '
                 f'{counted(self.batch, "sample")} takes:']
        lines += [f'  {line}' for line in columns([
            (seconds(one.seconds), f'+- {100 * one.spread:.0f} %', one.way,
             '<- this plan' if one.way == str(self.choice) else '')
            for one in self.trials])]
        return '\n'.join([*lines, '', *(
            f'note: {remark}' for remark in self.remarks)]).rstrip()
