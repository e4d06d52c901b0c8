"""docs/questions.md as it stands there: its commands, its systemd unit, its nginx configuration, its formula."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cadenza import Client, LocalServices
from cadenza_cli.effective_options import effective_options
from tests.helpers.models.chat_templates import QWEN_THINKING
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "questions.md").read_text()
ANSWERS = dict(re.findall(r"^## (.*?)\n(.*?)(?=^## |\Z)", PAGE, re.S | re.M))
USER = [{"role": "user", "content": "Hello"}]
NEEDS_NGINX = pytest.mark.skipif(
    not shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin"),
    reason="nginx is not installed (tests/service/debian-packages.txt)",
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def block(language: str, start: str, number: int = 0) -> str:
    """A code block of the answer whose question begins so."""
    (answer,) = (text for question, text in ANSWERS.items() if question.startswith(start))
    return re.findall(rf"^```{language}\n(.*?)^```$", answer, re.S | re.M)[number]


def free_port() -> str:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run: the models of the clone, and `cadenza` as in an activated .venv."""
    folder = tmp_path_factory.mktemp("questions")
    (folder / "models").symlink_to(ROOT / "models")
    command = folder / "cadenza"
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT}:{ROOT / "client"} exec {sys.executable} -m cadenza "$@"\n')
    command.chmod(0o755)
    return folder


def sh(command: str, folder: Path) -> str:
    """What a command prints; it must end well."""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def started(command: str, folder: Path, url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A server that a line of the page starts, once it is healthy; it must end well at SIGTERM."""
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=log, stderr=log
        )
    try:
        for _ in range(240):
            assert server.poll() is None, (folder / "log").read_text()
            if subprocess.run(["curl", "-skf", "-o", "/dev/null", f"{url}/health"], check=False).returncode == 0:
                break
            time.sleep(0.5)
        yield server
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0


def status(url: str, *options: str) -> str:
    command = ["curl", "-s", "-o", "/dev/null", "-w", "%{http_code}", *options, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout


@pytest.fixture(scope="module")
def services(folder: Path) -> Iterator[LocalServices]:
    """As in "How long may a context be?", with a template that reads enable_thinking."""
    template = folder / "thinking.jinja"
    template.write_text(QWEN_THINKING)
    line = next(each for each in block("sh", "How long").splitlines() if " up " in each)
    (length,) = re.findall(r"--max-model-len (\d+)", line)
    with LocalServices(
        str(ROOT / "models" / "cadenza-demo"),
        http="0",
        max_model_len=int(length),
        chat_template=str(template),
        trust_request_chat_template=True,
    ) as running:
        yield running


def ask(command: str, services: LocalServices, folder: Path) -> dict:
    return json.loads(sh(command.replace("127.0.0.1:8000", services.http), folder))


def test_the_memory_formula_is_what_up_prints(services: LocalServices, folder: Path) -> None:
    program = block("python", "How much memory")
    printed = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    a_token, a_block = (int(each.replace(",", "")) for each in re.findall(r"([\d,]+) bytes", printed))
    text = "\n".join(effective_options(services, {}))
    assert f"({a_block:,} bytes) each" in text
    # No more than max_model_len x max_num_seqs tokens, rounded up to blocks.
    (tokens, length, requests) = (
        int(re.search(pattern, text)[1].replace(",", ""))
        for pattern in (r"capacity ([\d,]+) tokens", r"max_model_len (\d+)", r"max_num_seqs (\d+)")
    )
    assert tokens <= length * requests
    assert f"({tokens * a_token:,} bytes) in all" in text


def test_the_longest_context_is_said_and_held(services: LocalServices, folder: Path) -> None:
    up, curl = block("sh", "How long").splitlines()
    models = ask(curl, services, folder)["data"]
    assert {str(each["max_model_len"]) for each in models} == {up.split()[-1]}
    body = {"prompt": "5 " * 1200, "max_tokens": 1}
    url = f"http://{services.http}/v1/completions"
    too_long = sh(f"curl -s {url} -d '{json.dumps(body)}'", folder)
    assert json.loads(too_long)["error"]["code"] == "context_length_exceeded"
    cut = sh(f"curl -s {url} -d '{json.dumps({**body, 'truncate_prompt_tokens': 8})}'", folder)
    assert json.loads(cut)["usage"]["prompt_tokens"] == 8


def test_thinking_stops_by_the_fields_of_a_request(services: LocalServices, folder: Path) -> None:
    url = f"http://{services.http}/v1"
    chats = {"messages": USER, "max_tokens": 2}
    thinks = json.loads(sh(f"curl -s {url}/chat/completions -d '{json.dumps(chats)}'", folder))
    with Client(services.target) as client:
        prompts = [len(client.tokenize(USER, chat_template_kwargs=given)) for given in ({}, {"enable_thinking": False})]
    assert prompts[0] < prompts[1], "the template closes the thought"
    assert thinks["usage"]["prompt_tokens"] == prompts[0]
    commands = block("sh", "How do I stop").splitlines()
    assert len(commands) == 2
    for command in commands:
        assert ask(command, services, folder)["usage"]["prompt_tokens"] == prompts[1]
    enabled = {"type": "enabled", "budget_tokens": 1024}
    for given, length in (({"type": "disabled"}, prompts[1]), (enabled, prompts[0])):
        body = {"model": "cadenza-demo", "messages": USER, "thinking": given}
        answer = sh(f"curl -s {url}/messages/count_tokens -d '{json.dumps(body)}'", folder)
        assert json.loads(answer)["input_tokens"] == length


def test_a_template_says_it_for_all_requests(services: LocalServices, folder: Path) -> None:
    command = block("sh", "How do I stop", 1)
    sh(command, folder)
    with Client(services.target) as client:
        demo = (folder / "models" / "cadenza-demo" / "chat_template.jinja").read_text()
        made = (folder / "no-thinking.jinja").read_text()
        assert client.tokenize(USER, chat_template=made) == client.tokenize(USER, chat_template=demo)
        sh(command.replace("models/cadenza-demo/chat_template.jinja", "thinking.jinja"), folder)
        made = (folder / "no-thinking.jinja").read_text()
        never = client.tokenize(USER, chat_template_kwargs={"enable_thinking": False})
        assert client.tokenize(USER, chat_template=made) == never


def test_the_page_s_chat_template_writes_chatml(services: LocalServices) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *USER]
    expected = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    with Client(services.target) as client:
        ids = client.tokenize(messages, chat_template=block("jinja", "Can I change"))
        assert ids == client.tokenize(expected, add_special_tokens=False)


def test_the_path_to_what_is_slow_names_what_there_is(services: LocalServices, folder: Path) -> None:
    (answer,) = (text for question, text in ANSWERS.items() if question.startswith("Why is it slow"))
    rows = re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", answer, re.M)[1:]
    assert len(rows) == 6
    shown = sh(f"cadenza top --once --target {services.target}", folder)
    metrics = urllib.request.urlopen(f"http://{services.http}/metrics", timeout=30).read().decode()
    for top, metric, _ in rows:
        for name in re.findall(r"`(.+?)`", top):
            assert re.search(rf"^ *{re.escape(name)} ", shown, re.M), name
        for name in re.findall(r"`(.+?)`", metric):
            assert f"# TYPE {name} " in metrics, name


def test_two_models_answer_beside_each_other(folder: Path) -> None:
    first, second, curl = block("sh", "How do I serve two").splitlines()
    ports = {each: free_port() for each in ("50051", "50061", "8000", "8001")}

    def moved(line: str) -> str:
        return re.sub(r"\b(50051|50061|8000|8001)\b", lambda found: ports[found[0]], line)

    with (
        started(moved(first), folder, f"http://127.0.0.1:{ports['8000']}"),
        started(moved(second), folder, f"http://127.0.0.1:{ports['8001']}"),
    ):
        for each in (curl, curl.replace("8001", "8000")):
            assert json.loads(sh(moved(each), folder))["choices"][0]["message"]["content"]


@pytest.fixture(scope="module")
def unit() -> dict[str, str]:
    """The last value of each key of the systemd unit."""
    return dict(re.findall(r"^(\w+)=(.*)$", block("ini", "How does it start"), re.M))


@pytest.fixture(scope="module")
def with_keys(folder: Path, unit: dict[str, str]) -> Iterator[tuple[str, str]]:
    """The unit's commands with the page's keys, on free ports: the URL, the scheduler's address."""
    keys, up, _ = block("sh", "How do I ask for API keys").splitlines()
    sh(keys, folder)
    port, scheduler = free_port(), free_port()
    start = unit["ExecStart"].replace("/opt/cadenza/.venv/bin/cadenza", "cadenza").replace("8000", port)
    start = start.replace("/etc/cadenza/keys", "keys").replace("/srv/models/my-model", "models/cadenza-demo")
    assert start == up.replace("8000", port), "the unit does what the answer on keys does"
    with started(f"{start} --port {scheduler}", folder, f"http://127.0.0.1:{port}"):
        sh(unit["ExecStartPost"].replace("8000", port), folder)
        yield f"http://127.0.0.1:{port}", f"127.0.0.1:{scheduler}"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not there")
def test_systemd_takes_the_unit(tmp_path: Path, folder: Path) -> None:
    text = block("ini", "How does it start").replace("/opt/cadenza/.venv/bin/cadenza", str(folder / "cadenza"))
    file = tmp_path / "cadenza.service"
    file.write_text(text)
    verify = ["systemd-analyze", "verify", "--man=no", str(file)]
    done = subprocess.run(verify, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # On a machine that systemd has not started, it also speaks of other things than this file.
    assert "cadenza.service" not in done.stderr, done.stderr


def test_a_key_is_asked_for(with_keys: tuple[str, str], folder: Path) -> None:
    url, _ = with_keys
    curl = block("sh", "How do I ask for API keys").splitlines()[-1]
    models = json.loads(sh(curl.replace("http://127.0.0.1:8000", url), folder))
    assert "cadenza-demo" in {each["id"] for each in models["data"]}
    assert status(f"{url}/v1/models") == "401"
    assert status(f"{url}/v1/models", "-H", "Authorization: Bearer other") == "401"


def test_the_gateway_speaks_tls_itself(with_keys: tuple[str, str], folder: Path) -> None:
    _, scheduler = with_keys
    certs, gateway, curl = block("sh", "Behind nginx").splitlines()
    sh(certs, folder)
    port = free_port()
    with started(
        gateway.replace("127.0.0.1:50051", scheduler).replace("8443", port), folder, f"https://localhost:{port}"
    ):
        models = json.loads(sh(curl.replace("8443", port), folder))
        assert "cadenza-demo" in {each["id"] for each in models["data"]}
        plain = subprocess.run(["curl", "-s", f"http://localhost:{port}/v1/models"], capture_output=True, timeout=30)
        assert plain.returncode != 0


@pytest.fixture
def nginx(with_keys: tuple[str, str], folder: Path, tmp_path: Path) -> Iterator[str]:
    """nginx with the page's configuration, on a free port and with a certificate of its own: the port."""
    port, text = free_port(), block("nginx", "Behind nginx")
    sh(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -keyout key.pem -out cert.pem "
        "-subj /CN=llm.example.org -addext subjectAltName=DNS:llm.example.org",
        tmp_path,
    )
    moves = {
        "443": f"127.0.0.1:{port}",
        "http://127.0.0.1:8000": with_keys[0],
        "/etc/ssl/llm.example.org.pem": str(tmp_path / "cert.pem"),
        "/etc/ssl/llm.example.org-key.pem": str(tmp_path / "key.pem"),
    }
    for old, new in moves.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (tmp_path / "cadenza.conf").write_text(text)
    temps = "".join(
        f"{each}_temp_path {tmp_path}/{each};\n" for each in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = tmp_path / "nginx.conf"
    main.write_text(
        f"daemon off; pid {tmp_path}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{\naccess_log off;\n{temps}include {tmp_path}/cadenza.conf;\n}}\n"
    )
    program = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin")
    assert program
    server = subprocess.Popen([program, "-p", str(tmp_path), "-e", "stderr", "-c", str(main)])
    for _ in range(100):
        assert server.poll() is None
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", int(port))) == 0:
                break
        time.sleep(0.1)
    yield port
    server.terminate()
    assert server.wait(20) == 0


@NEEDS_NGINX
def test_a_stream_comes_through_nginx_as_it_is_made(nginx: str, folder: Path, tmp_path: Path) -> None:
    key = (folder / "keys").read_text().strip()
    curl = ["curl", "-sN", "--cacert", str(tmp_path / "cert.pem"), "--resolve", f"llm.example.org:{nginx}:127.0.0.1"]
    url = f"https://llm.example.org:{nginx}/v1"
    assert status(f"{url}/models", *curl[1:]) == "401"
    assert (
        status(f"{url}/models", *curl[1:], "-H", f"Authorization: Bearer {key}", "-H", f"Origin: {url[:-3]}") == "200"
    )
    body = {"messages": USER, "stream": True, "max_tokens": 400, "ignore_eos": True}
    command = [*curl, f"{url}/chat/completions", "-H", f"Authorization: Bearer {key}", "-d", json.dumps(body)]
    times = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as asking:
        assert asking.stdout is not None
        lines = []
        for line in asking.stdout:
            if line.startswith("data: "):
                lines.append(line)
                times.append(time.monotonic())
    assert lines[-1] == "data: [DONE]\n"
    # Collected by nginx it would come in pieces of a few KB, at most some tens of them; the model takes a second.
    assert len({round(each, 2) for each in times}) > 30, len(lines)
