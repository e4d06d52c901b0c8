"""KServe v2 and Triton's streams: what their clients send, and what they get."""

from __future__ import annotations

import asyncio
import json
import time

import grpc
import pytest

from gateway_svc.dialects import inference_pb2 as pb
from gateway_svc.http.errors import ApiError
from gateway_svc.kserve.model import Statistics
from gateway_svc.kserve.requests import read_request
from gateway_svc.kserve.stream import MAX_BYTES, InferStream
from tests.helpers.gateway.gateway import gateway
from tests.helpers.gateway.kserve import kserve, outputs, request, texts
from tests.helpers.models.toy_tokenizers import byte_level
from tests.helpers.scheduler.scheduler_world import script

TEXT = "The quick brown fox"
PARAMS = {"seed": "1", "temperature": "0.1", "max_tokens": "50"}


@pytest.fixture
async def g(w):
    async with gateway(w.target, kserve="127.0.0.1:0", served_model_name="vllm_model") as it:
        yield it


@pytest.fixture
async def k(g):
    async with kserve(g.addresses["kserve"]) as (stub, stream):
        yield stub, stream


async def test_server_and_model_are_described(w, k):
    stub, _ = k
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerMetadata(pb.ServerMetadataRequest())).name == "cadenza"
    metadata = await stub.ModelMetadata(pb.ModelMetadataRequest(name="vllm_model"))
    assert {each.name: each.datatype for each in metadata.inputs}["sampling_parameters"] == "BYTES"
    config = (await stub.ModelConfig(pb.ModelConfigRequest(name="vllm_model"))).config
    assert config.model_transaction_policy.decoupled
    assert config.max_batch_size == 0
    assert [each.name for each in config.input if not each.optional] == ["text_input"]
    models = (await stub.RepositoryIndex(pb.RepositoryIndexRequest())).models
    assert [each.name for each in models] == ["vllm_model"]
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ModelConfig(pb.ModelConfigRequest(name="other"))
    assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_ready_follows_the_scheduler(w, g, k):
    stub, _ = k
    await w.until(lambda: g.state.link.is_serving)
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name="vllm_model", version="1"))).ready
    assert not (await stub.ModelReady(pb.ModelReadyRequest(name="other"))).ready
    w.service._health.set(False)
    await w.until(lambda: not g.state.link.is_serving)
    assert not (await stub.ServerReady(pb.ServerReadyRequest())).ready


async def test_the_sample_client_s_request_has_the_prompt_before_its_output(w, k):
    script(w, TEXT)
    _, stream = k
    message = request("Hello, ", "0", "vllm_model", stream=False, sampling_parameters=PARAMS)
    message.outputs.add(name="text_output")
    for name, value in PARAMS.items():
        message.parameters[name].string_param = value
    await stream.send(message)
    await stream.collect("0")
    (answer,) = stream.answers["0"]
    assert [each.name for each in answer.outputs] == ["text_output"]
    assert texts(answer.raw_output_contents[0]) == [f"Hello, {TEXT}"]


async def test_several_requests_share_a_stream_and_an_error_ends_its_own_alone(w, k):
    script(w, TEXT)
    script(w, "jumps over", seed=2)
    _, stream = k
    for index in (1, 2):
        params = {"seed": index, "max_tokens": 50}
        await stream.send(request("Hi", str(index), "vllm_model", stream=True, sampling_parameters=params))
    await stream.send(request("Hi", "bad", "vllm_model", sampling_parameters={"temperature": "warm"}))
    await stream.send(request("Hi", "name", "other_model"))
    await stream.collect("1", "2", "bad", "name")
    assert stream.text("1") == TEXT
    assert stream.text("2") == "jumps over"
    assert stream.errors.keys() == {"bad", "name"}
    assert "temperature must be a number" in stream.errors["bad"]
    assert "there is no such model" in stream.errors["name"]
    assert len(stream.answers["1"]) > 1
    await stream.call.done_writing()
    assert await stream.call.read() is grpc.aio.EOF


async def test_an_empty_final_answer_comes_if_it_is_asked_for(w, k):
    script(w, TEXT)
    _, stream = k
    for request_id, is_streamed in (("a", True), ("b", False)):
        message = request("Hi", request_id, stream=is_streamed, sampling_parameters=PARAMS)
        message.parameters["triton_enable_empty_final_response"].bool_param = True
        await stream.send(message)
    await stream.collect("a", "b")
    for request_id, prefix in (("a", ""), ("b", "Hi")):
        assert not stream.answers[request_id][-1].outputs
        assert stream.text(request_id) == prefix + TEXT


async def test_the_other_outputs_are_there_if_they_are_asked_for(w, k):
    ids = script(w, TEXT)
    _, stream = k
    flags = {f"return_{name}": True for name in ("finish_reason", "cumulative_logprob", "logprobs")}
    counts = {"return_num_input_tokens": True, "return_num_output_tokens": True}
    params = {**PARAMS, "logprobs": 2}
    await stream.send(request("Hello", "1", stream=True, sampling_parameters=params, **flags, **counts))
    await stream.collect("1")
    answers = [outputs(each) for each in stream.answers["1"]]
    assert [each["finish_reason"] for each in answers][-1] == ["stop"]
    assert {*[each["finish_reason"][0] for each in answers[:-1]]} == {"None"}
    assert {each["num_input_tokens"][0] for each in answers} == {len(byte_level().encode("Hello"))}
    assert sum(each["num_output_tokens"][0] for each in answers) == len(ids) + 1  # with the end's
    rows = [row for each in answers for row in json.loads(each["logprobs"][0])]
    assert len(rows) == len(ids) + 1
    chosen = [row[str(token)]["logprob"] for row, token in zip(rows, ids, strict=False)]
    assert answers[-1]["cumulative_logprob"][0] == pytest.approx(sum(chosen) + next(iter(rows[-1].values()))["logprob"])


async def test_the_cumulative_logprob_asks_for_no_others(w, k):
    script(w, TEXT)
    _, stream = k
    flags = {"return_cumulative_logprob": True, "return_logprobs": True}
    await stream.send(request("Hello", "1", stream=True, sampling_parameters=PARAMS, **flags))
    await stream.collect("1")
    answers = [outputs(each) for each in stream.answers["1"]]
    assert {each["logprobs"][0] for each in answers} == {"null"}
    assert answers[-1]["cumulative_logprob"][0] < 0


async def test_parameters_of_the_request_hold_without_the_tensor(w, k):
    script(w, TEXT)
    _, stream = k
    message = request("Hi", "1", exclude_input_in_output=True)
    message.parameters["seed"].int64_param = 1
    message.parameters["max_tokens"].int64_param = 50
    message.parameters["triton_request_id"].string_param = "1"
    for name in ("timeout", "sequence_id"):  # as tritonclient sends its own arguments
        message.parameters[name].int64_param = 7
    for name in ("sequence_start", "sequence_end"):
        message.parameters[name].bool_param = True
    message.parameters["priority"].uint64_param = 7
    await stream.send(message)
    await stream.collect("1")
    assert stream.text("1") == TEXT
    assert read_request(message).params.priority == 0
    tensor = request("Hi", sampling_parameters={"priority": 7})
    assert read_request(tensor).params.priority == 7


@pytest.mark.parametrize("number", [3.0, "3", "3.0", 3])
def test_three_point_zero_is_an_integer(number):
    given = {"max_tokens": number, "seed": number, "top_k": number, "stop_token_ids": [7.0, 8]}
    params = read_request(request("Hi", sampling_parameters=given)).params
    assert (params.max_tokens, params.seed, params.top_k, params.stop_token_ids) == (3, 3, 3, [7, 8])
    assert all(isinstance(each, int) for each in (params.max_tokens, params.seed, params.top_k, *params.stop_token_ids))
    for wrong in (3.5, "3.5"):
        with pytest.raises(ApiError, match="max_tokens"):
            read_request(request("Hi", sampling_parameters={"max_tokens": wrong}))


def test_a_constraint_is_the_text_of_an_object_as_before_triton():
    constraint = {"choice": ["yes", "no"]}
    tensor = request("Hi", sampling_parameters={"structured_outputs": json.dumps(constraint)})
    message = request("Hi")
    message.parameters["structured_outputs"].string_param = json.dumps(constraint)
    for each in (tensor, message, request("Hi", sampling_parameters={"structured_outputs": constraint})):
        assert read_request(each).params.structured_outputs.choice == ["yes", "no"]


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"image": "x"}, "there is no input 'image'"),
        ({"stream": True, "exclude_input_in_output": False}, "is for requests without stream"),
        ({"sampling_parameters": "no"}, "sampling_parameters is no JSON"),
        ({"sampling_parameters": [1]}, "must be a JSON object"),
        ({"sampling_parameters": {"temprature": 1}}, "did you mean temperature?"),
        ({"sampling_parameters": {"structured_outputs": "json"}}, "structured_outputs is no JSON"),
        ({"sampling_parameters": {"lora_name": "poet"}}, "no LoRA adapters"),
        ({"sampling_parameters": {"logprobs": 200}}, "logprobs must be 0 to 20"),
        ({"sampling_parameters": {"n": 2**32 - 1}}, "n must be 1 to 64, not 4294967295"),
    ],
)
async def test_what_is_wrong_is_said_in_the_stream(k, inputs, message):
    _, stream = k
    await stream.send(request("Hi", "7", **inputs))
    await stream.collect("7")
    assert message in stream.errors["7"]


async def test_malformed_tensors_are_refused(k):
    _, stream = k
    good = request("Hi", "7")
    changes = ("cut", "short", "long", "kind", "twice", "none", "number", "dimensions", "typed")
    for index, change in enumerate(changes):
        message = pb.ModelInferRequest.FromString(good.SerializeToString())
        message.id = str(index)
        match change:
            case "cut":
                message.raw_input_contents[0] = message.raw_input_contents[0][:-1]
            case "short":
                message.raw_input_contents[0] = b"\1\0"
            case "long":
                message.raw_input_contents[0] *= 2
            case "kind":
                message.inputs[0].datatype = "FP32"
            case "twice":
                message.inputs.add().CopyFrom(message.inputs[0])
                message.raw_input_contents.append(message.raw_input_contents[0])
            case "none":
                message.inputs.pop()
                message.raw_input_contents.pop()
            case "number":
                message.inputs[0].shape[0] = 2
            case "dimensions":
                message.inputs[0].shape[:] = [1] * 100
            case "typed":
                message.raw_input_contents.pop()
                message.inputs[0].contents.bytes_contents.extend([b"a", b"b"])
        await stream.send(message)
    await stream.collect(*map(str, range(len(changes))))
    assert len(stream.errors) == len(changes)


@pytest.mark.parametrize("part", ["shape", "values", "parameters", "outputs", "contents"])
def test_what_a_message_has_too_much_of_is_counted_and_not_read(part):
    """Each would hold the event loop of all clients: the product of these lengths has 2 MB."""
    message = request("Hi")
    match part:
        case "shape":
            message.inputs[0].shape[:] = [2**62] * 300_000
        case "values":
            message.raw_input_contents[0] = bytes(4_000_000)
        case "parameters":
            for number in range(1000):
                message.parameters[f"triton_{number}"].bool_param = True
        case "outputs":
            message.outputs.extend([pb.ModelInferRequest.InferRequestedOutputTensor(name="text_output")] * 1000)
        case "contents":
            message.raw_input_contents.extend([b""] * 1_000_000)
    began = time.thread_time()
    with pytest.raises(ApiError):
        read_request(message)
    assert time.thread_time() - began < 0.1


async def test_the_stream_s_end_ends_its_requests(w, k):
    script(w, TEXT, end=False)
    w.executor.pause_after = 3
    _, stream = k
    params = {"seed": 1, "max_tokens": 200, "ignore_eos": True}
    await stream.send(request("Hi", "1", stream=True, sampling_parameters=params))
    await stream.read()
    stream.call.cancel()
    await w.until(lambda: not w.engine._live)
    w.executor.pause_after = None
    w.executor.going.set()
    await w.idle()


async def test_infer_with_one_answer_is_refused_by_name_and_statistics_count(w, k):
    script(w, TEXT)
    stub, stream = k
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await stub.ModelInfer(request("Hi"))
    assert error.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "decoupled" in error.value.details()
    await stream.send(request("Hi", "1", sampling_parameters=PARAMS))
    await stream.send(request("Hi", "2", model="other"))
    await stream.collect("1", "2")
    (model,) = (await stub.ModelStatistics(pb.ModelStatisticsRequest())).model_stats
    assert (model.inference_count, model.inference_stats.fail.count) == (1, 1)
    assert model.inference_stats.success.ns > 0


async def test_a_key_is_asked_for_as_over_http(w, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    script(w, TEXT)
    async with gateway(w.target, kserve="127.0.0.1:0", http_api_key_file=str(keys)) as g:
        async with kserve(g.addresses["kserve"], ("authorization", "Bearer secret")) as (_, stream):
            await stream.send(request("Hi", "1", stream=True, sampling_parameters=PARAMS))
            await stream.collect("1")
            assert not stream.errors
        async with kserve(g.addresses["kserve"]) as (stub, stream):
            await w.until(lambda: g.state.link.is_serving)
            assert (await stub.ModelReady(pb.ModelReadyRequest())).ready, "a probe has no key"
            assert not (await stub.ModelReady(pb.ModelReadyRequest(name="other"))).ready
            async with asyncio.timeout(20):
                assert await stream.call.code() is grpc.StatusCode.UNAUTHENTICATED, "before a request is read"


@pytest.mark.slow
async def test_a_client_that_does_not_read_is_not_read_either(g):
    context = Unread()
    num_read = 0

    async def requests():
        nonlocal num_read
        for number in range(64):
            num_read = number + 1
            yield request("a" * 1_000_000, str(number), model="other")

    running = asyncio.create_task(InferStream(g.state, Statistics(), context).run(requests()))
    await asyncio.wait([running, asyncio.create_task(context.is_writing.wait())], return_when=asyncio.FIRST_COMPLETED)
    for _ in range(1000):  # turns of the event loop
        await asyncio.sleep(0)
    assert num_read * 1_000_000 <= MAX_BYTES + 2_000_000
    context.reads.set()
    async with asyncio.timeout(20):
        await running
    assert sorted(int(each.infer_response.id) for each in context.answers) == list(range(64))


class Unread:
    """A call whose client takes no answer until it reads."""

    def __init__(self):
        self.answers, self.reads, self.is_writing = [], asyncio.Event(), asyncio.Event()

    def invocation_metadata(self):
        return ()

    async def write(self, answer):
        self.is_writing.set()
        await self.reads.wait()
        self.answers.append(answer)
