"""A hook of mkdocs: pages that are written elsewhere in the repository are part of the site, where links expect them.

    benchmarks/*/README.md, CONTRIBUTING.md, CHANGELOG.md               are pages under their own paths
    README.md                                                           is status.md: a README is a folder's first page
    ../benchmarks/split/README.md in docs/split.md                      leads to that page
    ../tests/costs.py                                                   is no page: shown without a link, if it exists

A link to something that is not there is a warning, and so, under --strict, an error.
"""

from __future__ import annotations

import logging
import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

sys.path.insert(0, str(Path(__file__).parent))
from vendor import file_of

ROOT = Path(__file__).parents[2]
SHIM = "site/iframe-worker.js"
WARNINGS = logging.getLogger("mkdocs.hooks.outside")
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")


def outside() -> dict[str, str]:
    """The pages that are not below docs/: their paths on the site, and in the repository."""
    found = sorted((ROOT / "benchmarks").glob("*/README.md"))
    paths = [path.relative_to(ROOT).as_posix() for path in found] + ["CONTRIBUTING.md", "CHANGELOG.md"]
    return {**{path: path for path in paths}, "status.md": "README.md"}


OUTSIDE = outside()
ON_SITE = {real: path for path, real in OUTSIDE.items()}


def on_files(files: Any, config: Any) -> Any:
    """Add them, and the script by which search works from disk."""
    for path, real in OUTSIDE.items():
        files.append(File.generated(config, path, content=(ROOT / real).read_text()))
    shim = "globalThis.RealWorker = Worker;\n" + file_of("iframe-worker", "shim/index.js").decode()
    files.append(File.generated(config, SHIM, content=shim))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead each relative link to where its target is on the site."""
    path = page.file.src_uri
    real = OUTSIDE.get(path, posixpath.join("docs", path))

    def follow(link: re.Match[str]) -> str:
        target = link["target"]
        if re.match(r"[a-z]+:", target):
            return link[0]
        wanted = posixpath.normpath(posixpath.join(posixpath.dirname(real), target))
        if not (ROOT / wanted).exists():
            WARNINGS.warning("%s links to %s, which does not exist", real, target)
            return link[0]
        on_site = ON_SITE.get(wanted, wanted.removeprefix("docs/"))
        if files.get_file_from_path(on_site) is None or wanted.endswith(".py"):
            return link["text"]
        relative = posixpath.relpath(on_site, posixpath.dirname(path) or ".")
        return f"{link['image']}[{link['text']}]({relative}{link['anchor'] or ''})"

    return LINK.sub(follow, markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take the script from the site, not from a network."""
    here = posixpath.relpath(SHIM, posixpath.dirname(page.file.dest_uri) or ".")
    return output.replace("https://unpkg.com/iframe-worker/shim", here)
