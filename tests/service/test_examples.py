"""The programs in examples/ and on docs/callers.md, run as a stranger would: as processes, against a real server."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from cadenza import Client, LocalServices, SamplingParams
from tests.helpers.paths import ROOT
from tests.helpers.scripted_executor import ScriptedExecutor, serve
from tests.helpers.services import Running, connection, scheduler_service

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

EXAMPLES = ROOT / "examples"
PROMPT = "What is 27 + 48?"
GREEDY = SamplingParams(temperature=0, max_tokens=64)


@pytest.fixture(scope="module")
def target() -> Iterator[str]:
    with LocalServices(str(ROOT / "models" / "cadenza-demo"), port=0) as services:
        yield services.target


@pytest.fixture(scope="module")
def answers(target: str) -> dict[str, str]:
    """Our client's greedy answers."""
    prompts = [PROMPT, "Hello!", "Count from 3 to 9."]
    with Client(target) as client:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = client.chat(chats, GREEDY)
    return {prompt: output.outputs[0].text for prompt, output in zip(prompts, outputs, strict=True)}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """What a program prints; it must end well and have nothing to complain of."""
    result = subprocess.run(command, cwd=cwd, capture_output=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout.decode()


# --- Python ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_the_python_examples_use_the_stubs_alone(path: Path) -> None:
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module or "")
        elif isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
    third_party = {name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names}
    assert third_party <= {"cadenza.v1", "grpc", "grpc_status", "google.rpc"}


async def test_python_stubs(target: str, answers: dict[str, str]) -> None:
    lines = run(sys.executable, EXAMPLES / "python_stubs.py", "--target", target, PROMPT).splitlines()
    r0, r1, r2 = answers.values()
    assert lines == [
        r0,
        "[FINISH_REASON_STOP]",
        "[INVALID_ARGUMENT] sampling_params.top_p: must be over 0 and at most 1, not 2.0",
        "[cancelled] CANCELLED",
        "[deadline] DEADLINE_EXCEEDED",
        "[timeout_s] FINISH_DETAIL_DEADLINE",
        f"[r0] {r0}",
        f"[r1] {r1}",
        f"[r2] {r2}",
        r0,
    ]
    async with connection(target) as running:
        await running.wait_until_free()


# --- thousands of requests over one session --------------------------------------------------------------------------


@dataclass
class Load:
    """The load caller's process, and what it runs against."""

    executor: ScriptedExecutor
    running: Running

    async def start(self, *options: object) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *(sys.executable, str(EXAMPLES / "session_load.py"), "--target", self.running.target, *map(str, options)),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def wait_for_requests(self, count: int) -> None:
        """Return once the server knows this many; each look costs a call, so this does not spin."""
        async with asyncio.timeout(60):
            while (load := await self.running.load()).num_waiting + load.num_running < count:
                pass

    async def report(self, process: asyncio.subprocess.Process) -> dict[str, int]:
        """The numbers of the report of a run that went well."""
        async with asyncio.timeout(120):
            out, err = await process.communicate()
        assert process.returncode == 0, (out, err)
        numbers = r"requests +(\d+) ok\nin flight +(\d+) at most; (\d+) refusals, .*\nreceived +(\d+) tokens in (\d+) "
        names = ("ok", "in_flight", "refusals", "tokens", "messages")
        found = re.match(numbers, out.decode())
        assert found is not None, out
        return dict(zip(names, map(int, found.groups()), strict=True))


@asynccontextmanager
async def load_on(max_queued_requests: int) -> AsyncIterator[Load]:
    """A real scheduler, whose executor waits for the test to let it go on."""
    executor = ScriptedExecutor(max_num_seqs=256, num_blocks=4096)
    server, address = await serve(executor)
    async with scheduler_service(address, skip_tokenizer_init=True, max_queued_requests=max_queued_requests) as running:
        yield Load(executor, running)
        await running.wait_until_free()
    await server.stop(0)


async def test_thousands_in_flight_end_once_each_with_all_their_tokens() -> None:
    async with load_on(max_queued_requests=5000) as load:
        load.executor.going.clear()
        process = await load.start("--requests", 2500, "--in-flight", 2000, "--max-tokens", 8)
        await load.wait_for_requests(2000)
        load.executor.going.set()
        report = await load.report(process)
        assert (report["ok"], report["in_flight"], report["refusals"]) == (2500, 2000, 0)
        assert 2500 <= report["tokens"] == (await load.running.load()).num_output_tokens
        assert report["messages"] * 4 < report["tokens"], "what a step made should travel together"


async def test_refused_requests_come_back_until_they_are_served() -> None:
    async with load_on(max_queued_requests=100) as load:
        load.executor.going.clear()
        process = await load.start("--requests", 1000, "--in-flight", 1000, "--max-tokens", 4)
        assert process.stderr is not None
        async with asyncio.timeout(60):
            first = await process.stderr.readline()
        assert first == b"refused, to be sent again: 100 requests wait already (max_queued_requests)\n"
        load.executor.going.set()
        report = await load.report(process)
        assert report["ok"] == 1000
        assert report["refusals"] > 0
        assert report["tokens"] == (await load.running.load()).num_output_tokens


async def test_an_open_loop_sends_at_its_rate_whatever_the_server_does() -> None:
    async with load_on(max_queued_requests=5000) as load:
        load.executor.going.clear()
        process = await load.start("--requests", 300, "--rate", 1000, "--in-flight", 1, "--max-tokens", 4)
        await load.wait_for_requests(300)
        load.executor.going.set()
        report = await load.report(process)
        assert (report["ok"], report["in_flight"]) == (300, 300)


async def test_wrong_requests_are_counted_and_the_exit_status_says_so() -> None:
    async with load_on(max_queued_requests=5000) as load:
        process = await load.start("--requests", 20, "--prompt-tokens", load.executor.max_model_len + 1)
        out, _ = await process.communicate()
    assert process.returncode == 1
    assert re.match(r"requests +20 prompt: has 257 tokens", out.decode()), out


async def test_a_stream_that_breaks_is_reported() -> None:
    executor = ScriptedExecutor()
    executor.going.clear()
    server, address = await serve(executor)
    async with scheduler_service(address, skip_tokenizer_init=True) as running:
        load = Load(executor, running)
        process = await load.start("--requests", 200)
        await load.wait_for_requests(200)
    out, err = await process.communicate()
    await server.stop(0)
    assert process.returncode == 1
    assert err == b"the stream broke: StatusCode.UNAVAILABLE: the service is stopping\n"
    assert re.match(r"requests +200 unfinished\nin flight +200 at most", out.decode()), out


# --- Node ------------------------------------------------------------------------------------------------------------

_NO_NETWORK = re.compile(
    r"^npm error (?:code|errno) (ENOTFOUND|EAI_AGAIN|ECONNREFUSED|ECONNRESET|ENETUNREACH|EHOSTUNREACH|ETIMEDOUT|"
    r"ERR_SOCKET_TIMEOUT|EIDLETIMEOUT|FETCH_ERROR|ENOTCACHED)$",
    re.MULTILINE,
)


def npm_ci(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", *options]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)


@pytest.fixture(scope="module")
def node_sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of examples/node, in a folder that is laid out as the repository is."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node")
    root = tmp_path_factory.mktemp("checkout")
    (root / "protos").symlink_to(ROOT / "protos")
    folder = root / "examples" / "node"
    shutil.copytree(EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    return folder


@pytest.fixture(scope="module")
def node_folder(node_sources: Path) -> Path:
    """The same with its packages, by the committed lock file."""
    result = npm_ci(node_sources)
    no_network = _NO_NETWORK.search(result.stderr)
    if result.returncode != 0 and no_network:
        pytest.skip(f"npm cannot reach its registry: {no_network[1]}")
    assert result.returncode == 0, result.stderr
    return node_sources


def test_only_a_missing_network_is_taken_for_one(node_sources: Path, tmp_path: Path) -> None:
    """Otherwise a broken example could pass as skipped."""
    shutil.copytree(node_sources, tmp_path / "node", ignore=shutil.ignore_patterns("node_modules"))
    offline = ("--cache", str(tmp_path / "cache"), "--fetch-retries", "0", "--registry", "http://127.0.0.1:9")
    refused = npm_ci(tmp_path / "node", *offline)
    assert refused.returncode != 0
    assert _NO_NETWORK.search(refused.stderr), refused.stderr
    (tmp_path / "node" / "package-lock.json").unlink()
    broken = npm_ci(tmp_path / "node", *offline)
    assert broken.returncode != 0
    assert not _NO_NETWORK.search(broken.stderr), broken.stderr


def test_node_gets_the_same_text(target: str, answers: dict[str, str], node_folder: Path) -> None:
    for prompt, answer in answers.items():
        assert run("node", "generate.js", target, prompt, cwd=node_folder) == answer + "\n"


# --- docs/callers.md -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Block:
    """A fenced block of the page; `expected` is the ```text block right after it."""

    info: str
    text: str
    expected: str | None


def blocks() -> list[Block]:
    page = (ROOT / "docs" / "callers.md").read_text()
    fenced = re.compile(r"^```([^\n]+)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
    return [Block(*found.groups()) for found in fenced.finditer(page)]


def one(info: str) -> Block:
    (block,) = (block for block in blocks() if block.info == info)
    return block


def test_the_page_has_no_other_kind_of_block() -> None:
    assert {block.info for block in blocks()} == {"sh", "sh run", "python", "python run", "js", "js run"}


def test_excerpts_are_what_the_examples_say() -> None:
    python = "\n".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    sources = {"python": python, "js": (EXAMPLES / "node" / "generate.js").read_text()}
    for block in blocks():
        if block.info in sources:
            assert block.text in sources[block.info]


def test_the_python_program_of_the_page(target: str, tmp_path: Path) -> None:
    block = one("python run")
    assert run(sys.executable, "-c", block.text, target, cwd=tmp_path) == block.expected


def test_the_node_program_of_the_page(target: str, node_folder: Path) -> None:
    block = one("js run")
    (node_folder / "page.js").write_text(block.text)
    assert run("node", "page.js", target, cwd=node_folder) == block.expected


def test_the_descriptor_commands_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    run("bash", "-e", "-c", one("sh run").text, cwd=tmp_path)
    for name in ("cadenza.binpb", "cadenza.pb"):
        files = FileDescriptorSet.FromString((tmp_path / name).read_bytes()).file
        assert {"cadenza/v1/generation.proto", "google/rpc/status.proto"} <= {file.name for file in files}


def test_the_commands_of_the_page_exist() -> None:
    """Examples are called by a path that is there, with options that they have."""
    text = "".join(block.text for block in blocks() if block.info == "sh")
    for path, options in re.findall(r"python (examples/\S+)((?: --\S+ \S+)*)", text):
        usage = run(sys.executable, ROOT / path, "--help")
        for option in re.findall(r"--\S+", options):
            assert option in usage
    assert (EXAMPLES / "node" / "package-lock.json").exists()
