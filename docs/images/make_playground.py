"""Makes the picture of the playground: ``python docs/images/make_playground.py``, after ``make docs``."""

import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests"))


def main() -> None:
    """Open it from disk, and wait until the searches are done."""
    from browser import Browser

    with Browser(1400, 1300) as browser:
        browser.call("Page.navigate", url=(ROOT / "build" / "site" / "playground.html").as_uri())
        while browser.look("document.getElementById('simulator')?.dataset.state") != "ready":
            time.sleep(0.1)
        browser.screenshot(HERE / "playground.png")


if __name__ == "__main__":
    main()
