"""The report is reStructuredText, whatever the steps have written."""
import docutils.core
import docutils.nodes
import pytest

from tools.gpu.plan import from_line, last_lines
from tools.gpu.report import HEAD, TAIL, clean, report
from tools.gpu.steps import Outcome, Step

ABOUT = {'Date': '2026-11-23', 'GPU': 'A|B *C* `d` _e_ <f>\n g'}


def outcome(state='done', name='A step', shown=str, **about):
    return Outcome(Step(name, 'It does something.', ['x'], 1, shown), state,
                   **about)


def parsed(*outcomes, hidden=''):
    """The document; a warning is an error."""
    text = report(ABOUT, outcomes, len(outcomes), hidden)
    return docutils.core.publish_doctree(
        text, settings_overrides={'report_level': 2, 'halt_level': 2})


def literals(document):
    return [node.astext() for node in document.findall(
        docutils.nodes.literal_block)]


@pytest.mark.parametrize('text', [
    'a\n\n   b\n c  ', '..\n\n.. note:: x\n', 'Title\n=====\n', '\\|*x*`_',
    '\ttab\x00\x07\x1b[1mbold\x1b[0m', '* - x\n::\n', '    indented\nnot'])
def test_any_output_is_a_literal_block(text):
    document = parsed(outcome(output=text), outcome(
        'failed', why='a * b_ | `c`', output=text, errors=text))
    first, second, third = literals(document)
    assert first == second == third
    assert '\x1b' not in first
    assert [line.strip() for line in first.splitlines()] == [
        line.strip() for line in '\n'.join(clean(text)).splitlines()]


def test_a_traceback_is_there_in_full():
    trace = ('Traceback (most recent call last):\n'
             '  File "/here/it/x.py", line 1, in <module>\n'
             '    1 / 0\nZeroDivisionError: division by zero\n')
    document = parsed(outcome('failed', why='exit status 1', errors=trace),
                      outcome(name='A later step', output='fine'),
                      hidden='/here/it')
    assert literals(document) == [
        trace.replace('/here/it/', '').strip(), 'fine']
    text = document.astext()
    assert 'A later step' in text
    assert '1 of 2 steps are done' in text
    assert 'A|B *C* `d` _e_ <f> g' in text


def test_a_step_that_was_left_out_says_why():
    assert 'Left out: no time was left.' in parsed(
        outcome('left out', why='no time was left')).astext().replace(
            '\n', ' ')


def test_errors_are_shown_of_failures_only():
    assert literals(parsed(outcome(errors='a warning'))) == []


def test_a_line_that_was_written_over_is_what_it_was_last():
    assert clean('10 %\r50 %\r100 %\r\n\x1b[2Kdone\n') == ['100 %', 'done']


def test_of_a_long_output_begin_and_end_are_kept():
    lines = clean('\n'.join(map(str, range(1000))))
    assert len(lines) == HEAD + 1 + TAIL
    assert lines[0] == '0'
    assert lines[HEAD] == f'[{1000 - HEAD - TAIL} lines left out]'
    assert lines[-1] == '999'


def test_the_end_of_an_output_may_be_all_that_is_shown():
    text = 'x\ntable 1\ny\ntable 2\nz'
    assert from_line('table')(text) == 'table 2\nz'
    assert from_line('none')(text) == text
    assert last_lines(2)(text) == 'table 2\nz'
    (shown,) = literals(parsed(outcome(output=text, shown=last_lines(1))))
    assert shown == 'z'
