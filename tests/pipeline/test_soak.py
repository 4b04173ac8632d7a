"""A few hundred steps on two processes hold what they held before; the long version is benchmarks/chaos/soak.py."""

from __future__ import annotations

from chaos.soak import growth, soak


def test_nothing_grows() -> None:
    for rank, uses in soak(steps=150, every=15).items():
        grown = growth(uses)
        assert grown["descriptors"] <= 0, (rank, uses)
        assert grown["threads"] <= 0, (rank, uses)
        assert grown["resident"] < 8 * 2**20, (rank, uses)
