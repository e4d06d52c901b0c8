"""`cadenza up` for real: what it prints, where its options come from, whose log line is whose."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys

import grpc
import psutil
import pytest
import torch

from cadenza import LLM, Client
from cadenza.errors import OptionError
from cadenza.v1 import execution_pb2, execution_pb2_grpc
from tests.checkpoints import make_llama

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_llama(tmp_path_factory.mktemp("model"), tokenizer=True, vocab_size=300)


@pytest.fixture(scope="module")
def running(model, tmp_path_factory):
    """One `cadenza up` whose options come from everywhere, and what it has said when it is ready."""
    file = tmp_path_factory.mktemp("options") / "cadenza.toml"
    file.write_text(
        f"model = {str(model)!r}\nport = 1\nblock-size = 8\nnum_gpu_blocks = 1\nmax_num_seqs = 7\n"
        "[scheduler]\nmax_num_seqs = 5\n"
    )
    environment = {"CADENZA_NUM_GPU_BLOCKS": "50", "CADENZA_DTYPE": "float32", "CADENZA_BLOK_SIZE": "16"}
    log = file.with_name("log")
    with log.open("wb") as stderr:
        up = subprocess.Popen(
            [sys.executable, "-m", "cadenza", "up", "--config", str(file), "--port", "0", "--max-model-len", "256"],
            stdout=subprocess.PIPE, stderr=stderr, text=True, env={**os.environ, **environment},
        )  # fmt: skip
    ready = up.stdout.readline()
    said = log.read_text()
    assert ready.startswith("ready 127.0.0.1:"), said
    yield up, ready.split()[1], said, file
    up.send_signal(signal.SIGTERM)
    assert up.wait(60) == 0
    assert up.stdout.read() == "", "stdout holds the ready line alone"
    up.stdout.close()


def test_the_settings_in_force_are_printed(running, model):
    _, target, said, file = running
    with Client(target) as client:
        info, options = client.model_info(), client.server_info().options
        (executor,) = client.server_info().executors
    with grpc.insecure_channel(executor.target) as channel:
        describe = execution_pb2_grpc.ExecutionServiceStub(channel).Describe
        described = describe(execution_pb2.DescribeRequest(), timeout=10)
    kv, prints, weight_bytes = described.kv, described.fingerprint, described.model.weight_bytes
    assert (kv.num_device_blocks, kv.block_size, info.max_model_len) == (50, 8, 256)
    assert (options["max_num_seqs"], options["max_num_batched_tokens"]) == ("5", "512")
    lines = [line.removeprefix("cadenza   │ ") for line in said.splitlines() if line.startswith("cadenza   │ ")]
    memory = lines.pop(7)
    assert re.fullmatch(r"memory    executor [\d.]+ MiB, scheduler [\d.]+ MiB resident", memory)
    threads = f"{prints.num_threads} thread{'' if prints.num_threads == 1 else 's'}"
    ends = ", ".join(f"</s> ({each})" if each == 1 else str(each) for each in info.eos_token_ids)
    assert lines == [
        "CADENZA_BLOK_SIZE in the environment is not an option; did you mean CADENZA_BLOCK_SIZE?",
        f"model     {model}",
        f"          LlamaForCausalLM, {info.num_parameters / 1000:.3g} thousand parameters ({info.num_parameters:,})",
        f"weights   float32, {weight_bytes / 1024:.1f} KiB ({weight_bytes:,} bytes)",
        f"device    cpu, {threads}, numerics exact",
        "KV cache  50 blocks of 8 tokens, capacity 400 tokens",
        f"          float32, {kv.bytes_per_block / 1024:.1f} KiB ({kv.bytes_per_block:,} bytes) each, "
        f"{50 * kv.bytes_per_block / 1024:.1f} KiB ({50 * kv.bytes_per_block:,} bytes) in all",
        "limits    max_model_len 256, max_num_seqs 5, max_num_batched_tokens 512",
        f"tokenizer {model}",
        f"ends at   {ends}",
        f"listens   scheduler on {target}, executor on {executor.target}",
        "          by gRPC alone; --http PORT serves OpenAI's and Anthropic's APIs too",
        "set by    the command line: port 0, max_model_len 256",
        "          CADENZA_DTYPE: dtype float32",
        "          CADENZA_NUM_GPU_BLOCKS: num_gpu_blocks 50",
        f"          {file}: model {model}, block_size 8, max_num_seqs 5",
        "          all other options are at their defaults",
    ]


def summary(log) -> dict[str, str]:
    """The next settings in force that `cadenza up` prints: text by label, of several lines the last."""
    found, label = {}, ""
    for line in log:
        if not line.startswith("cadenza   │ ") or " died" in line or " is back" in line:
            continue
        text = line.removeprefix("cadenza   │ ").rstrip("\n")
        if text.strip() == "all other options are at their defaults":
            return found
        label = text[:10].strip() or f"{label} "
        found[label] = text[10:]
    raise AssertionError(found)


def service(up: subprocess.Popen, name: str) -> psutil.Process:
    (found,) = (child for child in psutil.Process(up.pid).children() if name in child.cmdline())
    return found


def mib(text: str, of: str) -> float:
    return float(re.search(rf"{of} ([\d.]+) MiB", text)[1])


@pytest.mark.interpreter  # a fork's memory is its server's too, and is given back
@pytest.mark.long
def test_what_is_chosen_is_printed_also_by_an_executor_that_came_back(tmp_path):
    """Left to itself: the checkpoint's data type, all cores, the blocks that 64 sequences could use."""
    model = make_llama(tmp_path / "model", dtype=torch.bfloat16, tokenizer=True, vocab_size=300)
    cores = len(os.sched_getaffinity(0))
    with subprocess.Popen(
        [sys.executable, "-m", "cadenza", "up", "--model", str(model), "--port", "0"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as up:  # fmt: skip
        try:
            incarnations = set()
            for _ in range(2):
                chosen = summary(up.stderr)
                target, address = re.fullmatch(r"scheduler on (\S+), executor on (\S+)", chosen["listens"]).groups()
                with grpc.insecure_channel(address) as channel:
                    describe = execution_pb2_grpc.ExecutionServiceStub(channel).Describe
                    described = describe(execution_pb2.DescribeRequest(), timeout=10)
                kv, length = described.kv, described.model.max_model_len
                num_blocks = 64 * -(-length // 16)
                assert (kv.num_device_blocks, kv.block_size, described.model.dtype) == (num_blocks, 16, "bfloat16")
                assert described.fingerprint.num_threads == cores
                assert chosen["weights"].startswith("bfloat16, ")
                assert f"({2 * described.model.num_parameters:,} bytes)" in chosen["weights"]
                assert chosen["device"] == f"cpu, {cores} thread{'s' if cores > 1 else ''}, numerics exact"
                assert chosen["KV cache"].startswith(
                    f"{num_blocks:,} blocks of 16 tokens, capacity {num_blocks * 16:,}"
                )
                assert chosen["KV cache "].startswith("bfloat16, ")
                assert f"({kv.bytes_per_block:,} bytes) each" in chosen["KV cache "]
                assert f"({num_blocks * kv.bytes_per_block:,} bytes) in all" in chosen["KV cache "]
                incarnations.add(described.incarnation)
                with Client(target) as client:
                    reported = client.server_info()
                for name, resident_bytes in (
                    ("executor", reported.executors[0].resident_bytes), ("scheduler", reported.resident_bytes),
                ):  # fmt: skip
                    held = service(up, f"{name}_svc").memory_info().rss
                    assert resident_bytes == pytest.approx(held, rel=0.1)
                    assert mib(chosen["memory"], name) == pytest.approx(held / 2**20, rel=0.1)
                service(up, "executor_svc").kill()
            assert len(incarnations) == 2
        finally:
            up.send_signal(signal.SIGTERM)
            up.communicate(timeout=20)


def test_every_line_says_whose_it_is(running):
    """Also where stderr is a file and there are no colours."""
    _, _, said, _ = running
    for line in said.splitlines():
        assert re.match(r"(cadenza  |executor |scheduler) │ ", line), line
    assert "\x1b" not in said
    for service in ("executor ", "scheduler"):
        assert f"{service} │ " in said


def test_the_logs_hold_no_second_warning(running):
    """The services get their options as arguments and need not look at the environment again."""
    _, _, said, _ = running
    assert said.count("CADENZA_BLOK_SIZE") == 1
    assert "ignored, not options" not in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("block_sise = 8", "cadenza: {}: block_sise: there is no such option; did you mean block_size?"),
        ("block_size = 9", "cadenza: {}: option block_size: must be 8, 16, 32 or 64"),
        ("a = 1\nb = x", "cadenza: {}: this is not TOML: Invalid value (at line 2, column 5)"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path, model, content, message):
    file = tmp_path / "wrong.toml"
    file.write_text(content)
    command = [sys.executable, "-m", "cadenza", "up", "--model", str(model), "--config", str(file)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr.splitlines()) == (2, "", [message.format(file)])


def test_a_taken_port_is_named_with_where_it_was_said(tmp_path, model):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        environment = {**os.environ, "CADENZA_MODEL": str(model), "CADENZA_PORT": str(port)}
        command = [sys.executable, "-m", "cadenza", "up"]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert result.returncode == 2
    assert result.stderr == (
        f"cadenza: option port: cannot listen on 127.0.0.1:{port}: address already in use; "
        "another program listens there: choose another port, or 0 for any free one\n"
    )


def test_llm_takes_a_file_too(model, tmp_path):
    file = tmp_path / "cadenza.toml"
    file.write_text("num_gpu_blocks = 40\nmax_num_seqs = 3\n")
    with LLM(model, config=file, max_num_seqs=2, num_threads=1) as llm:
        assert llm.server_info().load.num_device_blocks == 40
        assert llm.server_info().options["max_num_seqs"] == "2"
        chat = [{"role": "user", "content": "你好"}]
        ids = llm.tokenize(chat)
        assert llm.detokenize(ids, skip_special_tokens=False) == "<s><|user|>你好</s><|assistant|>"
        assert llm.detokenize(llm.tokenize("cafe\u0301 👍🏽")) == "cafe\u0301 👍🏽"
        (output,) = llm.chat(chat)
        assert output.prompt_token_ids == ids
        both = llm.chat([chat, chat], add_generation_prompt=False)
        assert [each.prompt_token_ids for each in both] == [ids[:-1]] * 2
    with pytest.raises(OptionError, match=r"cadenza.toml: no such file"):
        LLM(model, config=tmp_path / "no" / "cadenza.toml")
