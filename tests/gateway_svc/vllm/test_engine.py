"""vllm.grpc.engine: what a router sends, and what it gets."""

from __future__ import annotations

import asyncio
import hashlib
import io
import zipfile

import grpc
import pytest

from cadenza import AsyncClient, SamplingParams
from gateway_svc.dialects import smg_common_pb2 as common
from gateway_svc.dialects import vllm_engine_pb2 as pb
from tests.helpers.gateway import vllm_engine
from tests.helpers.gateway.gateway import gateway
from tests.helpers.gateway.vllm_engine import engine
from tests.helpers.models.toy_tokenizers import byte_level
from tests.helpers.scheduler.scheduler_world import script

TEXT = "The quick brown fox"
IDS = byte_level().encode("Hello")


@pytest.fixture
async def g(w):
    async with gateway(w.target, vllm_grpc="127.0.0.1:0") as it:
        yield it


@pytest.fixture
async def stub(g):
    async with engine(g.addresses["vllm_grpc"]) as it:
        yield it


def asked(*, ids=IDS, **fields):
    return vllm_engine.asked(ids, **fields)


async def answers(stub, request):
    return [each async for each in stub.Generate(request)]


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_those_of_our_own_client(w, stub, stream):
    ids = script(w, TEXT)
    async with AsyncClient(w.target) as client:
        params = SamplingParams(seed=1, max_tokens=50)
        (own,) = await client.generate([{"prompt_token_ids": IDS}], params)
    got = await answers(stub, asked(stream=stream))
    complete = got[-1].complete
    chunks = [each.chunk for each in got if each.HasField("chunk")]
    tokens = [each for chunk in chunks for each in chunk.token_ids] if stream else list(complete.output_ids)
    assert tokens == own.outputs[0].token_ids
    assert tokens[: len(ids)] == ids
    assert (complete.finish_reason, complete.prompt_tokens) == ("stop", len(IDS))
    assert bool(chunks) is stream
    if stream:
        assert len(chunks) > 1
        assert sum(chunk.completion_tokens for chunk in chunks) == len(tokens)
    else:
        assert complete.completion_tokens == len(tokens)


async def test_the_text_beside_token_ids_does_not_count(w, stub):
    script(w, TEXT)
    request = asked()
    request.tokenized.original_text = "a" * 2_000_000
    assert (await answers(stub, request))[-1].complete.finish_reason == "stop"


async def test_logprobs_and_what_the_output_stopped_at(w, stub):
    script(w, TEXT, end=False)
    got = await answers(stub, asked(stream=False, stop=["brown"], logprobs=2, skip_special_tokens=True))
    (complete,) = [each.complete for each in got]
    assert complete.matched_stop_str == "brown"
    logprobs = complete.output_logprobs
    assert list(logprobs.token_ids) == list(complete.output_ids)
    assert all(len(each.values) == 2 for each in logprobs.top_logprobs)
    ends = await answers(stub, asked(stream=False, stop_token_ids=[byte_level().encode(TEXT)[2]]))
    assert ends[0].complete.matched_token_id == byte_level().encode(TEXT)[2]


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_logprobs_come_once_and_the_first_token_has_none(simulated, stream):
    async with (
        gateway(simulated.state.link.target, vllm_grpc="127.0.0.1:0") as g,
        engine(g.addresses["vllm_grpc"]) as stub,
    ):
        got = await answers(stub, asked(stream=stream, prompt_logprobs=1, max_tokens=4, ignore_eos=True))
        prompts = [each.chunk.input_logprobs for each in got if each.chunk.HasField("input_logprobs")]
        (prompt,) = prompts if stream else [got[-1].complete.input_logprobs]
        assert list(prompt.token_ids) == IDS
        assert [each.HasField("value") for each in prompt.token_logprobs] == [False] + [True] * (len(IDS) - 1)
        assert [len(each.values) for each in prompt.top_logprobs] == [0] + [1] * (len(IDS) - 1)


async def test_n_samples_each_have_their_own_end(simulated):
    async with (
        gateway(simulated.state.link.target, vllm_grpc="127.0.0.1:0") as g,
        engine(g.addresses["vllm_grpc"]) as stub,
    ):
        got = await answers(stub, asked(n=3, temperature=1.0, max_tokens=5, ignore_eos=True))
        ends = [each.complete for each in got if each.HasField("complete")]
        assert sorted(each.index for each in ends) == [0, 1, 2]
        assert {each.finish_reason for each in ends} == {"length"}
        for index in range(3):
            own = [each.chunk for each in got if each.HasField("chunk") and each.chunk.index == index]
            assert sum(len(chunk.token_ids) for chunk in own) == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_abort_ends_a_request_with_what_there_is(w, stub, stream):
    ids = script(w, TEXT, end=False)
    w.executor.pause_after = 4
    call = stub.Generate(asked(stream=stream, max_tokens=200, ignore_eos=True))
    await w.until(lambda: w.engine.load().num_output_tokens == 4)
    await stub.Abort(pb.AbortRequest(request_ids=["other", "r"]))
    got = await rest_of(call)
    complete = got[-1].complete
    tokens = [each for answer in got for each in answer.chunk.token_ids] if stream else list(complete.output_ids)
    assert tokens == ids[:4]
    assert (complete.finish_reason, complete.prompt_tokens) == ("abort", len(IDS))
    await w.until(lambda: not w.engine._live)
    w.executor.pause_after = None
    w.executor.going.set()
    await w.idle()


async def rest_of(call):
    """What is still to come of a call."""
    async with asyncio.timeout(20):
        rest = []
        while (answer := await call.read()) is not grpc.aio.EOF:
            rest.append(answer)
        return rest


async def test_a_router_that_leaves_ends_its_request(w, stub):
    script(w, TEXT, end=False)
    w.executor.pause_after = 3
    call = stub.Generate(asked(max_tokens=200, ignore_eos=True))
    await call.read()
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answers(stub, asked())
    assert error.value.code() is grpc.StatusCode.ALREADY_EXISTS
    call.cancel()
    await w.until(lambda: not w.engine._live)
    w.executor.pause_after = None
    w.executor.going.set()
    await w.idle()


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "code", "message"),
    [
        ({"mm_inputs": pb.MultimodalInputs()}, "UNIMPLEMENTED", "mm_inputs is not supported"),
        ({"kv_transfer_params_json": '{"a": 1}'}, "UNIMPLEMENTED", "prefill and decode are not split"),
        ({"tokenized": pb.TokenizedInput()}, "INVALID_ARGUMENT", "no prompt"),
        ({"tokenized": pb.TokenizedInput(input_ids=[10**6])}, "INVALID_ARGUMENT", "1000000"),
        (
            {"sampling_params": pb.SamplingParams(stop_token_ids=[5] * 2_000_000)},
            "INVALID_ARGUMENT",
            "can have 1572864",
        ),
        ({"sampling_params": pb.SamplingParams(temperature=-1)}, "INVALID_ARGUMENT", "temperature"),
        ({"sampling_params": pb.SamplingParams(json_schema="no")}, "INVALID_ARGUMENT", "json"),
        ({"sampling_params": pb.SamplingParams(n=2**32 - 1)}, "INVALID_ARGUMENT", "sampling_params.n must be 1 to 64"),
    ],
)
async def test_what_is_refused_is_named(stub, change, code, message):
    request = asked()
    for name, value in change.items():
        request.ClearField(name)
        request.MergeFrom(pb.GenerateRequest(**{name: value}))
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await answers(stub, request)
    assert error.value.code().name == code
    assert message in error.value.details()


async def test_model_server_and_load(w, g, stub):
    script(w, TEXT)
    await w.until(lambda: g.state.link.is_serving)
    assert (await stub.HealthCheck(pb.HealthCheckRequest())).healthy
    model = await stub.GetModelInfo(pb.GetModelInfoRequest())
    assert model.is_generation
    assert model.vocab_size == 512
    assert (list(model.architectures), model.model_type) == (["Toy"], "toy_text")
    server = await stub.GetServerInfo(pb.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size) == ("vllm-grpc", 1)
    assert server.block_size == w.engine.model.block_size
    await stub.GetLoads(pb.GetLoadsRequest(include=["core"]))
    await answers(stub, asked())
    (rank,) = (await stub.GetLoads(pb.GetLoadsRequest(include=["core"]))).loads
    assert rank.max_total_num_tokens == w.engine.model.num_device_blocks * w.engine.model.block_size
    assert rank.gen_throughput > 0
    w.service._health.set(False)
    await w.until(lambda: not g.state.link.is_serving)
    assert not (await stub.HealthCheck(pb.HealthCheckRequest())).healthy


async def test_the_tokenizer_comes_as_an_archive_and_tokenizes_the_same(stub, tmp_path):
    chunks = [each async for each in stub.GetTokenizer(common.GetTokenizerRequest())]
    content = b"".join(each.data for each in chunks)
    assert [each.sha256 for each in chunks[:-1]] == [""] * (len(chunks) - 1)
    assert chunks[-1].sha256 == hashlib.sha256(content).hexdigest()
    with zipfile.ZipFile(io.BytesIO(content)) as zipped:
        names = set(zipped.namelist())
        zipped.extractall(tmp_path)
    assert {"tokenizer.json", "tokenizer_config.json"} <= names
    assert not names & {"config.json", "model.safetensors"}
    from tokenizers import Tokenizer

    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(TEXT).ids == byte_level().encode(TEXT)


async def test_embeddings_are_refused_by_name(stub):
    with pytest.raises(grpc.aio.AioRpcError, match="there are no embeddings") as error:
        await stub.Embed(pb.EmbedRequest())
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
