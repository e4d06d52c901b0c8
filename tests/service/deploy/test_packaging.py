"""The wheels hold their packages, no more, and they import where the source tree cannot be seen.

It is installed into a new environment, whose only other packages are those of the environment that runs the tests.
"""

from __future__ import annotations

import email
import os
import re
import shlex
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import cadenza
from cadenza_cli.load.options import LOADTEST_MODULES
from tests.helpers.machine.wheel_environment import build_wheel, install_wheel, run, share_packages
from tests.helpers.paths import PACKAGES, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True, slots=True)
class CleanEnvironment:
    """A venv outside the repository with the wheel in it; `wheel` is the file it came from."""

    folder: Path
    wheel: Path
    printed: str = ""  # by `make wheel`

    def run(self, program: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs a program of the environment in a folder that is not the repository."""
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [self.folder / "bin" / program, *arguments]
        return subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False)

    def python(self, code: str) -> str:
        """Runs `code`; returns what it printed."""
        result = self.run("python", "-c", code)
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    folder = tmp_path_factory.mktemp("packaging")
    wheel, printed = build_wheel(folder / "dist")
    install_wheel(wheel, folder / "venv")
    share_packages(folder / "venv")
    return CleanEnvironment(folder / "venv", wheel, printed)


@pytest.mark.long
def test_make_wheel_prints_the_wheel_and_the_line_that_installs_it(clean: CleanEnvironment) -> None:
    first, *_, last = clean.printed.splitlines()
    assert first == str(clean.wheel)
    assert last.strip() == f"pip install 'cadenza[serve] @ {clean.wheel.as_uri()}'"


def test_wheel_holds_the_packages_only(clean: CleanEnvironment) -> None:
    names = zipfile.ZipFile(clean.wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    assert not [name for name in names if {"tests", "benchmarks"} & set(Path(name).parts)]


def test_wheel_holds_every_source_file(clean: CleanEnvironment) -> None:
    names = set(zipfile.ZipFile(clean.wheel).namelist())
    expected = {
        path.relative_to(root).as_posix()
        for package, root in PACKAGES.items()
        for pattern in ("*.py", "*.pyi", "py.typed")
        for path in (root / package).rglob(pattern)
    }
    page = ROOT / "gateway_svc" / "page" / "static"
    expected |= {path.relative_to(ROOT).as_posix() for path in page.rglob("*") if path.is_file()}
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
        "heavy = ('cadenza.client', 'cadenza_launcher', 'cadenza_cli', 'rich', 'torch', 'transformers', 'numpy')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    assert loaded == "[]"


@pytest.fixture(scope="module")
def client_alone(tmp_path_factory: pytest.TempPathFactory) -> CleanEnvironment:
    folder = tmp_path_factory.mktemp("client")
    wheel, printed = build_wheel(folder / "dist", "wheel-client")
    install_wheel(wheel, folder / "venv")
    share_packages(folder / "venv")
    return CleanEnvironment(folder / "venv", wheel, printed)


def test_the_wheel_of_the_client_holds_the_client(client_alone: CleanEnvironment, clean: CleanEnvironment) -> None:
    assert client_alone.printed.strip() == str(client_alone.wheel)
    names = zipfile.ZipFile(client_alone.wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"cadenza", "cadenza_common"}
    assert requirements(client_alone.wheel, set()) == requirements(clean.wheel, set())
    assert client_alone.wheel.name.split("-")[1] == clean.wheel.name.split("-")[1]
    ours = {name for name in names if name.endswith((".py", ".pyi"))}
    tops_of_all = zipfile.ZipFile(clean.wheel).namelist()
    assert ours == {
        n for n in tops_of_all if n.startswith(("cadenza/", "cadenza_common/")) and n.endswith((".py", ".pyi"))
    }


def test_the_client_alone_serves_no_model_but_says_so(client_alone: CleanEnvironment, tmp_path: Path) -> None:
    """All of its public names are there, but for the two that start services."""
    code = (
        "import cadenza\n"
        "for name in cadenza.__all__:\n"
        "    try:\n"
        "        getattr(cadenza, name)\n"
        "    except ImportError as error:\n"
        "        print(name, 'client alone' in str(error))"
    )
    assert client_alone.python(code).splitlines() == ["LLM True", "LocalServices True"]
    # By itself: among the shared packages there is a Cadenza that has the command.
    install_wheel(client_alone.wheel, tmp_path)
    command = CleanEnvironment(tmp_path, client_alone.wheel).run("python", "-m", "cadenza")
    assert (command.returncode, command.stderr.startswith("cadenza: this is the client alone")) == (1, True)


def test_types_and_values_of_the_client_have_the_same_names() -> None:
    typed = re.findall(r"^from [\w.]+ import (\w+) as \1$", (ROOT / "client/cadenza/__init__.pyi").read_text(), re.M)
    assert sorted(typed) == sorted(cadenza.__all__)


def test_the_console_script_runs(clean: CleanEnvironment) -> None:
    result = clean.run("cadenza", "--version")
    assert (result.returncode, result.stdout) == (0, f"cadenza {clean.wheel.name.split('-')[1]}\n")


def test_the_extra_serve_brings_all_that_the_services_need(clean: CleanEnvironment) -> None:
    """Its requirements, with those of the extras that it names, hold here: what is tested is what it installs."""
    needed = requirements(clean.wheel, {"serve"})
    assert {"typer", "rich", "torch", "transformers", "uvloop", "pydantic-settings", "grpcio"} <= needed.keys()
    for name, requirement in needed.items():
        assert requirement.specifier.contains(metadata.version(name), prereleases=True), requirement


def requirements(wheel: Path, extras: set[str]) -> dict[str, Requirement]:
    """What the wheel requires on this machine, with `extras`; an extra may name others of the same package."""
    with zipfile.ZipFile(wheel) as file:
        (path,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        text = file.read(path).decode()
    wheel_metadata = email.message_from_string(text)
    assert extras <= set(wheel_metadata.get_all("Provides-Extra", []))
    found = {}
    for line in wheel_metadata.get_all("Requires-Dist", []):
        requirement = Requirement(line)
        if any(requirement.marker is None or requirement.marker.evaluate({"extra": extra}) for extra in extras):
            if requirement.name == "cadenza":
                found |= requirements(wheel, requirement.extras)
            else:
                found[requirement.name] = requirement
    return found


def test_the_lines_for_the_cpu_build_of_torch_are_those_of_the_extra(clean: CleanEnvironment) -> None:
    torch = requirements(clean.wheel, {"executor"})["torch"]
    pages = [ROOT / "Makefile", *(ROOT / "docs").glob("*.md"), ROOT / "README.md"]
    lines = re.findall(r"pip install '(torch[<>=][^']+)'", "".join(page.read_text() for page in pages))
    assert len(lines) >= 2
    assert [Requirement(line).specifier for line in lines] == [torch.specifier] * len(lines)


@pytest.mark.long
def test_the_demo_needs_a_model_outside_the_repository(clean: CleanEnvironment) -> None:
    refused = clean.run("cadenza", "demo")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert "give --model FOLDER_OR_HUB_ID" in line
    served = clean.run("cadenza", "demo", "--model", ROOT / "models" / "cadenza-demo")
    assert served.returncode == 0, served.stderr
    assert "75" in served.stdout
    assert "static batches" in served.stdout


@pytest.mark.long
def test_a_missing_package_is_named_with_a_command_that_installs_it(clean: CleanEnvironment, tmp_path: Path) -> None:
    """In an environment with the wheel alone, without what it requires."""
    install_wheel(clean.wheel, tmp_path)
    bare = CleanEnvironment(tmp_path, clean.wheel)
    programs = {
        "cli": ("cadenza", "--version"),
        "scheduler": ("python", "-m", "scheduler_svc"),
        "executor": ("python", "-m", "executor_svc"),
    }
    for extra, program in programs.items():
        result = bare.run(*program)
        assert result.returncode == 1
        (command,) = re.findall(r": (pip install .*)\n", result.stderr)
        assert command == f"pip install 'cadenza[{extra}] @ {clean.wheel.as_uri()}'"
        # pip takes it: the place is there, and the wheel has the extra. Nothing is fetched.
        pip, *arguments = shlex.split(command)
        dry = ["--dry-run", "--no-deps", "--no-index", "--force-reinstall"]
        run(sys.executable, "-m", pip, "--python", tmp_path / "bin" / "python", *arguments, *dry, cwd=tmp_path)


# Runs the command line without the packages named in its first argument.
WITHOUT = """
import sys
_, without, *arguments = sys.argv
sys.modules.update(dict.fromkeys(without.split(",")))
sys.argv = ["cadenza", *arguments]
from cadenza_cli import main
main()
"""


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("without", "command", "message"),
    [
        ("scipy", "loadtest --request-rate 4", "the load test needs scipy: {loadtest}"),
        ("matplotlib,scipy", "simulate", "the simulator needs matplotlib, scipy: {both}"),
        ("matplotlib", "simulate --request-rate 4", "the simulator needs matplotlib: {both}"),
        ("aiohttp", "fit-costs recording", "fit-costs needs aiohttp: {both}"),
        (
            "pydantic_settings",
            "up --max-num-seqs 3",
            "there is no option --max-num-seqs (not all options of `cadenza up` are installed here: {serve})",
        ),
        (
            "pydantic_settings",
            "loadtest --request-rate 4",
            "there is no option --request-rate (not all options of `cadenza loadtest` are installed here: {loadtest})",
        ),
    ],
)
def test_a_command_whose_packages_are_missing_says_so(
    clean: CleanEnvironment, without: str, command: str, message: str
) -> None:
    extras = {"serve": "serve", "loadtest": "loadtest", "both": "loadtest,scheduler"}
    lines = {name: f"pip install 'cadenza[{extra}] @ {clean.wheel.as_uri()}'" for name, extra in extras.items()}
    result = clean.run("python", "-c", WITHOUT, without, *command.split())
    assert (result.returncode, result.stderr) == (2, f"cadenza: {message.format(**lines)}\n")


def test_the_modules_of_the_load_test_are_those_of_its_extra(clean: CleanEnvironment) -> None:
    own = requirements(clean.wheel, {"loadtest"}).keys() - requirements(clean.wheel, {"cli"}).keys()
    assert sorted(name.replace("-", "_") for name in own) == sorted(LOADTEST_MODULES)
