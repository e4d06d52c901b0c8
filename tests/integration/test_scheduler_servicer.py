"""The scheduler service over gRPC, with the real engine and an executor that says what it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from cadenza.transport import channel_options
from cadenza.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc, types_pb2
from cadenza.v1 import generation_pb2 as pb
from scheduler_svc.app import Service
from scheduler_svc.config import SchedulerConfig
from tests.helpers.scripted_executor import EOS, ScriptedExecutor, serve
from tests.helpers.toy_tokenizers import byte_level, hf_byte_level

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    hf_byte_level().save_pretrained(folder)
    return str(folder)


@pytest.fixture(autouse=True)
def no_errors_are_logged(caplog):
    yield
    ours = [record for record in caplog.get_records("call") if record.name.startswith("scheduler_svc")]
    assert not [record.getMessage() for record in ours if record.levelno >= logging.ERROR]


class World:
    """One executor, one scheduler, one channel."""

    def __init__(self, executor, service, channel):
        self.executor, self.service, self.channel = executor, service, channel
        self.stub = generation_pb2_grpc.GenerationServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        self.engine = service._engine

    async def until(self, condition):
        """Wait for something that the other side brings about, without an event of its own."""
        async with asyncio.timeout(10):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.002)

    async def idle(self):
        await self.until(lambda: not self.engine._live and self.engine.load().num_used_slots == 0)
        assert self.engine.load().num_used_device_blocks == 0


@contextlib.asynccontextmanager
async def world(executor=None, **options):
    executor = executor or ScriptedExecutor()
    executor_server, target = await serve(executor)
    service = Service(SchedulerConfig(executor=[target], listen="127.0.0.1:0", **options))
    channel = None
    try:
        address = await service.start()
        await service.open()
        channel = grpc.aio.insecure_channel(address, options=channel_options())
        yield World(executor, service, channel)
    finally:
        if channel is not None:
            await channel.close()
        await service.stop()
        await executor_server.stop(0)


@pytest.fixture
async def w(tokenizer_folder):
    async with world(tokenizer=tokenizer_folder) as it:
        yield it


def request(text="Hello", *, seed=1, ids=None, **fields):
    part = types_pb2.PromptPart(tokens=types_pb2.TokenIds(ids=ids)) if ids else types_pb2.PromptPart(text=text)
    params = {
        name: fields.pop(name) for name in list(fields) if name in types_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    }
    params.setdefault("max_tokens", 8)
    return pb.GenerateRequest(prompt=[part], sampling_params=types_pb2.SamplingParams(seed=seed, **params), **fields)


def script(w, text, seed=1, end=True):
    ids = byte_level().encode(text)
    w.executor.scripts[seed] = [*ids, EOS] if end else ids
    return ids


async def error_of(call):
    """The google.rpc.Status that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError):
        await call if not hasattr(call, "__aiter__") else [r async for r in call]
    return await rpc_status.aio.from_call(call)


def violation(status):
    detail = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(detail)
    return detail.field_violations[0].field


class Output:
    """What a client has put together."""

    def __init__(self):
        self.ids, self.text, self.finish, self.info, self.stats, self.logprobs, self.num = (
            [],
            "",
            None,
            None,
            None,
            [],
            0,
        )

    def add(self, response):
        assert self.finish is None, "something came after the end"
        if response.HasField("info"):
            assert self.info is None
            assert not self.ids
            self.info = response.info
        for output in response.outputs:
            assert output.first_token_index == len(self.ids)
            assert output.text_offset == len(self.text)
            self.ids += output.token_ids
            self.text += output.text
            self.logprobs += output.logprobs.chosen_logprobs
            if output.HasField("finish"):
                self.finish = output.finish
        if response.HasField("stats"):
            self.stats = response.stats
        self.num += 1
        return self


async def collect(call):
    out = Output()
    while (response := await call.read()) is not grpc.aio.EOF:
        out.add(response)
    return out


# --- Generate ----------------------------------------------------------------------------------------------------


async def test_generate_streams_text_and_ends_at_eos(w):
    ids = script(w, "你好, world 😀!")
    out = await collect(w.stub.Generate(request(max_tokens=100, return_prompt_token_ids=True)))
    assert out.ids == [*ids, EOS]
    assert out.text == "你好, world 😀!"
    assert (out.finish.reason, out.finish.detail) == (types_pb2.FINISH_REASON_STOP, types_pb2.FINISH_DETAIL_EOS)
    assert out.finish.WhichOneof("stop_reason") is None
    assert list(out.info.prompt_token_ids) == byte_level().encode("Hello")
    assert out.info.seed == 1
    assert out.stats.num_completion_tokens == len(ids) + 1
    assert out.stats.num_prompt_tokens == out.info.num_prompt_tokens
    assert 0 < out.stats.queue_ns <= out.stats.first_token_ns <= out.stats.total_ns
    await w.idle()


async def test_the_drawn_seed_is_told(w):
    message = request(ids=[5, 6])
    message.sampling_params.ClearField("seed")
    outs = [await collect(w.stub.Generate(message)) for _ in range(2)]
    assert outs[0].info.seed != outs[1].info.seed
    assert outs[0].finish.detail == types_pb2.FINISH_DETAIL_MAX_TOKENS
    assert len(outs[0].ids) == 8


async def test_stop_string_over_token_borders(w):
    script(w, "one two three four")
    out = await collect(w.stub.Generate(request(stop=["o thr"], max_tokens=50)))
    assert out.text == "one tw"
    assert out.finish.stop_string == "o thr"
    assert out.finish.detail == types_pb2.FINISH_DETAIL_STOP_STRING
    kept = await collect(w.stub.Generate(request(stop=["o thr"], max_tokens=50, include_stop_str_in_output=True)))
    assert kept.text == "one two thr"
    assert kept.ids == out.ids
    await w.idle()


async def test_stop_token(w):
    ids = script(w, "abc def")
    out = await collect(w.stub.Generate(request(stop_token_ids=[ids[2]], max_tokens=50)))
    assert out.ids == ids[:3]
    assert out.finish.stop_token_id == ids[2]
    assert out.text == byte_level().decode(ids[:2])


async def test_final_mode_sends_once(w):
    script(w, "all of it at once")
    out = await collect(w.stub.Generate(request(max_tokens=50, output_mode=pb.OUTPUT_MODE_FINAL)))
    assert out.num == 1
    assert out.text == "all of it at once"
    assert out.info is not None
    assert out.stats is not None


async def test_logprobs_have_texts(w):
    script(w, "ab")
    responses = [r async for r in w.stub.Generate(request(logprobs=2))]
    columns = [o.logprobs for r in responses for o in r.outputs if o.HasField("logprobs")]
    assert sum(len(c.chosen_logprobs) for c in columns) == len(byte_level().encode("ab")) + 1
    assert all(c.num_top == 2 and len(c.top_tokens) == 2 * len(c.chosen_tokens) for c in columns)
    assert responses[-1].outputs[0].cumulative_logprob == pytest.approx(-0.5 * (len(byte_level().encode("ab")) + 1))
    silent = [r async for r in w.stub.Generate(request(logprobs=0, detokenize=False))]
    assert not silent[0].outputs[0].logprobs.chosen_tokens
    assert not silent[0].outputs[0].text


async def test_chat_is_rendered(w):
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content="Hello")])
    message = request()
    message.prompt[0].chat.CopyFrom(chat)
    message.return_prompt_token_ids = True
    out = await collect(w.stub.Generate(message))
    text = byte_level().decode(list(out.info.prompt_token_ids), skip_special_tokens=False)
    assert text == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    message.prompt[0].chat.messages[0].role = "refused"
    status = await error_of(w.stub.Generate(message))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert violation(status) == "prompt[0].chat"
    assert "no such role" in status.message


async def test_what_is_wrong_is_named(w):
    status = await error_of(w.stub.Generate(request(top_p=1.5)))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    assert violation(status) == "sampling_params.top_p"
    assert violation(await error_of(w.stub.Generate(request(ids=[1, 2, 512])))) == "prompt[0].tokens.ids[2]"
    too_long = await error_of(w.stub.Generate(request(ids=[1] * 256)))
    assert violation(too_long) == "prompt"
    assert "256" in too_long.message
    await w.idle()


async def test_timeout_ends_with_what_there_is(w):
    out = await collect(w.stub.Generate(request(max_tokens=200, timeout_s=0.3, seed=3)))
    if out.finish.detail != types_pb2.FINISH_DETAIL_MAX_TOKENS:  # 200 steps may well be done by then
        assert out.finish.detail == types_pb2.FINISH_DETAIL_DEADLINE
    w.executor.going.clear()
    out = await collect(w.stub.Generate(request(timeout_s=0.1, seed=3)))
    assert (out.finish.reason, out.finish.detail) == (types_pb2.FINISH_REASON_ABORT, types_pb2.FINISH_DETAIL_DEADLINE)
    assert out.info is not None
    assert out.stats.num_completion_tokens == 0
    w.executor.going.set()
    await w.idle()


async def test_the_calls_own_deadline_frees_everything(w):
    w.executor.going.clear()
    call = w.stub.Generate(request(), timeout=0.2)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        [r async for r in call]
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await w.until(lambda: not w.engine._live)
    w.executor.going.set()
    await w.idle()


async def test_cancel_frees_everything(w):
    call = w.stub.Generate(request(max_tokens=200))
    await call.read()
    call.cancel()
    await w.idle()
    assert w.service._front.num_streams == 0


async def test_clients_that_leave_at_any_moment(w):
    async def leave_after(num, index):
        call = w.stub.Generate(request(max_tokens=100, seed=index, logprobs=5))
        for _ in range(num):
            await call.read()
        call.cancel()

    async def leave_session_after(num):
        call = w.stub.Session()
        for index in range(5):
            await call.write(pb.SessionRequest(generate=request(request_id=str((num, index)), max_tokens=100)))
        for _ in range(num):
            await call.read()
        call.cancel()

    await asyncio.gather(
        *(leave_after(index % 7, index) for index in range(40)), *(leave_session_after(num) for num in range(6))
    )
    await w.idle()
    await w.until(lambda: w.service._front.num_streams == 0)


async def test_abort_from_elsewhere(w):
    w.executor.going.clear()
    call = w.stub.Generate(request(request_id="a", tenant="t"))
    await w.until(lambda: w.engine.find("t", "a") is not None)
    assert not (await w.stub.Abort(pb.AbortRequest(request_id="a"))).aborted
    assert (await w.stub.Abort(pb.AbortRequest(request_id="a", tenant="t"))).aborted
    out = await collect(call)
    assert out.finish.detail == types_pb2.FINISH_DETAIL_ABORTED
    w.executor.going.set()
    await w.idle()


async def test_same_id(w):
    w.executor.going.clear()
    first = w.stub.Generate(request(request_id="a"))
    await w.until(lambda: w.engine.find("", "a") is not None)
    status = await error_of(w.stub.Generate(request(request_id="a", seed=2)))
    assert status.code == grpc.StatusCode.ALREADY_EXISTS.value[0]
    second = w.stub.Generate(request(request_id="a"))
    w.executor.going.set()
    one, two = await asyncio.gather(collect(first), collect(second))
    assert one.ids == two.ids
    await w.idle()


async def test_full_queue_says_when_to_retry(tokenizer_folder):
    async with world(ScriptedExecutor(max_num_seqs=1), skip_tokenizer_init=True, max_queued_requests=1) as w:
        w.executor.going.clear()
        calls = [w.stub.Generate(request(ids=[1, 2], request_id="0"))]
        await w.until(lambda: w.engine.load().num_running == 1)
        calls.append(w.stub.Generate(request(ids=[1, 2], request_id="1")))
        await w.until(lambda: w.engine.load().num_waiting == 1)
        status = await error_of(w.stub.Generate(request(ids=[1, 2])))
        assert status.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
        retry = error_details_pb2.RetryInfo()
        assert status.details[0].Unpack(retry)
        assert retry.retry_delay.ToTimedelta().total_seconds() > 0
        w.executor.going.set()
        assert [len((await collect(call)).ids) for call in calls] == [8, 8]


async def test_without_a_tokenizer():
    async with world(skip_tokenizer_init=True) as w:
        assert violation(await error_of(w.stub.Generate(request("text")))) == "prompt[0].text"
        out = await collect(w.stub.Generate(request(ids=[1, 2, 3])))
        assert out.ids == [101] * 8
        assert out.text == ""
        info = await w.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert not info.has_tokenizer
        status = await error_of(w.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1])))
        assert status.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]


# --- Session -----------------------------------------------------------------------------------------------------


async def session_events(call, outs):
    """Read to the end; returns the number of messages and the errors."""
    num, errors = 0, []
    while (message := await call.read()) is not grpc.aio.EOF:
        num += 1
        for event in message.events:
            if event.HasField("error"):
                errors.append(event)
                continue
            assert event.request_id == event.response.request_id
            out = outs.setdefault(event.request_id, Output()).add(event.response)
            assert event.done == (out.finish is not None)
    return num, errors


async def test_session_coalesces_and_finishes_after_half_close(w):
    script(w, "Hello there", seed=9)
    call = w.stub.Session()
    w.executor.going.clear()
    for index in range(50):
        await call.write(pb.SessionRequest(generate=request(seed=9, request_id=str(index), max_tokens=50)))
    await call.done_writing()
    await w.until(lambda: len(w.engine._live) == 50)
    w.executor.going.set()
    outs = {}
    num, errors = await session_events(call, outs)
    assert not errors
    assert len(outs) == 50
    assert {out.text for out in outs.values()} == {"Hello there"}
    total = sum(out.num for out in outs.values())
    assert num < total / 10, "news of one step travel together"
    assert await call.code() is grpc.StatusCode.OK
    await w.idle()


async def test_prompt_ids_count_towards_the_size_of_a_sessions_message(w, monkeypatch):
    monkeypatch.setattr("scheduler_svc.servicer.session.MAX_CHUNK_BYTES", 500)
    w.executor.going.clear()
    call = w.stub.Session()
    for index in range(20):
        wanted = request(ids=[3] * 200, request_id=str(index), return_prompt_token_ids=True)
        await call.write(pb.SessionRequest(generate=wanted))
    await call.done_writing()
    await w.until(lambda: len(w.engine._live) == 20)
    for index in range(20):
        w.engine.abort("", str(index))
    counts = [len(message.events) async for message in call]
    assert counts == [1] * 20
    w.executor.going.set()
    await w.idle()


async def test_one_requests_error_is_its_own(w):
    call = w.stub.Session()
    await call.write(pb.SessionRequest(generate=request(request_id="bad", temperature=-1)))
    await call.write(pb.SessionRequest(generate=request(request_id="good")))
    await call.write(pb.SessionRequest(generate=request(request_id="good")))
    await call.write(pb.SessionRequest(generate=request(request_id="good", seed=2)))
    await call.write(pb.SessionRequest(generate=request()))
    await call.write(pb.SessionRequest())
    await call.done_writing()
    outs = {}
    _, errors = await session_events(call, outs)
    assert len(outs["good"].ids) == 8
    assert [(e.request_id, e.error.code, e.done) for e in errors] == [
        ("bad", grpc.StatusCode.INVALID_ARGUMENT.value[0], True),
        ("good", grpc.StatusCode.ALREADY_EXISTS.value[0], False),
        ("", grpc.StatusCode.INVALID_ARGUMENT.value[0], True),
        ("", grpc.StatusCode.INVALID_ARGUMENT.value[0], True),
    ]
    assert violation(errors[0].error) == "sampling_params.temperature"
    await w.idle()


async def test_abort_in_a_session(w):
    w.executor.going.clear()
    call = w.stub.Session()
    long_text = "Hello there, world! " * 400  # too long for the event loop: tokenized in a thread
    await call.write(pb.SessionRequest(generate=request(request_id="a")))
    await call.write(pb.SessionRequest(generate=request(long_text, request_id="b", truncate_prompt_tokens=10)))
    await call.write(pb.SessionRequest(abort=pb.AbortRequest(request_id="a")))
    await call.write(pb.SessionRequest(abort=pb.AbortRequest(request_id="unknown")))
    message = await call.read()
    assert [event.request_id for event in message.events] == ["a"]
    assert message.events[0].response.outputs[0].finish.detail == types_pb2.FINISH_DETAIL_ABORTED
    w.executor.going.set()
    await call.done_writing()
    outs = {}
    _, errors = await session_events(call, outs)
    assert not errors
    assert outs["b"].info.num_prompt_tokens == 10
    await w.idle()


async def test_a_lost_session_aborts_all_of_its_requests(w):
    call = w.stub.Session()
    for index in range(10):
        await call.write(pb.SessionRequest(generate=request(request_id=str(index), max_tokens=200)))
    await call.read()
    call.cancel()
    await w.idle()
    assert w.service._front.num_streams == 0


# --- the rest ----------------------------------------------------------------------------------------------------


async def test_tokenize_and_detokenize(w):
    text = "Hello, 你好 😀"
    ids = (await w.stub.Tokenize(pb.TokenizeRequest(prompt=[types_pb2.PromptPart(text=text)]))).token_ids
    assert list(ids) == byte_level().encode(text)
    assert (await w.stub.Detokenize(pb.DetokenizeRequest(token_ids=ids))).text == text
    assert violation(await error_of(w.stub.Detokenize(pb.DetokenizeRequest(token_ids=[1, 512])))) == "token_ids[1]"
    assert violation(await error_of(w.stub.Tokenize(pb.TokenizeRequest()))) == "prompt"
    long = (await w.stub.Tokenize(pb.TokenizeRequest(prompt=[types_pb2.PromptPart(text=text * 2000)]))).token_ids
    assert len(long) > 2000


async def test_infos(w, tokenizer_folder):
    info = await w.stub.GetModelInfo(pb.GetModelInfoRequest())
    assert (info.model, info.vocab_size, info.max_model_len, list(info.eos_token_ids)) == ("toy", 512, 256, [0])
    assert info.has_tokenizer
    assert info.has_chat_template
    assert not info.HasField("bos_token_id")
    assert info.fingerprint.digest == b"d" * 32
    server = await w.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert server.options["tokenizer"] == tokenizer_folder
    assert server.options["max_num_seqs"] == "64"
    assert server.options["skip_tokenizer_init"] == "false"
    assert server.executors[0].connected
    assert server.executors[0].incarnation == 7
    assert server.load.num_device_blocks == 256
    assert not server.draining


async def test_watch_steps_and_block_tables(w):
    watch = w.admin.WatchSteps(admin_pb2.WatchStepsRequest(include_block_tables=True))
    first = await watch.read()
    assert not first.records
    w.executor.going.clear()
    call = w.stub.Generate(request(ids=[3] * 20, request_id="a"))
    await w.until(lambda: w.engine.load().num_running == 1)
    table = await w.admin.GetBlockTable(admin_pb2.GetBlockTableRequest(request_id="a"))
    assert len(table.sequences[0].block_tables[0].block_ids) == 2
    assert list(table.sequences[0].ref_counts) == [1, 1]
    w.executor.going.set()
    await collect(call)
    records = []
    while sum(sum(r.num_sampled) for r in records) < 8:
        records += (await watch.read()).records
    assert records[0].joined[0].request_id == "a"
    assert list(records[0].num_tokens) == [20]
    assert records[0].status == 1
    assert any(change.appended for change in records[0].block_changes)
    watch.cancel()
    status = await error_of(w.admin.GetBlockTable(admin_pb2.GetBlockTableRequest(request_id="a")))
    assert status.code == grpc.StatusCode.NOT_FOUND.value[0]


async def test_drain_and_resume(w):
    w.executor.going.clear()
    call = w.stub.Generate(request(request_id="a"))
    await w.until(lambda: w.engine.find("", "a") is not None)
    assert (await w.admin.Drain(admin_pb2.DrainRequest(timeout_s=0.05))).num_remaining == 1
    assert (await w.stub.GetServerInfo(pb.GetServerInfoRequest())).draining
    status = await error_of(w.stub.Generate(request()))
    assert status.code == grpc.StatusCode.UNAVAILABLE.value[0]
    check = await w.health.Check(health_pb2.HealthCheckRequest())
    assert check.status == health_pb2.HealthCheckResponse.NOT_SERVING
    draining = w.admin.Drain(admin_pb2.DrainRequest())
    w.executor.going.set()
    assert (await draining).num_remaining == 0
    assert len((await collect(call)).ids) == 8
    await w.admin.Resume(admin_pb2.ResumeRequest())
    assert len((await collect(w.stub.Generate(request()))).ids) == 8
    assert violation(await error_of(w.admin.Drain(admin_pb2.DrainRequest(timeout_s=-1)))) == "timeout_s"


async def test_health_watch_follows_the_executor_for_every_watcher(w):
    name = "cadenza.v1.GenerationService"
    watches = [w.health.Watch(health_pb2.HealthCheckRequest(service=name)) for _ in range(2)]
    for watch in watches:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watches[0].cancel()
    await w.until(lambda: len(w.service._health._watchers) == 1)
    await w.executor.break_up()
    assert (await watches[1].read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert (await watches[1].read()).status == health_pb2.HealthCheckResponse.SERVING
    out = await collect(w.stub.Generate(request()))
    assert len(out.ids) == 8
    unknown = w.health.Watch(health_pb2.HealthCheckRequest(service="none"))
    assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
    with pytest.raises(grpc.aio.AioRpcError):
        await w.health.Check(health_pb2.HealthCheckRequest(service="none"))


async def test_streams_survive_a_new_session_with_the_executor(w):
    call = w.stub.Generate(request(max_tokens=200, request_id="a"))
    out = Output().add(await call.read())
    await w.executor.break_up()
    while (response := await call.read()) is not grpc.aio.EOF:
        out.add(response)
    assert out.ids == [101] * 200
    await w.idle()


async def test_a_slow_reader_gets_few_messages_and_holds_nobody_up(w):
    slow = w.stub.Session()
    await slow.write(pb.SessionRequest(generate=request(request_id="slow", max_tokens=200)))
    await slow.done_writing()
    quick = await collect(w.stub.Generate(request(max_tokens=200)))
    assert len(quick.ids) == 200
    outs = {}
    await session_events(slow, outs)
    assert len(outs["slow"].ids) == 200


async def test_what_goes_wrong_inside_is_internal(w, caplog, monkeypatch):
    monkeypatch.setattr(w.engine, "submit", lambda _: 1 / 0)
    status = await error_of(w.stub.Generate(request()))
    assert status.code == grpc.StatusCode.INTERNAL.value[0]
    call = w.stub.Session()
    await call.write(pb.SessionRequest(generate=request(request_id="a")))
    await call.done_writing()
    _, errors = await session_events(call, {})
    assert errors[0].error.code == grpc.StatusCode.INTERNAL.value[0]
    assert await call.code() is grpc.StatusCode.OK
    assert "a call failed" in caplog.text
    caplog.clear()


async def test_calls_before_it_is_ready_are_unavailable():
    executor = ScriptedExecutor()
    executor_server, target = await serve(executor)
    service = Service(SchedulerConfig(executor=[target], listen="127.0.0.1:0", skip_tokenizer_init=True))
    async with grpc.aio.insecure_channel(await service.start(), options=channel_options()) as channel:
        stub, health = generation_pb2_grpc.GenerationServiceStub(channel), health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        for call in (stub.Generate(request()), stub.Session(), stub.GetModelInfo(pb.GetModelInfoRequest())):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert target in await call.details()
        await service.open()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await stub.GetModelInfo(pb.GetModelInfoRequest())
    await service.stop()
    await executor_server.stop(0)


async def test_stop_ends_streams_with_unavailable(tokenizer_folder):
    async with world(tokenizer=tokenizer_folder) as w:
        w.executor.going.clear()
        generate, session = w.stub.Generate(request(request_id="a")), w.stub.Session()
        await session.write(pb.SessionRequest(generate=request(request_id="b")))
        watch = w.admin.WatchSteps(admin_pb2.WatchStepsRequest())
        health = w.health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        await health.read()
        await w.until(lambda: len(w.engine._live) == 2)
        async with asyncio.timeout(2):
            await w.service.stop()
        for call in (generate, session, watch):
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not w.engine._live
