"""The docs site: ``make docs``. Pages and their links are those of the repository.

Tables that are generated from the code are filled in here (``tests/site_tables.py``).
"""

from typing import Any

from kvass._version import __version__
from tests.site_tables import fill

project = "kvass"
version = release = __version__
copyright = "the kvass founders"
extensions = ["myst_parser"]
include_patterns = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**"]
exclude_patterns = [".venv", ".cache"]
root_doc = "docs/index"
myst_heading_anchors = 4
nitpicky = True
html_theme = "alabaster"
html_theme_options = {
    "page_width": "70rem",
    "sidebar_width": "14rem",
    "fixed_sidebar": True,
    "sidebar_includehidden": False,
}
html_sidebars = {"**": ["about.html", "searchfield.html", "navigation.html"]}
html_show_sphinx = False
html_show_sourcelink = False
html_copy_source = False


def _fill(_app: Any, _page: str, text: list[str]) -> None:
    text[0] = fill(text[0])


def setup(app: Any) -> None:
    """Called by Sphinx, which lets ``_fill`` change each page that it has read."""
    app.connect("source-read", _fill)
