"""One HTML page about runs, which opens from disk without a network."""
from .html_page import write_page as write_page
