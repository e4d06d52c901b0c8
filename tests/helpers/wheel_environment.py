"""The wheel, built from this tree and installed where the source tree cannot be seen.

An editable install puts the repository's root on the path and so hides packaging mistakes. The new environment's only
other packages are those of the environment that runs the tests, reached through `sys.path` entries that process no
.pth file: the editable install's .pth stays without effect there, and nothing is fetched.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from tests.helpers.paths import ROOT


def build_wheel(folder: Path) -> Path:
    """Build the wheel in `folder`; returns its path."""
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def install_wheel(wheel: Path, home: Path) -> None:
    """Make the environment `home` with the wheel in it."""
    venv.create(home, with_pip=False, symlinks=True)
    # pip of this environment installs into the other one.
    pip = [sys.executable, "-m", "pip", "--python", home / "bin" / "python"]
    _run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=home)
    site = home / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    dependencies = dict.fromkeys((sysconfig.get_path("purelib"), sysconfig.get_path("platlib")))
    (site / "dependencies.pth").write_text("\n".join(dependencies) + "\n")


def _run(*command: str | Path, cwd: Path) -> None:
    result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"
