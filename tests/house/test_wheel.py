"""What a user installs: the import name and nothing beside it, with the data that the code reads."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("outlast", "reliability", "monitors", "slurm", "launchers", "checkpoint")
FILES = ("setup.cfg", "pyproject.toml", "README.md")
ROOMS = PARTS[1:]

pytestmark = pytest.mark.slow


def _run(words: Sequence[str], cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel, built in a copy so that the work tree stays as it is."""
    copy = tmp_path_factory.mktemp("source")
    for part in PARTS:
        shutil.copytree(ROOT / part, copy / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    _run([sys.executable, "-m", "build", "--no-isolation", "--sdist", "--wheel", "--outdir", "dist"], copy)
    return copy / "dist"


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, unpacked as pip does."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(_only(built, "*.whl")) as wheel:
        wheel.extractall(target)
    return target


def _only(place: Path, pattern: str) -> Path:
    (found,) = place.glob(pattern)
    return found


def _tree() -> set[str]:
    return {
        "outlast/__init__.py",
        *(f"outlast/{path.relative_to(ROOT)}" for room in ROOMS for path in (ROOT / room).rglob("*.py")),
    }


def test_the_wheel_holds_our_name_alone(built: Path) -> None:
    with zipfile.ZipFile(_only(built, "*.whl")) as wheel:
        names = wheel.namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"outlast"}
    for room in ROOMS:
        assert f"outlast/{room}/__init__.py" in names
    for needed in (
        "outlast/py.typed",
        "outlast/reliability/catalog/xid.yaml",
        "outlast/launchers/templates/run.sbatch",
    ):
        assert needed in names
    assert {name for name in names if name.endswith(".py")} == _tree()


def test_the_sdist_holds_our_name_alone(built: Path) -> None:
    """The rooms themselves would be top-level packages `slurm`, `checkpoint` ... to whoever installs from it."""
    with tarfile.open(_only(built, "*.tar.gz")) as sdist:
        names = [name.split("/", 1)[1] for name in sdist.getnames() if "/" in name]
    tops = {name.split("/")[0] for name in names}
    assert tops <= {"outlast", "outlast.egg-info", "setup.cfg", "pyproject.toml", "README.md", "PKG-INFO"}, tops
    assert {name for name in names if name.startswith("outlast/") and name.endswith(".py")} == _tree()


def test_a_bare_name_does_not_find_our_rooms(installed: Path) -> None:
    """Our code runs inside the user's process, beside a `checkpoint.py` and a `monitors/` of their own."""
    program = (
        "import importlib.util as u, sys\n"
        "sys.path.insert(0, sys.argv[1])\n"
        "print(*[name for name in sys.argv[2:] if u.find_spec(name) is not None])\n"
        "import outlast; print(outlast.__file__)\n"
        "print(*[name for name in sys.argv[2:] if u.find_spec('outlast.' + name) is None])"
    )
    # -S: without the site directory, in which an editable install of this project may lie
    bare, where, missing = _run([sys.executable, "-I", "-S", "-c", program, str(installed), *ROOMS], installed).split(
        "\n"
    )[:3]
    assert bare == "" and missing == ""
    assert where.startswith(str(installed))


def test_the_command_is_there(installed: Path) -> None:
    entry = _only(installed, "*.dist-info") / "entry_points.txt"
    assert "outlast = outlast.reliability.app:main" in entry.read_text(encoding="utf-8")
    said = _run(
        [sys.executable, "-P", "-c", "from outlast.reliability.app import main; main()", "--version"], installed
    )
    assert said.startswith("outlast ")
