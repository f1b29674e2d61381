"""The documentation as a site: `make site` (Sphinx, MyST Markdown, the theme Furo)."""

from importlib.metadata import version as installed

project = "engine"
author = "the engine authors"
release = version = installed("pluggable-llm-engine")
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["img"]
html_theme = "furo"
html_title = "engine"
html_static_path: list[str] = []
html_theme_options = {"navigation_with_keys": True}
myst_heading_anchors = 4
"""Links to headings, as GitHub has them, are checked down to this level."""
myst_enable_extensions = ["attrs_inline"]
nitpicky = True
