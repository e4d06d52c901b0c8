"""The wheel, built from this tree and installed where the source tree cannot be seen.

An editable install puts the repository's root on the path and so hides packaging mistakes.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.helpers.paths import ROOT


def build_wheel(dist: Path, target: str = "wheel") -> tuple[Path, str]:
    """Build the wheel in `dist`; returns its path, and what `make TARGET` printed."""
    # With this environment, whatever .venv is; and as if no other make had called it.
    printed = run(
        "make",
        "--no-print-directory",
        "--old-file=.venv/.installed-dev",
        target,
        f"PY={sys.executable}",
        f"DIST={dist}",
        cwd=ROOT,
    )
    (wheel,) = dist.glob("*.whl")
    return wheel, printed


def install_wheel(wheel: Path, home: Path) -> None:
    """Make an environment at `home` with the wheel and nothing else; nothing is fetched."""
    venv.create(home, with_pip=False, symlinks=True)
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]  # of this environment
    run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=home)


def share_packages(home: Path) -> None:
    """Give the environment the packages of the one that runs this, but not what that one has in editable form.

    They are reached through `sys.path` entries that process no .pth file.
    """
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    dependencies = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that must not fail; returns what it printed on stdout."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
    return result.stdout
