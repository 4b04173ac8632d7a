"""After many steps on two processes nothing has grown that can be counted; benchmarks/chaos/soak.py measures memory."""

from __future__ import annotations

from chaos.soak import soak


def test_nothing_grows() -> None:
    for rank, uses in soak(steps=150, every=15).items():
        settled = uses[len(uses) // 5 :]
        early, late = settled[: len(settled) // 2], settled[len(settled) // 2 :]
        for name in ("descriptors", "threads", "tensors"):
            # A thread that has ended may be counted for a moment longer; one that leaks is there from then on.
            most, least = max(getattr(use, name) for use in early), min(getattr(use, name) for use in late)
            assert least <= most, (rank, name, uses)
