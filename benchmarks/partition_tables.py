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


def balance(rows):
    """Mean over the slowest of the stages' processor time."""
    print('\nmean over slowest stage'
          '\nmodel     stages  calls   predicted  as run   aim')
    for row in rows:
        print(f'{row["model"]:9} {row["stages"]:6} {row["calls"]:6} '
              f'{row["predicted"]:11.3f} {row["run"]:7.3f}  0.90')


def best(rows, tried):
    """Predicted steps of the chosen cut over the best one's."""
    done = [row for row in rows if row.get('cuts')]
    print('\nstages  models  cuts of one, at most   chosen over best step: '
          'mean    worst   aim')
    for stages in sorted({row['stages'] for row in done}):
        some = [row for row in done if row['stages'] == stages]
        ratios = [row['chosen'] / row['best'] for row in some]
        print(f'{stages:6} {len(some):7} '
              f'{max(row["cuts"] for row in some):21} '
              f'{statistics.mean(ratios):31.3f} {max(ratios):8.3f}  1.05')
    left = [row for row in rows if not row.get('cuts')]
    for why, count in collections.Counter(
            row['reason'] for row in left).most_common():
        print(f'{count} left out: {why}')
    for row in tried:
        if not row.get('run'):
            continue
        order = sorted(row['run'], key=lambda one: one['seconds'])
        at = next(number for number, one in enumerate(order)
                  if one['chosen'])
        print(f'{row["model"]}, all {len(order)} cuts between two ranks as '
              f'run: the chosen one is the {at + 1}. of {len(order)}, '
              f'{order[at]["seconds"] / order[0]["seconds"]:.3f} of the '
              'fastest')


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


def plan(rows):
    """Seconds of each part."""
    print('\ncalls are      calls  different   trace  profile   plan for '
          + ' '.join(f'{stages:>6}' for stages in rows[0]['plan'])
          + ' stages   together  aim')
    for row in rows:
        together = row['trace'] + row['profile'] + max(row['plan'].values())
        print(f'{row["model"]:13} {row["calls"]:6} {row["different"]:10} '
              f'{row["trace"]:7.2f} {row["profile"]:8.2f}  {"":9}'
              + ' '.join(f'{seconds:6.2f}'
                         for seconds in row['plan'].values())
              + f' {together:17.2f} s  10 s')


def replicas(rows):
    """How often different numbers of replicas win, and by how much."""
    done = [row for row in rows if row['outcome'] == 'right']
    each, = {row['each'] for row in done}
    here = [row['bandwidth'] for row in done if row['setting'][:3] == 'one']
    print(f'\n{len({row["model"] for row in done})} models, {each} '
          'micro-batches for each rank, a core of its own for each rank;\n'
          'wires of '
          + (f'{here[0] / 1e9:.1f} GB/s (one node, measured) and ' if here
             else '') + '119 MB/s (1 Gbit/s).  Stage s has\nr[s] ranks, each '
          'of which does 1 / r[s] of its micro-batches; replicas exchange\n'
          '2 (r - 1) / r of their gradients after the last backward pass.  '
          '60 % memory: of what\none rank with the whole model needs.  More: '
          'benchmarks/partition_replicas.py\n\n'
          'different numbers win by     > 0 %        more than 10 %   gain of '
          'these\nsetting           ranks       all      all      large   '
          'mean   most   with')
    for setting in dict.fromkeys(row['setting'] for row in done):
        for ranks in sorted({row['ranks'] for row in done}):
            some = [row for row in done if row['any'] and (
                row['setting'], row['ranks']) == (setting, ranks)]
            if some:
                print(f'{setting:18} {ranks:4} {_wins(some)}')
    total = [row for row in done if row['any']]
    wins = sum(gain(row) > .1 for row in total)
    print(f'In all, {wins} of {len(total)} cases, '
          f'{100 * wins / len(total):.0f} %; "none": only different numbers '
          'fit into the memory')
    _large(done)
    for row in rows:
        if row['outcome'] != 'right':
            print(f'{row["model"]} left out: it looks at computed data'
                  if row['outcome'] == 'refused' else
                  f'{row["model"]} left out: {row["reason"]}')


def gain(row):
    """How much longer a step of the best uniform layout takes: 0.1 is 10 %.

    Infinite where none fits into the memory.
    """
    return (row['uniform']['seconds'] / row['any']['seconds'] - 1
            if row['uniform'] else float('inf'))


def _wins(some):
    """The end of a line on models in a setting."""
    large = [row for row in some if _is_large(row)]
    wins = sorted((row for row in some if gain(row) > .1), key=gain)
    said = (f'{sum(gain(row) > 0 for row in some):5} / {len(some):2} '
            f'{len(wins):4} / {len(some):2} '
            f'{sum(gain(row) > .1 for row in large):4} / {len(large)}')
    if not wins:
        return said
    gains = [100 * gain(row) for row in wins if row['uniform']]
    return (f'{said} ' + (
        f'{statistics.mean(gains):6.0f} % {max(gains):4.0f} %   ' if gains
        else f'{"":17}') + (
            f'{wins[-1]["model"]}, {_said_layout(wins[-1]["any"])} for '
            + _said_layout(wins[-1]['uniform'])))


def _is_large(row):
    return row['model'].startswith('large') or row['model'] == 'vgg16'


def _large(done):
    print('\n                                        equal numbers   '
          'any numbers\nmodel           setting          ranks  '
          'layout    [ms]  layout       [ms]   gain')
    for row in done:
        if _is_large(row) and row['any']:
            same = row['uniform'] == row['any']
            print(f'{row["model"]:15} {row["setting"]:18} {row["ranks"]:3}'
                  f'  {_said_layout(row["uniform"]):7} '
                  f'{_milliseconds(row["uniform"]):>6}  '
                  + ('the same' if same else
                     f'{_said_layout(row["any"]):11} '
                     f'{_milliseconds(row["any"]):>5}'
                     f'{100 * gain(row):5.0f} %'))


def _milliseconds(layout):
    return f'{1e3 * layout["seconds"]:.0f}' if layout else '-'


def _said_layout(layout):
    """Replicas of the stages: 2+1, or 3 x 2 for three stages of two."""
    if layout is None:
        return 'none'
    counts = layout['replicas']
    if len(set(counts)) == 1:
        return f'{len(counts)} x {counts[0]}'
    return '+'.join(map(str, counts))


def ghosts(rows):
    """Microseconds of a call, and the share of a step."""
    print('\n            calls     ghost  rehearsal   serial step   share of '
          'a step\nmodel     of a part     [us]       [us]          [ms]  '
          + ' '.join(f'{stages} stages' for stages in (2, 4)) + '   aim')
    for row in rows:
        ghost, rehearsal = (
            1e6 * statistics.median(row[name]) / row['calls']
            for name in ('ghost', 'rehearsal'))
        print(f'{row["model"]:9} {row["calls"]:9} '
              f'{ghost:8.2f} {rehearsal:10.2f} '
              f'{1e3 * statistics.median(row["step"]):13.1f}  '
              + ' '.join(f'{100 * ghost_share(row, stages):6.2f} %'
                         for stages in (2, 4)) + '   2 %')


def ghost_share(row, stages):
    """Of the step of a rank that computes an even share.

    The ranks share the rehearsals, too.
    """
    extra = row['micro_batches'] * (
        statistics.median(row['rehearsal']) / stages
        + statistics.median(row['ghost']) * (1 - 1 / stages))
    return extra / (statistics.median(row['step']) / stages)


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
    """Steps on the network, beside those that the planner predicts."""
    print('\n4 hosts                        predicted [ms]   median [ms]   '
          '    spread [ms]   speed-up over the first')
    first = statistics.median(rows[0]['times'])
    for row in rows:
        print(f'{row["what"]:30} {1e3 * row["predicted"]:14.0f} '
              f'{1e3 * statistics.median(row["times"]):13.0f} '
              f'{_spread(row["times"]):>17} '
              f'{first / statistics.median(row["times"]):9.2f}')
    print(f'{rows[0]["parameters"] / 1e6:.1f} M parameters, batch '
          f'{rows[0]["batch"]} of all hosts together; a micro-batch is as '
          'large in all ways')
    said, found = ([row['what'] for row in sorted(rows, key=key)]
                   for key in (lambda row: row['predicted'],
                               lambda row: statistics.median(row['times'])))
    print('The predicted winner is the measured one: '
          + ('yes' if said[0] == found[0] else 'no')
          + '; the order of all is as predicted: '
          + ('yes' if said == found else 'no, ' + ', '.join(found)))


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
