"""The documentation's pages as a site, by Sphinx: python -m sphinx -W -n docs build/site (the extra `docs`)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "site"))

import fedmpi

project, author, copyright = "fedmpi", "the fedmpi developers", "the authors of fedmpi, MIT license"
release = version = fedmpi.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "numpydoc", "mathml", "reference"]
exclude_patterns = ["images", "examples", "figures"]

html_theme = "furo"
html_title = f"fedmpi {release}"
smartquotes = False  # quotes and dashes are parts of commands
html_static_path, html_css_files = ["site/static"], ["style.css"]
html_show_sourcelink = html_copy_source = False
html_math_renderer = "mathml"  # nothing is loaded from anywhere: MathML is drawn by browsers themselves

nitpicky = True
default_role = "code"  # what docstrings put between single backticks is code
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
autodoc_typehints = "none"  # docstrings state types in the words of the field
autodoc_class_signature = "separated"
autodoc_member_order = "bysource"
numpydoc_show_class_members = False
numpydoc_xref_param_type = False
