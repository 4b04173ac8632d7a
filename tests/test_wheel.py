"""``python -m build`` makes a wheel that installs in a bare environment, with nothing but what it declares."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path

import pytest

from pages import ROOT, programs, run_alone


def _run(*command: str | Path) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _with_all_it_needs(names: list[str]) -> dict[str, Distribution]:
    """These distributions and, again and again, what they require, as far as it is installed here."""
    found: dict[str, Distribution] = {}
    seen: set[str] = set()
    while names:
        asked = names.pop()
        name, extras = re.fullmatch(r"([\w.-]+)(?:\[([^]]*)\])?.*", asked, re.DOTALL).groups()
        if (name := name.lower().replace("_", "-")) + str(extras) in seen:
            continue
        seen.add(name + str(extras))
        try:
            found[name] = distribution(name)
        except PackageNotFoundError:  # for another platform
            continue
        for each in found[name].requires or []:
            extra = re.search(r"extra == ['\"]([\w-]+)", each)
            if extra is None or extra[1] in (extras or "").split(","):  # as torch asks for cuda-toolkit[cudart]
                names.append(each)
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (find_spec("build") and find_spec("hatchling")):
        pytest.skip("no build and hatchling: pip install -e '.[dev]'")
    out = tmp_path_factory.mktemp("dist")
    _run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT)
    assert len(list(out.glob("*.tar.gz"))) == 1
    (made,) = out.glob("*.whl")
    return made


def test_it_has_what_it_needs_and_no_more(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert "sternway/py.typed" in names
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {"sternway"}
    here = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*") if path.is_file()}
    assert {name for name in here if "__pycache__" not in name} <= set(names)


def test_installs_in_a_bare_environment_and_passes_doctor(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is not installed again, since that takes minutes: what the wheel declares is linked from here, no more."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    metadata = zipfile.ZipFile(wheel).read(
        next(n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("/METADATA"))
    )
    declared = re.findall(r"^Requires-Dist: ([\w-]+)(?!.*extra ==)", metadata.decode(), re.MULTILINE)
    linked = tmp_path / "linked"
    linked.mkdir()
    for found in _with_all_it_needs(declared).values():
        for top in {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}:
            if not (linked / top).exists():
                (linked / top).symlink_to(found.locate_file(top))
    bare = tmp_path / "bare"
    _run(sys.executable, "-m", "venv", "--without-pip", bare)
    (site,) = (bare / "lib").glob("python*/site-packages")
    (site / "linked.pth").write_text(f"{linked}\n")
    pip = [sys.executable, "-m", "pip", "--python", bare / "bin" / "python"]
    _run(*pip, "install", "--quiet", "--no-index", wheel)  # fails if something that is required is not there

    assert _run(bare / "bin" / "python", "-c", "import sternway; print(sternway.__file__)").startswith(str(site))
    absent = "import importlib.util as u; print([n for n in ('griffe', 'pytest', 'scipy') if u.find_spec(n)])"
    assert _run(bare / "bin" / "python", "-c", absent) == "[]\n"
    assert json.loads(_run(bare / "bin" / "sternway", "doctor", "--json"))["well"]

    quick_start = next(block for block in programs((ROOT / "README.md").read_text(), apart=True) if block.ranks > 1)
    assert "step 2: loss" in run_alone(quick_start, tmp_path, bare / "bin" / "python")
