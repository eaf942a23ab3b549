"""The built documentation: how long it is, and how a browser shows it."""
import html
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tests.report.browser import Browser, program

DOCS = Path(__file__).parent.parent / 'docs'
#: Words of an article that anybody should be asked to read, by folder.
MOST_WORDS = {'.': 25_000, 'api': 8_000, 'benchmarks': 1_500}

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def site(tmp_path_factory):
    """The folder of the pages."""
    for needed in 'sphinx', 'furo', 'sphinx_copybutton':
        pytest.importorskip(needed)
    place = tmp_path_factory.mktemp('site')
    done = subprocess.run(
        [sys.executable, '-m', 'sphinx', '-q', '-b', 'html', '-d',
         place / 'doctrees', DOCS, place / 'html'],
        capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return place / 'html'


def pages_of(site):
    """Pages that somebody wrote: path from the site's root, and HTML."""
    made = 'genindex.html', 'py-modindex.html', 'search.html'
    return {path.relative_to(site): path.read_text()
            for path in sorted(site.rglob('*.html')) if path.name not in made}


def words(text):
    """How many a page's article has: code and tables, too; a formula is one.
    """
    article = re.search(r'(?s)<article[^>]*>(.*)</article>', text)[1]
    article = re.sub(r'(?s)<math.*?</math>', 'x', article)
    return len(html.unescape(re.sub(r'<[^>]+>', ' ', article)).split())


def test_the_site_is_not_too_long_to_read(site):
    counted = {path: words(text) for path, text in pages_of(site).items()}
    for folder, most in MOST_WORDS.items():
        inside = {path: count for path, count in counted.items()
                  if path.is_relative_to(folder)}
        assert inside
        assert sum(inside.values()) <= most, sorted(
            inside.items(), key=lambda row: -row[1])[:10]


def test_sentences_are_short(site):
    lengths = []
    for text in pages_of(site).values():
        text = re.sub(r'(?s)<(pre|table|math).*?</\1>', '', text)
        for paragraph in re.findall(r'(?s)<p>(.*?)</p>', text):
            plain = html.unescape(re.sub('<.*?>', '', paragraph))
            lengths += [len(one.split()) for one in
                        re.split(r'(?<=[.:!?])\s+(?=[A-Z("])', plain)]
    assert statistics.median(lengths) <= 16


#: What would be seen to be wrong; run in the page.
LOOK = """(() => {
  const wide = document.documentElement.clientWidth;
  const wrong = [...document.querySelectorAll('.contents')].filter(
      one => getComputedStyle(one, '::before').content !== 'none').map(
      one => 'the theme paints an error over ' + one.textContent.trim());
  if (document.documentElement.scrollWidth > wide)
    for (const one of document.querySelectorAll('article *'))
      if (one.getBoundingClientRect().right > wide + 1
          && !one.parentElement.closest(
              'pre, .table-wrapper, .equation, .sidebar-drawer'))
        wrong.push('beyond the right edge: ' + one.tagName + ' '
                   + one.textContent.trim().slice(0, 60));
  for (const one of document.querySelectorAll('article img'))
    if (!one.naturalWidth) wrong.push('no picture: ' + one.src);
  return wrong;
})()"""


def test_every_page_in_a_browser(site):
    """Wide and on a phone, light and dark."""
    if program() is None:
        pytest.skip('no Chromium is installed')
    wrong = []
    with Browser() as browser:
        for path in pages_of(site):
            browser.open(site / path)
            for width in 1280, 400:
                browser.size(width, 900)
                for scheme in 'light', 'dark':
                    browser.prefer(scheme)
                    wrong += [(str(path), width, scheme, what)
                              for what in browser.run(LOOK)]
            wrong += [(str(path), error) for error in browser.errors]
    assert not wrong, '\n'.join(map(str, wrong))
