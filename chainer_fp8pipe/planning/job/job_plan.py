"""The plan of a job: the choice, its prediction, and why nothing else."""
from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..json_file import read_json
from ..sizes import counted, said_bytes
from .choices import Candidate, Choices, kinds
from .configuration import ACCURACY, Configuration, configuration_of
from .job_profile import JobProfile

_FORMAT = 1
_KIND = 'plan of a job'


class Trial(NamedTuple):
    """What some updates took in a way to run the job.

    Attributes:
        way: In words.
        seconds: Median of an update.
        spread: Half of the distance of the quartiles, relative.
    """

    way: str
    seconds: float
    spread: float


class Alternative(NamedTuple):
    """The best of another kind.

    Attributes:
        kind: What its configurations have in common, such as ``'ring'``.
        configuration: In words.
        seconds: Predicted; None: impossible.
        loses: Why it is not the choice.
    """

    kind: str
    configuration: str
    seconds: float | None
    loses: str


@dataclass(frozen=True)
class JobPlan:
    """How a job is to be run.

    Attributes:
        choice: The fastest configuration that was found.
        ranks: That it is for.
        batch: Samples of an update, of all replicas together.
        model: Shapes of the model's parameters, by path; None: unknown.
        memory_limit: Bytes that a rank may use; None: no limit.
        seconds: Predicted of a step.
        spread: Relative, of these.
        parts: Seconds by name, which add up to the whole.
        memory: Predicted bytes of each stage's ranks.
        alternatives: The best of each other kind.
        remarks: What was noticed while measuring.
        looked_at: How many configurations there were.
        trials: What the most promising ways took, the fastest first; ():
            none was tried.
    """

    choice: Configuration
    ranks: int
    batch: int
    model: Mapping[str, Any] = field(default_factory=dict)
    memory_limit: float | None = None
    seconds: float = 0.0
    spread: float = 0.0
    parts: Mapping[str, float] = field(default_factory=dict)
    memory: tuple[float, ...] = ()
    alternatives: tuple[Alternative, ...] = ()
    remarks: tuple[str, ...] = ()
    looked_at: int = 0
    trials: tuple[Trial, ...] = ()

    def save(self, path: str) -> None:
        """Writes the plan to a JSON file, which can be edited."""
        with open(path, 'w') as file:
            json.dump(self.as_dict(), file, indent=1)
            file.write('\n')

    def as_dict(self) -> dict[str, Any]:
        """The content of the file that :meth:`save` writes."""
        return {
            'format': _FORMAT, 'kind': _KIND, 'ranks': self.ranks,
            'batch': self.batch, 'model': {
                name: shape and list(shape)
                for name, shape in self.model.items()},
            'memory_limit': self.memory_limit,
            'choice': self.choice.as_dict(),
            'predicted': {
                'seconds': self.seconds, 'spread': self.spread,
                'parts': dict(self.parts), 'memory': list(self.memory)},
            'alternatives': [one._asdict() for one in self.alternatives],
            'remarks': list(self.remarks), 'looked_at': self.looked_at,
            'trials': [one._asdict() for one in self.trials]}

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
                return ('the plan was made for another model: parameter '
                        f'{name} is only in the '
                        f'{"plan" if name in self.model else "model"}; '
                        'make the plan again')
            if here and there and tuple(here) != tuple(there):
                return ('the plan was made for another model: parameter '
                        f'{name} has shape {tuple(here)}, in the plan '
                        f'{tuple(there)}; make the plan again')
        return ''

    def __str__(self) -> str:
        lines = [
            f'{self.choice}',
            f'a step of {counted(self.batch, "sample")} on '
            f'{counted(self.ranks, "rank")} is '
            f'predicted to take {_ms(self.seconds)} +- '
            f'{100 * self.spread:.0f} %:',
            *(f'  {name:<22}{_ms(seconds):>12}'
              for name, seconds in self.parts.items() if seconds),
            *(['memory per rank, beyond the interpreter: ' + ', '.join(
                map(said_bytes, self.memory))
               + (f' of {said_bytes(self.memory_limit)}'
                  if self.memory_limit else '')] if self.memory else [])]
        if self.choice.replicas > 1:
            lines.append(f'gradients are {ACCURACY[self.choice.codec]} '
                         f'({self.choice.codec})')
        if self.trials:
            lines += ['', 'tried on these ranks, an update takes:', *_table([
                (_ms(one.seconds), f'+- {100 * one.spread:.0f} %', one.way,
                 '<- this plan' if one.way == str(self.choice) else '')
                for one in self.trials]), '']
        lines += [f'note: {remark}' for remark in self.remarks]
        if self.alternatives:
            lines += ['', f'why not (of {self.looked_at} configurations, the '
                      'best of each other kind, predicted):', *_table([
                          (one.kind, '-' if one.seconds is None
                           else _ms(one.seconds), one.loses,
                           one.configuration)
                          for one in self.alternatives])]
        return '\n'.join(lines)


def plan_of(choices: Choices, chosen: Configuration | None = None
            ) -> JobPlan:
    """The plan that a search has come to.

    Args:
        choices: What was looked at.
        chosen: One of these; None: the best.

    Raises:
        DoesNotFit: Nothing is possible.
    """
    best, profile = next(
        (one for one in choices.candidates if one.configuration == chosen),
        None) or choices.best, choices.profile
    assert best.step is not None
    return JobPlan(
        best.configuration, profile.ranks, choices.wanted.batch,
        {name: one.shape
         for name, one in profile.model.parameters.items()},
        choices.wanted.memory, *best.step.seconds, best.step.parts,
        best.memory, tuple(_alternatives(choices, best)),
        (*profile.network.remarks, *profile.remarks, *_slow_ranks(profile)),
        choices.looked_at)


def load_job_plan(source: str | Mapping[str, Any] | JobPlan) -> JobPlan:
    """Reads a plan, and checks that its parts agree with each other.

    Args:
        source: The path of a file that :meth:`JobPlan.save` has written, the
            dictionary in such a file, or a plan, which is returned as it is.

    Raises:
        OSError: The file cannot be read.
        ValueError: The source is no plan, or a plan that contradicts itself;
            the message says how.
    """
    if isinstance(source, JobPlan):
        return source
    name = 'the plan'
    if isinstance(source, str):
        name, source = source, read_json(source, 'make the plan again')
    try:
        return _checked(source)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f'{name} is no plan of a job: {error!r} is missing '
                         'or of another kind; make the plan again') from None
    except ValueError as error:
        raise ValueError(f'{name}: {error}') from None


def _checked(data: Any) -> JobPlan:
    if data.get('kind') != _KIND:
        raise ValueError('this is no plan of a job' + (
            "; a cut of partition()'s is given to partition(plan=...)"
            if 'cuts' in data else ''))
    if data['format'] != _FORMAT:
        raise ValueError(f'a plan of format {data["format"]!r}; this version '
                         f'reads format {_FORMAT}')
    choice = configuration_of(data['choice'])
    ranks, batch = data['ranks'], data['batch']
    for name, value in ('ranks', ranks), ('batch', batch):
        if type(value) is not int or value < 1:
            raise ValueError(f'{name} must be a number of at least 1, not '
                             f'{value!r}')
    if choice.stages * choice.replicas != ranks:
        raise ValueError(f'{choice.stages} stages x {choice.replicas} '
                         f'replicas are not {ranks} ranks')
    predicted = data['predicted']
    return JobPlan(
        choice, ranks, batch, dict(data['model']),
        data['memory_limit'], float(predicted['seconds']),
        float(predicted['spread']), dict(predicted['parts']),
        tuple(predicted['memory']),
        tuple(Alternative(**one) for one in data['alternatives']),
        tuple(data['remarks']), int(data['looked_at']),
        tuple(Trial(**one) for one in data['trials']))


def _alternatives(choices: Choices, best: Candidate) -> list[Alternative]:
    found = []
    equal = choices.equal_to(best)
    for kind, one in kinds(choices.candidates).items():
        if one is best:
            continue
        if one.step is None:
            found.append(Alternative(kind, str(one.configuration), None,
                                     one.reason))
        else:
            slower = one.seconds / best.seconds - 1
            found.append(Alternative(
                kind, str(one.configuration), one.seconds,
                'as fast, within the spread' if one in equal
                else f'{100 * slower:.0f} % slower'))
    merged: dict[tuple, Alternative] = {}       # one line for each way
    for line in found:
        same = merged.get(line[1:])
        merged[line[1:]] = line if same is None else same._replace(
            kind=f'{same.kind}, {line.kind}')
    return sorted(merged.values(), key=lambda line: (
        line.seconds is None, line.seconds or 0.0, line.kind))


def _slow_ranks(profile: JobProfile) -> list[str]:
    """What users should know of ranks that compute more slowly."""
    return [f'rank {rank} takes {speed:.1f} times as long as the others for '
            'the same computation; every step waits for it'
            for rank, speed in enumerate(profile.speeds) if speed > 1.0]


def _ms(seconds: float) -> str:
    return f'{seconds * 1e3:.4g} ms'


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ['  ' + '  '.join(
        text.ljust(width) for text, width in zip(row, widths, strict=True)
    ).rstrip() for row in rows]
