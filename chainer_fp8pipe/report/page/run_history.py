"""What died and was started again, and what each start ran with."""
from __future__ import annotations

import datetime
import shlex

from ..quantities import seconds
from ..records.run_record import RunRecord, RunStart
from .sections import PageSection, Table, label, said_of


def history_section(runs: dict[str, RunRecord]) -> PageSection:
    """Starts and how they ended.

    Args:
        runs: By the letter that stands for each.
    """
    section = PageSection('starts', 'What died, and was it started again?')
    rows = []
    for run, record in runs.items():
        for start in record.starts:
            rows.append(_row(run, record, start))
        if record.starts:
            section.sentences.append(said_of(run, _endings(record)))
        section.sentences += [said_of(run, remark) for remark in (
            *_silent_ranks(record), *record.remarks)]
    if not rows:
        section.sentences.append('No start was recorded.')
        return section
    section.tables.append(('Starts', Table(
        ('start', 'began (UTC)', 'from update', 'to update', 'lasted',
         'ranks', 'hosts', 'by the launcher', 'end'), rows)))
    return section


def settings_section(runs: dict[str, RunRecord]) -> PageSection:
    """Versions, options, environment and command of the last start.

    Args:
        runs: By the letter that stands for each.
    """
    section = PageSection('settings', 'What did it run with?')
    starts = {run: record.starts[-1] for run, record in runs.items()
              if record.starts}
    if not starts:
        section.sentences.append('Nothing was recorded.')
        return section
    header = ('', *(f'run {run}' if run else '' for run in starts))
    section.tables.append(('Command', Table(header, [
        ('command', *(shlex.join(start.command)
                      for start in starts.values())),
        ('ranks', *(str(start.ranks) for start in starts.values())),
        ('hosts', *(', '.join(dict.fromkeys(start.hosts))
                    for start in starts.values()))])))
    for title in ('options', 'versions', 'environment'):
        parts = [getattr(start, title) for start in starts.values()]
        names = dict.fromkeys(name for part in parts for name in part)
        if names:
            section.tables.append((title.capitalize(), Table(header, [
                (name, *(str(part.get(name, '-')) for part in parts))
                for name in names])))
    return section


def _silent_ranks(record: RunRecord) -> list[str]:
    start = record.starts[-1] if record.starts else None
    if start is None or not 0 < len(start.reporting) < start.ranks:
        return []
    return [f'{len(start.reporting)} of {start.ranks} ranks report; what the '
            'others do is not known. Extend the trainers of all ranks.']


def _endings(record: RunRecord) -> str:
    """How the starts ended, in one sentence."""
    last = record.starts[-1].number
    errors = {end.start: end.error for end in record.ends}
    died = [start.number for start in record.starts
            if errors.get(start.number, start.number != last and 'killed')]
    words = ([f'{len(died)} crashed or was killed' if len(died) == 1
              else f'{len(died)} crashed or were killed'] if died else [])
    if last not in errors:
        words.append('the last one has no end: it runs, or was killed')
    number = len(record.starts)
    count = 'One start' if number == 1 else f'{number} starts'
    if number == 1 and died:
        return f'One start, which crashed: {errors[last]}.'
    if number == 1 and words:
        return 'One start, which has no end: it runs, or was killed.'
    return (f'{count}: {"; ".join(words)}.' if words
            else f'Nothing died: {count.lower()}.')


def _row(run: str, record: RunRecord, start: RunStart) -> tuple[str, ...]:
    end = next((end for end in record.ends if end.start == start.number),
               None)
    later = [other for other in record.starts if other.number > start.number]
    last = max((item.last for item in record.intervals
                if item.start == start.number), default=start.iteration)
    if end:
        how, until, done = end.error or 'orderly', end.time, end.iteration
    else:
        how = ((later[0].after or 'did not end in an orderly way')
               if later else 'runs still, or did not end in an orderly way')
        # What it did after the last write is not known.
        until = later[0].time if later else record.last_seen
        done = last
        if later and later[0].iteration < done:
            how += (f'; updates {later[0].iteration + 1} to {done} were '
                    'done again')
    return (label(run, str(start.number)), datetime.datetime.fromtimestamp(
        start.time, datetime.timezone.utc).strftime('%Y-%m-%d %H:%M:%S'),
        str(start.iteration), str(done),
        seconds(max(0.0, until - start.time)), str(start.ranks),
        str(len(set(start.hosts))),
        '-' if start.launched is None else f'start {start.launched + 1}',
        how)
