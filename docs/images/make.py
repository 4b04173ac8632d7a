"""Makes the pictures of the docs: ``python docs/images/make.py``. A test holds them to what is made."""

from pathlib import Path

from sternway import schedule
from sternway.schedule import Costs, Timeline

HERE = Path(__file__).parent
EQUAL = Costs(F=1.0, I=1.0, W=1.0)
FILL = {"F": "#56B4E9", "I": "#E69F00", "W": "#009E73", "B": "#D55E00"}
LEFT, ROW, BOX, PER_UNIT = 64, 26, 22, 24.0


def rows(timeline: Timeline, top: float, words: str) -> list[str]:
    """A heading, and one row for each rank; what is grey is a GPU that waits."""
    lines = [f'<text x="{LEFT}" y="{top}" font-size="15" font-weight="600">{words}</text>']
    for rank, events in enumerate(timeline.events):
        y = top + 12 + rank * ROW
        lines.append(f'<text x="{LEFT - 8}" y="{y + 15:.0f}" text-anchor="end">GPU {rank}</text>')
        lines.append(
            f'<rect x="{LEFT}" y="{y:.0f}" width="{timeline.makespan * PER_UNIT:.1f}" height="{BOX}" fill="#d0d0d0"/>'
        )
        for event in events:
            x, width = LEFT + event.start * PER_UNIT, (event.end - event.start) * PER_UNIT
            action = event.action.actions[0]
            place = f'x="{x:.1f}" y="{y:.0f}" width="{width:.1f}" height="{BOX}"'
            lines.append(f'<rect {place} fill="{FILL[action.op]}" stroke="#fff"/>')
            if width >= 12:
                lines.append(
                    f'<text x="{x + width / 2:.1f}" y="{y + 15:.0f}" text-anchor="middle">{action.microbatch}</text>'
                )
    return lines


def waiting_and_not() -> str:
    """1F1B above ZB-V on one scale of time: the problem, and what is done about it."""
    before = schedule.make("1f1b", ranks=4, microbatches=8).check().simulate(EQUAL)
    after = schedule.make("zb-v", ranks=4, microbatches=8).check().simulate(EQUAL)
    width = LEFT + before.makespan * PER_UNIT + 16
    height = 344
    legend, x = [], float(LEFT)
    for op, words in (
        ("F", "F: forward"),
        ("B", "B: whole backward"),
        ("I", "I: its half for the inputs"),
        ("W", "W: its half for the weights"),
    ):
        legend.append(f'<rect x="{x:.0f}" y="310" width="14" height="14" fill="{FILL[op]}"/>')
        legend.append(f'<text x="{x + 20:.0f}" y="322">{words}</text>')
        x += 36 + 6.2 * len(words)
    legend.append(f'<rect x="{x:.0f}" y="310" width="14" height="14" fill="#d0d0d0"/>')
    legend.append(f'<text x="{x + 20:.0f}" y="322">a GPU that waits</text>')
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" role="img" '
            'font-family="system-ui, sans-serif" font-size="12" fill="#111">',
            "<title>Four GPUs under 1F1B, which wait, and under ZB-V, which do not</title>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            *rows(before, 24, f"1F1B: each GPU waits for {before.bubble_rate:.0%} of its time"),
            *rows(after, 170, f"ZB-V: {after.bubble_rate:.0%}, with the same memory"),
            *legend,
            "</svg>\n",
        ]
    )


def pictures() -> dict[str, str]:
    """Each picture's text by its file's name."""
    made = {
        f"{name}-4x8.svg": schedule.make(name, ranks=4, microbatches=8).check().simulate(EQUAL).to_svg()
        for name in ("gpipe", "1f1b", "zb-h1", "zb-v", "v-min")
    }
    return {"waiting.svg": waiting_and_not(), **made}


def main() -> None:
    """Write them all."""
    for name, text in pictures().items():
        (HERE / name).write_text(text)


if __name__ == "__main__":
    main()
