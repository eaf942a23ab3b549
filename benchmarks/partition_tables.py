"""What ``benchmarks/partition.py`` prints of its rows."""
from __future__ import annotations

import collections
import statistics

RIGHT, FEW = 'right', 'too few parts'


def models(rows):
    """Per number of ranks; a line for each that is not right."""
    print('\nranks  models right   of all   combinations  worst error of a '
          'gradient')
    for ranks in sorted({row['ranks'] for row in rows}):
        some = [row for row in rows if row['ranks'] == ranks
                and row['outcome'] != FEW]
        by_model = _outcomes(some, 'model')
        right = [name for name, found in by_model.items()
                 if found == {RIGHT}]
        done = [row for row in some if row['outcome'] == RIGHT]
        print(f'{ranks:5} {len(right):14} {len(by_model):8} '
              f'{len(done):7} / {len(some):<6}'
              f'{max([row["error"] for row in done], default=0):8.1e}')
    by_model = _outcomes([row for row in rows if row['outcome'] != FEW],
                         'model')
    right = sum(found == {RIGHT} for found in by_model.values())
    print(f'{right} of {len(by_model)} models are right with all of these '
          'ranks and schedules; aim: all.\nRight: the loss is bit for bit '
          'that of one process, and no gradient is off by\nmore than 1e-5 '
          'of its norm; one below 1e-6 of the largest is noise, and may be\n'
          'off by 1e-5 of that one.')
    few = collections.Counter(
        (row['ranks'], row['chunks']) for row in rows
        if row['outcome'] == FEW)
    for (ranks, chunks), count in sorted(few.items()):
        print(f'{count} combinations of {ranks} ranks with {chunks} chunks '
              'each left out: the model has not so many parts')
    _reasons([row for row in rows if row['outcome'] != FEW], 'model')


def functions(rows, left_out):
    """How many of each outcome, and why."""
    counts = collections.Counter(row['outcome'] for row in rows)
    cuts = sum(row['cuts'] for row in rows)
    print(f'\n{counts[RIGHT]} of {len(rows)} functions and links are right, '
          f'{counts["refused"]} are refused in words, '
          f'{len(rows) - counts[RIGHT] - counts["refused"]} are wrong; '
          f'{cuts} cuts.\nAim: all right, or refused in words.  Worst '
          'error of a gradient: '
          f'{max([row.get("error", 0) for row in rows], default=0):.1e}')
    print('Left out: ' + '; '.join(
        f'{", ".join(name for name in left_out if left_out[name] == why)}: '
        f'{why}' for why in dict.fromkeys(left_out.values())))
    _reasons(rows, 'function')


def memory(rows):
    """What a limit allows; what was taken."""
    one = next((row for row in rows if row['ranks'] == 1), None)
    print('\n               parameters           over 1 rank     '
          'MB per rank, the most of any\nranks  layers         '
          'MB     / n, aim 0.8      limit  predicted  measured  over limit'
          '  off prediction')
    for row in rows:
        if not row['layers']:
            print(f'{row["ranks"]:5}  no model fits: {row["reason"]}')
            continue
        share = (row['parameters'] / one['parameters'] / row['ranks']
                 if one and one['layers'] else float('nan'))
        pairs = list(zip(row['measured'], row['predicted'], strict=True))
        measured = max(row['measured'])
        off = max((abs(found / said - 1), found / said - 1)
                  for found, said in pairs)[1]
        print(f'{row["ranks"]:5} {row["layers"]:7} '
              f'{row["parameters"] / 1e6:10.1f} {share:20.2f} '
              f'{row["limit"] / 1e6:10.0f} '
              f'{max(row["predicted"]) / 1e6:10.0f} {measured / 1e6:9.0f} '
              f'{100 * (measured / row["limit"] - 1):+9.1f} % '
              f'{100 * off:+13.1f} %')
    print('Aims: over the limit by 5 % at most; 10 % off the prediction, '
          'on the rank where\nit is most.')


def speed(rows):
    """Speed-ups side by side."""
    print(f'\n{"model":10} {"what":32} median [ms]       spread [ms]   '
          'speed-up')
    for row in rows:
        serial = statistics.median(row['times']['serial'])
        for what, times in row['times'].items():
            print(f'{row["model"]:10} {what:32} '
                  f'{1e3 * statistics.median(times):11.1f} '
                  f'{_spread(times):>20} '
                  f'{serial / statistics.median(times):8.2f}')
        for note in row['notes']:
            print(f'{"":10} {note}')


def hybrid(rows):
    """Steps on the network."""
    print('\n4 hosts                          median [ms]       spread [ms]   '
          'speed-up over the first')
    first = statistics.median(rows[0]['times'])
    for row in rows:
        print(f'{row["what"]:30} {1e3 * statistics.median(row["times"]):13.0f}'
              f' {_spread(row["times"]):>17} '
              f'{first / statistics.median(row["times"]):9.2f}')
    print(f'{rows[0]["parameters"] / 1e6:.1f} M parameters, batch '
          f'{rows[0]["batch"]} of all hosts together; a micro-batch is as '
          'large in all ways')


def _spread(times):
    return f'{1e3 * min(times):.1f} - {1e3 * max(times):.1f}'


def _outcomes(rows, key):
    found = collections.defaultdict(set)
    for row in rows:
        found[row[key]].add(row['outcome'])
    return found


def _reasons(rows, key):
    """A line for each that is not right."""
    told = collections.defaultdict(list)
    for row in rows:
        if row['outcome'] != RIGHT:
            where = (f'{row["ranks"]} {row["schedule"]}'.strip()
                     if key == 'model' else '')
            lines = row['reason'].strip().splitlines() or ['']
            told[row[key], row['outcome'], lines[-1]].append(where)
    for (name, outcome, reason), places in sorted(told.items()):
        print(f'  {name}, {outcome}'
              + (f' ({"; ".join(places)})' if any(places) else '')
              + f': {reason}')
