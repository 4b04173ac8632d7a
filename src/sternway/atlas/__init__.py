"""Explain a code base: pages and indexes for a source tree, every sentence with its evidence.

Facts come from parsing, never from running: Python by ``ast`` and griffe, C, C++, CUDA and others by universal-ctags
where it is installed, YAML, TOML and JSON by their keys. What is not found is not said.

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
    import yaml as _yaml  # noqa: F401
except ImportError as _missing:
    from sternway.errors import AtlasError as _AtlasError

    raise _AtlasError(
        "sternway.atlas needs griffe, jinja2, pathspec, pygments and pyyaml",
        got=f"no {_missing.name}",
        fix="pip install 'sternway[atlas]'",
    ) from None

from sternway.atlas._build import build, check
from sternway.atlas._report import BuildReport
from sternway.atlas.pages._links import BrokenLink
from sternway.atlas.read._tree import FileProblem

__all__ = ["BrokenLink", "BuildReport", "FileProblem", "build", "check"]
