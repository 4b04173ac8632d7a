"""Makes the pictures of the atlas: ``python docs/images/make_atlas.py``. Needs Chromium."""

import sys
import tempfile
import time
from pathlib import Path

from sternway import atlas

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    """Build the atlas of Sternway's own source, and take a picture of a file, a folder and a search."""
    from browser import Browser

    with tempfile.TemporaryDirectory() as folder, Browser(1280, 900) as browser:
        atlas.build(ROOT / "src", folder)
        browser.open(Path(folder) / "sternway" / "split" / "_plan.py_docs.html")
        browser.screenshot(HERE / "atlas-file.png")
        browser.open(Path(folder) / "sternway" / "schedule" / "index.html")
        browser.run("document.getElementById('layers').scrollIntoView()")
        browser.screenshot(HERE / "atlas-folder.png")
        browser.open(Path(folder) / "index.html")
        browser.press("/")
        browser.type("backward input")
        while not browser.run("(document.documentElement.dataset.searched ?? '').startsWith('backward input ')"):
            time.sleep(0.1)
        browser.screenshot(HERE / "atlas-search.png")


if __name__ == "__main__":
    main()
