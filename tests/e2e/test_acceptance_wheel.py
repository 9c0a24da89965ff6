"""A wheel built from the tree holds every file of the package and runs from an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from specdec import __version__

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow


def run(*argv: str | Path, cwd: Path, **env: str) -> str:
    """Run a program that must succeed; return what it printed."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    command = [str(part) for part in argv]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False, env=clean | env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("hatchling", reason="building a wheel without a network needs hatchling here")
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", out, ROOT, cwd=out)
    (built,) = out.glob("*.whl")
    return built


def test_the_wheel_holds_every_file_of_the_package_and_nothing_else(wheel: Path) -> None:
    assert wheel.name == f"specdec-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        extra = {name.rsplit(".dist-info/", 1)[1] for name in archive.namelist() if ".dist-info/" in name}
    paths = [path for path in (ROOT / "specdec").rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    assert names == {str(path.relative_to(ROOT)) for path in paths}
    assert "specdec/py.typed" in names
    assert {"licenses/LICENSE", "licenses/NOTICE", "METADATA", "entry_points.txt"} <= extra


def test_the_source_archive_holds_what_the_guides_point_to(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="building an archive without a network needs hatchling here")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path, cwd=ROOT)
    (built,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(built) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = run("git", "ls-files", "deploy", "examples", "docs", "benchmarks", "scripts", cwd=ROOT).splitlines()
    missing = [name for name in tracked if name not in names and (ROOT / name).is_file()]
    assert not missing, missing[:5]
    assert {"deploy/specdec.service", "constraints.txt", "pyproject.toml"} <= names


def test_it_runs_from_an_environment_of_its_own(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are this environment's; the package itself must come from the wheel."""
    home = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", home, cwd=tmp_path)
    python, program = home / "bin" / "python", home / "bin" / "specdec"
    options = ["--no-deps", "--no-index", "--disable-pip-version-check"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=tmp_path)
    path = {"PYTHONPATH": sysconfig.get_path("purelib")}
    assert Path(run(python, "-c", "import specdec; print(specdec.__file__)", cwd=tmp_path, **path).strip()).is_relative_to(home)
    assert run(program, "--version", cwd=tmp_path, **path) == f"specdec {__version__}\n"
    assert "--speculative-config" in run(program, "serve", "--help", cwd=tmp_path, COLUMNS="160", **path)
    where = run(python, "-c", "import specdec.engine.core, specdec.server.app as app; print(app.__file__)", cwd=tmp_path, **path)
    assert Path(where.strip()).is_relative_to(home)
