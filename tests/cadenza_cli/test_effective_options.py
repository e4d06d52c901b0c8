"""The effective options that `cadenza up` prints, of one executor and of several."""

from __future__ import annotations

from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cadenza.calls.loop_thread import LoopThread
from cadenza.v1 import execution_pb2, execution_pb2_grpc, generation_pb2, generation_pb2_grpc, types_pb2
from cadenza_cli.effective_options import effective_options
from cadenza_launcher.services.options import Setting

MIB = 2**20
GRPC_ALONE = "          by gRPC alone; --http PORT serves OpenAI's and Anthropic's APIs too"


class Executor(execution_pb2_grpc.ExecutionServiceServicer):
    """Describes itself, with this many KV blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks

    async def Describe(self, request, context):
        return execution_pb2.DescribeResponse(
            device="cpu",
            model=execution_pb2.ModelGeometry(dtype="float32", weight_bytes=2 * MIB),
            kv=execution_pb2.KvGeometry(
                num_device_blocks=self.num_blocks, block_size=16, bytes_per_block=1024, dtype="float32"
            ),
            fingerprint=types_pb2.NumericsFingerprint(num_threads=1, mode=types_pb2.NUMERICS_MODE_EXACT),
        )


class Scheduler(generation_pb2_grpc.GenerationServiceServicer, health_pb2_grpc.HealthServicer):
    """Serves, and knows the memory of the executors at these addresses: 1 MiB, 2 MiB and so on."""

    info = generation_pb2.GetModelInfoResponse(model="m", architecture="Llama", max_model_len=64)

    def __init__(self, executors: list[str]) -> None:
        self.executors = executors

    async def Watch(self, request, context):
        yield health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def GetModelInfo(self, request, context):
        return self.info

    async def GetServerInfo(self, request, context):
        executors = [
            generation_pb2.ExecutorInfo(target=target, resident_bytes=place * MIB)
            for place, target in enumerate(self.executors, start=1)
        ]
        options = {"max_num_seqs": "4", "max_num_batched_tokens": "512", "tokenizer": "t"}
        return generation_pb2.GetServerInfoResponse(executors=executors[::-1], options=options, resident_bytes=9 * MIB)


@pytest.fixture
def lines():
    """Makes the lines of a server whose executors have so many blocks; None: one that does not answer."""
    loop, servers = LoopThread.shared(), []

    async def start(*adders) -> str:
        server = grpc.aio.server()
        for add in adders:
            add(server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        servers.append(server)
        return address

    def make(*blocks: int | None, **gateway: str) -> list[str]:
        adders = [
            (lambda server, num=num: execution_pb2_grpc.add_ExecutionServiceServicer_to_server(Executor(num), server))
            for num in blocks
        ]
        at = ["127.0.0.1:1" if num is None else loop.run(start(add)) for num, add in zip(blocks, adders, strict=True)]
        scheduler = Scheduler(at)
        names = ["executor"] if len(blocks) == 1 else [f"executor {index}" for index in range(len(blocks))]
        address = loop.run(
            start(
                lambda server: generation_pb2_grpc.add_GenerationServiceServicer_to_server(scheduler, server),
                lambda server: health_pb2_grpc.add_HealthServicer_to_server(scheduler, server),
            )
        )
        addresses = dict(zip(names, at, strict=True)) | {"scheduler": address}
        services = SimpleNamespace(
            addresses=addresses,
            executors=names,
            settings={"executors": Setting(len(names))},
            tls=None,
            executor_tls=None,
            gateway=gateway,
        )
        made = effective_options(services, {})
        for name, target in addresses.items():
            made = [line.replace(target, f"<{name}>") for line in made]
        return made

    yield make
    for server in servers:
        loop.run(server.stop(0))


def test_one_executor(lines):
    made = lines(2048)
    assert made[3:8] == [
        "device    cpu, 1 thread, numerics exact",
        "KV cache  2,048 blocks of 16 tokens, capacity 32,768 tokens",
        "          float32, 1.0 KiB (1,024 bytes) each, 2.0 MiB (2,097,152 bytes) in all",
        "memory    executor 1.0 MiB, scheduler 9.0 MiB resident",
        "limits    max_model_len 64, max_num_seqs 4, max_num_batched_tokens 512",
    ]
    assert made[10:12] == ["listens   scheduler on <scheduler>, executor on <executor>", GRPC_ALONE]


def test_executors_that_are_equal_share_a_row_and_others_have_one_each(lines):
    made = lines(1024, 2048)
    assert made[3:8] == [
        "device    cpu, 1 thread, numerics exact; each of 2 executors",
        "KV cache  executor 0: 1,024 blocks of 16 tokens, capacity 16,384 tokens",
        "          executor 1: 2,048 blocks of 16 tokens, capacity 32,768 tokens",
        "          float32, 1.0 KiB (1,024 bytes) each, 3.0 MiB (3,145,728 bytes) in all",
        "memory    executor 0 1.0 MiB, executor 1 2.0 MiB, scheduler 9.0 MiB resident",
    ]
    assert made[11] == "listens   scheduler on <scheduler>, executor 0 on <executor 0>, executor 1 on <executor 1>"
    assert made[13] == "set by    the command line: executors 2"


def test_whoever_serves_no_http_is_told_of_it(lines):
    listens = "listens   scheduler on <scheduler>, executor on <executor>"
    for gateway, shown in (({"http": "h:1"}, ", gateway on h:1"), ({"kserve": "h:2"}, ", gateway (kserve) on h:2")):
        made = lines(2048, **gateway)
        assert made[10] == listens + shown
        assert (GRPC_ALONE in made) == ("http" not in gateway)


def test_a_model_without_a_chat_template_is_named(lines, monkeypatch):
    refused = "chats     refused, since the model has no chat template: --chat-template gives one"
    for tokenizer, template in ((True, False), (True, True), (False, False)):
        info = generation_pb2.GetModelInfoResponse(has_tokenizer=tokenizer, has_chat_template=template)
        monkeypatch.setattr(Scheduler, "info", info)
        assert (refused in lines(2048)) == (tokenizer and not template)


def test_an_executor_that_does_not_answer_is_left_out(lines):
    made = lines(None, 2048)
    assert "device    cpu, 1 thread, numerics exact" in made
    assert "executor 0 on <executor 0> (does not answer), executor 1 on <executor 1>" in made[10]
    with pytest.raises(grpc.RpcError):
        lines(None, None)
