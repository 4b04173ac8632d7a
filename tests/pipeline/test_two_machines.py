"""Two torchruns with an address each, in two network namespaces; the long version is benchmarks/chaos/network.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from chaos.network import possible, story


def test_a_link_that_is_cut_for_a_moment_is_waited_out(tmp_path: Path) -> None:
    if why := possible():
        pytest.skip(why)
    found = story(tmp_path, steps=8, cuts=[0.7], limit=600, heartbeat_timeout=30)
    assert found["exit"] == [0, 0], "\n----\n".join(found["logs"])
    assert found["saved"] == 8
    assert found["reported"] == [False, False]
