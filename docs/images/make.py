"""Makes the pictures of the docs: ``python docs/images/make.py``. A test holds them to what is made."""

from pathlib import Path

from sternway import schedule

HERE = Path(__file__).parent


def main() -> None:
    """Draw ZB-V on 4 ranks and 8 microbatches, F = I = W."""
    timeline = schedule.make("zb-v", ranks=4, microbatches=8).check().simulate()
    (HERE / "zb-v-4x8.svg").write_text(timeline.to_svg())


if __name__ == "__main__":
    main()
