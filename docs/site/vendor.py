"""Packages of the npm registry that the site carries with it, so that it works without a network once it is built.

Each is fetched once, by version, compared with its SHA-512, and kept in ``build/vendor``.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "build" / "vendor"

PACKAGES = {  # version, and the registry's own integrity value
    "iframe-worker": (  # lets the search of mkdocs-material work from disk
        "1.0.4",
        "roeaaI+Lg1LJNfgpCjoRe/+WzEjy9+Z08LoEvu85MCPbBjwm+qXz8Ag5U05lHa6V1CysZyGzE0SOkAtSUA5q7Q==",
    ),
    "pyodide": (  # Python 3.13 in the browser, for the playground
        "0.29.5",
        "TkYrUv9m8QmfImADKRmpwZulL48E0uUaBSO+dvRQKyAJc0qh9gu7jn8btyHPh3NZm1r2IH2YrJhIr7Q2B9urAw==",
    ),
}


def file_of(package: str, path: str) -> bytes:
    """One file of a package."""
    with tarfile.open(fileobj=io.BytesIO(_tarball(package))) as tarball:
        member = tarball.extractfile(f"package/{path}")
        if member is None:
            raise FileNotFoundError(f"{package} has no file {path}")
        return member.read()


def _tarball(package: str) -> bytes:
    version, wanted = PACKAGES[package]
    name = f"{package}-{version}.tgz"
    kept = KEPT / name
    if not kept.exists():
        address = f"https://registry.npmjs.org/{package}/-/{name}"
        try:
            with urllib.request.urlopen(address, timeout=60) as answer:
                content = answer.read()
        except OSError as error:
            raise RuntimeError(f"the site needs {address}; got {error}. Fix: put that file at {kept}") from error
        KEPT.mkdir(parents=True, exist_ok=True)
        kept.write_bytes(content)
    content = kept.read_bytes()
    got = base64.b64encode(hashlib.sha512(content).digest()).decode()
    if got != wanted:
        raise RuntimeError(f"{name} must have the SHA-512 {wanted}; got {got}. Fix: remove {kept}, and build again")
    return content
