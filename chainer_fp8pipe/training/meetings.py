"""What the ranks of a step tell each other: of failures, and of reports."""
# Whatever goes wrong on one rank is an error on every rank.  A step has three
# meetings, in which every rank says something small and hears what the others
# say: that it has read and is about to do the same as they; that the work is
# done, and what was reported; that what follows is done (the exchange, the
# optimizer with its hooks, reports).  Between them no rank waits for another
# one but through channels, groups of batch normalisation, or ``add``, which
# is a meeting itself.  So a rank that fails anywhere says so in place of
# whatever the others say next, and all raise.
#
# A meeting is one all-gather.  What ranks say is pickled and padded to a
# length that all know; only what is longer than ever before takes another
# one.  This replaced an all-reduce for each kind of news: a broadcast of the
# step's head, the comparison of what ranks are about to do, the labels that
# losses leave out, the sums of reported values, the failures.
#
# Chainer takes anything for a report.  Numbers and arrays have a mean, and so
# have pairs of a number and its weight, which `DictSummary` knows; of anything
# else (None, a text, arrays of several shapes) the last one counts, as it
# would if the batch had not been divided.
from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import chainer
import numpy
from chainer.links import BatchNormalization
from chainermn.links import MultiNodeBatchNormalization
from mpi4py import MPI

from ..channel.channel import RemoteError
from ..mpi.abort import shown, wait_until_read
from ..mpi.agreement import Signature, agree
from ..mpi.finalizing import HeldRequest
from ..mpi.grid import Group, split_groups
from ..mpi.waiting import wait_until

_SAME = ('All ranks must do the same: iterators of equal length, the same '
         'hooks of the optimizer, one snapshot to resume from.')
_LENGTH = 8     # bytes


class Meeting:
    """Exchanges small objects, in one collective call each.

    Args:
        comm: The ranks.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        self._room = 256        # bytes; the same on all ranks

    def say(self, thing: Any) -> list[Any]:
        """The things of all ranks, in their order, pickled on the way."""
        words = pickle.dumps(thing)
        while True:
            mine = numpy.zeros(_LENGTH + self._room, numpy.uint8)
            mine[:_LENGTH].view(numpy.int64)[0] = len(words)
            part = words[:self._room]
            mine[_LENGTH:_LENGTH + len(part)] = numpy.frombuffer(
                part, numpy.uint8)
            found = numpy.empty((self.comm.size, mine.size), numpy.uint8)
            # MPI's own wait would keep the core from other ranks.
            wait_until(HeldRequest(self.comm.Iallgather(mine, found), mine,
                                   found).test)
            lengths = found[:, :_LENGTH].copy().view(numpy.int64)[:, 0]
            longest = int(lengths.max())
            if longest <= self._room:
                return [pickle.loads(row[_LENGTH:_LENGTH + length].tobytes())
                        for row, length in zip(found, lengths.tolist(),
                                               strict=True)]
            self._room = 2 * longest


class Together:
    """The meetings of all ranks, or of one pipeline's alone.

    Args:
        comm: All ranks.

    Attributes:
        broken: What has failed after it had begun; '' if nothing has.
    """

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm, self.broken = comm, ''
        self._meetings: dict[int, Meeting] = {}
        self._all_know = False      # of the error that is raised

    def begin(self, comm: MPI.Comm, error: BaseException | None,
              entries: Mapping[str, str], value: Any = None) -> list[Any]:
        """The first meeting of a step.

        Args:
            comm: All ranks, or some of them.
            error: What has failed on this rank.
            entries: What must be equal on all ranks.
            value: What this rank has to say else.

        Returns:
            The values of all ranks.

        Raises:
            ValueError: Something has failed on a rank, or entries differ;
                on all ranks.
            BaseException: ``error``, if it is no Exception.
        """
        self._all_know = False
        text = '' if error is None else (
            str(error) if type(error) is ValueError
            else f'{type(error).__name__}: {error}')
        signature = Signature(entries)
        said = self._meeting(comm).say((text, signature.number, value))
        if any(text for text, _, _ in said) or len(
                {number for _, number, _ in said}) > 1:
            try:
                agree(comm, signature, text, _SAME)
            except ValueError as together:
                if error is not None and not isinstance(error, Exception):
                    raise error from None       # a wish to exit
                raise together from error
        return [value for _, _, value in said]

    def meet(self, comm: MPI.Comm, value: Any = None) -> list[Any]:
        """A later meeting: the values of all ranks.

        Raises:
            RemoteError: A rank says that it has failed.
        """
        said = self._meeting(comm).say(('', value))
        if any(text for text, _ in said):
            self._break(comm, [text for text, _ in said])
        return [value for _, value in said]

    @contextlib.contextmanager
    def heard(self, comm: MPI.Comm, give_up: Callable[[str], object]
              ) -> Iterator[None]:
        """A block that may fail on this rank alone.

        The others hear of it in their next meeting, and raise
        :class:`RemoteError`.

        Args:
            comm: As of the meeting in which the block ends.
            give_up: Told what happened where this rank failed; makes ranks
                that wait for this one fail, too.
        """
        self._all_know = False
        try:
            yield
        except BaseException as error:      # the others wait for this rank
            if not self._all_know:
                give_up(str(error))
                is_own = not isinstance(error, RemoteError)
                if is_own:
                    show_traceback(comm)
                # What only repeats the others' words is not said again.
                said = self._meeting(comm).say((
                    str(error) or type(error).__name__ if is_own else ' ',
                    None))
                with contextlib.suppress(RemoteError):
                    self._break(comm, [text for text, _ in said])
                if not is_own:
                    raise RemoteError(self.broken) from error
            raise

    def add(self, number: float) -> float:
        """Sums a number over all ranks, the same sum on each.

        Inside a block of :meth:`heard`, for hooks that look at all stages.

        Raises:
            RemoteError: Another rank has failed.
        """
        return float(numpy.sum(self.meet(self.comm, number)))

    def _meeting(self, comm: MPI.Comm) -> Meeting:
        key = id(comm)
        if key not in self._meetings:
            self._meetings[key] = Meeting(comm)
        return self._meetings[key]

    def _break(self, comm: MPI.Comm, texts: list[str]) -> NoReturn:
        # Messages of the failed step may still be on their way, or some
        # ranks have been updated.
        self._all_know = True
        ranks = comm.Get_group().Translate_ranks(None, self.comm.Get_group())
        self.broken = '; '.join(
            f'rank {rank}: {text}' for rank, text
            in zip(ranks, texts, strict=True) if text.strip()
        ) or 'another rank failed'
        raise RemoteError(self.broken)


def show_traceback(comm: MPI.Comm) -> None:
    """Prints the exception that is handled, before what it leads to.

    The other ranks fail as soon as they hear of it.
    """
    if comm.size > 1:
        error: Any = sys.exc_info()[1]
        sys.stdout.flush()
        sys.stderr.write(f'\nrank {comm.rank} of {comm.size} failed:\n'
                         f'{shown(error)}')
        sys.stderr.flush()
        with contextlib.suppress(AttributeError):
            error.is_shown = True
        wait_until_read()
        # On its way from one node, what another prints may still overtake.
        time.sleep(0.2)


# --- groups that normalise their batches together ----------------------------
# Ranks of such a group wait for each other in the middle of a step.

class HearingMean:
    """A communicator of ChainerMN's whose means hear of failures.

    ChainerMN's own would wait for ever for a rank that has failed.  The means
    are those of the same numbers, added up in float64.

    Attributes:
        original: ChainerMN's, which has all other methods.
        group: Its ranks.
    """

    def __init__(self, original: Any) -> None:
        self.original = original
        self.group = Group(split_groups(original.mpi_comm))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.original, name)

    def _multi_node_mean(self, sent: Any, mean: Any) -> None:
        own = chainer.backends.cuda.to_cpu(mean if sent is None else sent)
        found = self.group.gather(own.astype(numpy.float64)).mean(axis=0)
        mean[...] = chainer.backend.get_array_module(mean).asarray(
            found.astype(mean.dtype))


def hear_failures(model: chainer.Link) -> None:
    """Prepares a model for :func:`give_up`; call it on all ranks."""
    made: dict[int, HearingMean] = {}
    for link in model.links():
        if isinstance(link, MultiNodeBatchNormalization):
            comm = getattr(link.comm, 'original', link.comm)
            if comm.size > 1 and link._communication_backend == 'mpi':
                if id(comm) not in made:
                    made[id(comm)] = HearingMean(comm)
                link.comm = made[id(comm)]


def give_up(model: chainer.Link, text: str) -> None:
    """Tells ranks that normalise with this one that this one has failed.

    Those ranks wait in the middle of their own step.

    Args:
        model: Whose links may have a ``group`` of such ranks, or a
            communicator that :func:`hear_failures` has replaced.
        text: The failure.
    """
    for link in model.links():
        owner = link if isinstance(link, BatchNormalization) else vars(
            link).get('comm')
        group = getattr(owner, 'group', None)
        if isinstance(owner, (BatchNormalization, HearingMean)) and group:
            group.give_up(text)


# --- reports ----------------------------------------------------------------


class Report(NamedTuple):
    """The reports of one name, added up.

    Attributes:
        kind: ``'number'``, ``'array'``, ``'pair'`` or ``'other'``.
        total: The weighted sum of the first three, in float64; the other.
        weight: The sum of the weights.
        dtype: Of an array's mean.
    """

    kind: str
    total: Any
    weight: float
    dtype: str = ''

    def mean(self) -> Any:
        if self.kind == 'other':
            return self.total
        if self.kind == 'array':
            return (self.total / (self.weight or 1.0)).astype(self.dtype)
        mean = float(self.total / self.weight) if self.weight else 0.0
        return (mean, self.weight) if self.kind == 'pair' else mean


#: What a rank has to say to the means, by name.
Reports = dict[str, Report]


def add(reports: Reports, name: str, new: Report) -> None:
    """Adds a later report of a name to the earlier ones."""
    old = reports.get(name)
    if old and old.kind == new.kind != 'other' and (
            numpy.shape(old.total) == numpy.shape(new.total)):
        new = new._replace(total=old.total + new.total,
                           weight=old.weight + new.weight)
    reports[name] = new


def means(everyone: Iterable[Reports]) -> dict[str, Any]:
    """Means over ranks, in their order."""
    found: Reports = {}
    for reports in everyone:
        for name, report in reports.items():
            add(found, name, report)
    return {name: report.mean() for name, report in found.items()}


def report_of(value: Any, weight: float) -> Report:
    """The report of a value with a weight in the mean."""
    if (isinstance(value, tuple) and len(value) == 2
            and all(map(_is_number, value))):
        number, own = (float(_host(item)) for item in value)
        return Report('pair', own * number if own else 0.0, own)
    array = _host(value)
    if _is_number(array):
        return Report('number', weight * float(array) if weight else 0.0,
                      weight)
    if isinstance(array, numpy.ndarray) and array.dtype.kind in 'biuf':
        mean: Any = array.dtype if array.dtype.kind == 'f' else numpy.float64
        total = array.astype(numpy.float64)
        if not weight:          # whatever it is, not a number perhaps
            total[...] = 0
        return Report('array', weight * total, weight, numpy.dtype(mean).str)
    pickle.dumps(array)     # the other ranks are given it
    return Report('other', array, 1.0)


def _host(value: Any) -> Any:
    """The NumPy array of an array or variable; else the value."""
    if isinstance(value, chainer.Variable):
        value = value.array
    return (chainer.backends.cuda.to_cpu(value)
            if isinstance(value, chainer.get_array_types()) else value)


def _is_number(value: Any) -> bool:
    value = getattr(value, 'array', value)      # of a variable
    return isinstance(value, (bool, int, float)) or (
        getattr(value, 'ndim', -1) == 0
        and getattr(getattr(value, 'dtype', None), 'kind', '') in 'biuf')
