"""The wheel holds the three packages, no more, and they import where the source tree cannot be seen.

An editable install puts the repository's root on the path and so hides packaging mistakes. Here the wheel is built
and installed into a new environment, whose only other packages are those of the development environment, reached
through `sys.path` entries that process no .pth file: the editable install's .pth stays without effect.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PACKAGES = ("cadenza", "executor_svc", "scheduler_svc")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class CleanEnvironment:
    """A venv outside the repository with the wheel in it; `wheel` is the file it came from."""

    folder: Path
    wheel: Path

    def python(self, code: str) -> str:
        """Runs `code` in a folder that is not the repository; returns what it printed."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        result = subprocess.run(
            [self.folder / "bin" / "python", "-c", code],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    folder = tmp_path_factory.mktemp("packaging")
    dist = folder / "dist"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", dist, ROOT, cwd=folder)
    (wheel,) = dist.glob("*.whl")

    home = folder / "venv"
    venv.create(home, with_pip=False, symlinks=True)
    # pip of this environment installs into the other one; nothing is fetched.
    python = home / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=folder)

    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    dependencies = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")
    return CleanEnvironment(home, wheel)


def test_wheel_holds_the_packages_only(clean: CleanEnvironment) -> None:
    names = zipfile.ZipFile(clean.wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not [name for name in names if {"tests", "benchmarks"} & set(Path(name).parts)]


def test_wheel_holds_every_source_file(clean: CleanEnvironment) -> None:
    names = set(zipfile.ZipFile(clean.wheel).namelist())
    roots = {"cadenza": ROOT / "client", "executor_svc": ROOT, "scheduler_svc": ROOT}
    expected = {
        path.relative_to(root).as_posix()
        for package, root in roots.items()
        for pattern in ("*.py", "*.pyi", "py.typed")
        for path in (root / package).rglob(pattern)
    }
    assert expected <= names, sorted(expected - names)


@pytest.mark.parametrize("package", PACKAGES)
def test_package_imports_from_the_wheel(clean: CleanEnvironment, package: str) -> None:
    found = Path(clean.python(f"import {package}; print({package}.__file__)"))
    assert found.is_relative_to(clean.folder), f"{package} came from {found}, not from the wheel"


def test_source_tree_is_hidden(clean: CleanEnvironment) -> None:
    path = clean.python("import sys; print(chr(10).join(sys.path))").splitlines()
    assert str(ROOT) not in path
    assert str(ROOT / "client") not in path


def test_stubs_import_alone(clean: CleanEnvironment) -> None:
    """`cadenza.v1` is what other services import: it brings no client, terminal library or torch."""
    loaded = clean.python(
        "import sys, cadenza.v1\n"
        "from cadenza.v1 import generation_pb2, generation_pb2_grpc\n"
        "heavy = ('cadenza.client', 'cadenza.llm', 'cadenza.cli', 'typer', 'rich', 'torch', 'transformers', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert loaded == "[]"


def test_console_script_is_installed(clean: CleanEnvironment) -> None:
    assert (clean.folder / "bin" / "cadenza").is_file()
