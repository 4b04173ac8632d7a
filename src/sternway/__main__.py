"""``python -m sternway``: the same as ``sternway``."""

from sternway.cli import main

if __name__ == "__main__":
    main()
