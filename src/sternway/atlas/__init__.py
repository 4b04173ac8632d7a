"""Explain a code base: pages and indexes for a source tree, with a link to the source line for every statement.

Facts come from parsing, never from running the code: Python is parsed by ``ast``, its docstrings by griffe; C, C++,
CUDA, JavaScript and TypeScript by tree-sitter; others by universal-ctags where it is installed; of YAML, TOML and JSON
files the keys are listed. Nothing is guessed.

    read      one file: its text, its language, its facts          relate   files among each other
    python    a Python file by ``ast``                              pages    Markdown, HTML, links, search
    run       a build: processes, incremental runs, measuring

Example:
    >>> from sternway import atlas
    >>> report = atlas.build("src", "build/atlas")  # doctest: +SKIP
    >>> report.files, report.broken  # doctest: +SKIP
    (142, ())
"""

try:
    import griffe as _griffe  # noqa: F401
    import jinja2 as _jinja2  # noqa: F401
    import pathspec as _pathspec  # noqa: F401
    import pygments as _pygments  # noqa: F401
    import tree_sitter as _tree_sitter  # noqa: F401
    import yaml as _yaml  # noqa: F401
except ImportError as _missing:
    from sternway.errors import AtlasError as _AtlasError

    raise _AtlasError(
        "sternway.atlas needs griffe, jinja2, pathspec, pygments, pyyaml and tree-sitter",
        got=f"no {_missing.name}",
        fix="pip install 'sternway[atlas]'",
    ) from None

from sternway.atlas._build import build, check
from sternway.atlas._report import BuildReport
from sternway.atlas.pages._links import BrokenLink
from sternway.atlas.read._tree import FileProblem

__all__ = ["BrokenLink", "BuildReport", "FileProblem", "build", "check"]
