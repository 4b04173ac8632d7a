"""``sternway atlas``: summary, JSON, exit codes for CI."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from sternway.cli import app


def _run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["atlas", *map(str, arguments)])
    return result.exit_code, result.stdout


def test_build_check_and_json(tmp_path: Path) -> None:
    source, out = tmp_path / "src", tmp_path / "out"
    source.mkdir()
    (source / "a.py").write_text("def f(): ...\n")
    (source / "b.bin").write_bytes(b"\0\1")
    code, text = _run(source, "--out", out, "--check")
    assert code == 1
    assert "there are no pages yet" in text
    code, text = _run(source, "--out", out)
    assert code == 0
    assert "pages written" in text
    assert "b.bin: binary, 2 bytes" in text
    code, text = _run(source, "--out", out, "--json")
    record = json.loads(text)
    assert (code, record["ok"], record["written"], record["files"]) == (0, True, 0, 1)
    assert record["problems"] == [{"path": "b.bin", "kind": "binary", "text": "2 bytes"}]
    assert _run(source, "--out", out, "--check")[0] == 0
    (source / "a.py").write_text("def g(): ...\n")
    code, text = _run(source, "--out", out, "--check")
    assert code == 1
    assert "a.py has changed" in text


def test_include(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in ("a.py", "b.md", "c.toml"):
        (tmp_path / "src" / name).write_text("")
    _, text = _run(tmp_path / "src", "--out", tmp_path / "out", "--include", "*.py", "--include", "b.*", "--json")
    assert json.loads(text)["files"] == 2


def test_patterns_that_match_nothing_are_an_error_and_write_nothing(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("")
    arguments = ["atlas", str(tmp_path / "src"), "--out", str(tmp_path / "out"), "--include", "*.zig"]
    for more in ([], ["--check"]):
        result = CliRunner().invoke(app, [*arguments, *more])
        assert result.exit_code == 2
        assert result.stderr.strip().startswith("error: --include must match a file below SOURCE; got '*.zig'. Fix: ")
    assert not (tmp_path / "out").exists()


def test_it_starts_without_torch() -> None:
    code = "import sys, sternway.cli, sternway.cli._atlas, sternway.atlas; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['griffe'] = None\n"
        f"sys.argv = ['sternway', 'atlas', {str(tmp_path)!r}, '--out', {str(tmp_path / 'out')!r}]\n"
        "from sternway.cli import main; main()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert "sternway[atlas]" in "".join(run.stderr.split())
