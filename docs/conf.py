"""Sphinx settings: no network, no theme to install, API from docstrings."""
from chainer_fp8pipe._version import __version__

project = 'chainer_fp8pipe'
author = 'the chainer_fp8pipe authors'
version = release = __version__

extensions = [
    'sphinx.ext.autodoc',
    'sphinx.ext.mathjax',
    'sphinx.ext.napoleon',
]
exclude_patterns = ['_build']
nitpicky = False
autodoc_member_order = 'bysource'
autodoc_typehints = 'description'

html_theme = 'alabaster'
html_theme_options = {
    'description': 'Chainer on today’s Python, with gradients that cross '
    'the network as fp8, and models divided over ranks',
    'page_width': '1000px',
}
html_sidebars = {'**': ['about.html', 'navigation.html', 'searchbox.html']}
