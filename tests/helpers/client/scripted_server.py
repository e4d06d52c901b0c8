"""A GenerationService that does what prompts say, over real gRPC: what tests of the client talk to."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Callable

import grpc

from cadenza.v1 import admin_pb2, admin_pb2_grpc, types_pb2
from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc as pb_grpc
from cadenza_common.wire import transport

STOPPED = types_pb2.Finish(reason=types_pb2.FINISH_REASON_STOP, detail=types_pb2.FINISH_DETAIL_EOS)
INVALID = transport.make_status(
    grpc.StatusCode.INVALID_ARGUMENT,
    "the prompt is too long",
    [transport.field_violation("prompt", "has 9 tokens, max_model_len is 4")],
)
FULL = transport.make_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", [transport.retry_info(0.02)])


def text_of(request: pb.GenerateRequest) -> str:
    (part,) = request.prompt
    kind = part.WhichOneof("part")
    if kind == "chat":
        return part.chat.messages[-1].content
    return part.text if kind == "text" else " ".join(str(token_id) for token_id in part.tokens.ids)


def responses_to(request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    """The words of the prompt, one per delta, or all at once when only the end is requested."""
    words = [f"{word} " for word in text_of(request).split()]
    out = [
        pb.GenerateResponse(
            request_id=request.request_id,
            info=pb.RequestInfo(seed=42, num_prompt_tokens=3, prompt_token_ids=[1, 2, 3]),
        )
    ]
    if request.output_mode == pb.OUTPUT_MODE_FINAL:
        output = pb.SampleOutput(token_ids=range(len(words)), text="".join(words), finish=STOPPED)
        return [*out, pb.GenerateResponse(outputs=[output], stats=pb.RequestStats(num_completion_tokens=len(words)))]
    offset = 0
    for index, word in enumerate(words):
        output = pb.SampleOutput(first_token_index=index, token_ids=[index], text=word, text_offset=offset)
        out.append(pb.GenerateResponse(outputs=[output]))
        offset += len(word)
    out[-1].outputs[0].finish.CopyFrom(STOPPED)
    out[-1].stats.num_completion_tokens = len(words)
    return out


class Script(pb_grpc.GenerationServiceServicer, admin_pb2_grpc.AdminServiceServicer):
    """Prompts say what happens: "hang", "bad", "full", "vanish"; any other is echoed."""

    def __init__(self) -> None:
        self.capacity = 10**9
        self.max_num_seqs = 4
        """Of its executor."""
        self.all_have_come: asyncio.Event | None = None
        """Answers to requests "wait" come when it is set."""
        self.active = 0
        self.most_active = 0
        self.num_refused = 0
        self.num_sessions = 0
        self.params: list[types_pb2.SamplingParams] = []
        self.caching: list[bool | None] = []
        """What each request said of the prefix cache; None: nothing."""
        self.drafts: list[int | None] = []
        """The most draft tokens of each request; None: it said nothing."""
        self.cancelled: list[str] = []
        self.hanging = threading.Event()
        self.was_cancelled = threading.Event()

    def _note_cancel(self, what: str) -> None:
        self.cancelled.append(what)
        self.was_cancelled.set()

    def _note_request(self, request: pb.GenerateRequest) -> None:
        self.params.append(request.sampling_params)
        self.caching.append(request.enable_prefix_caching if request.HasField("enable_prefix_caching") else None)
        self.drafts.append(request.speculation.num_draft_tokens if request.HasField("speculation") else None)

    async def Generate(self, request, context):
        self._note_request(request)
        text = text_of(request)
        if text in ("bad", "full"):
            status = INVALID if text == "bad" else FULL
            context.set_trailing_metadata((("grpc-status-details-bin", status.SerializeToString()),))
            code = grpc.StatusCode.INVALID_ARGUMENT if text == "bad" else grpc.StatusCode.RESOURCE_EXHAUSTED
            await context.abort(code, status.message)
        responses = responses_to(request)
        if text == "vanish":
            yield responses[0]
            return
        try:
            for response in responses:
                yield response
                if text.startswith("hang") and response.outputs:
                    self.hanging.set()
                    await asyncio.sleep(60)
        except (asyncio.CancelledError, GeneratorExit):  # the latter if gRPC was sending when the call was cancelled
            self._note_cancel(request.request_id)
            raise

    async def Session(self, request_iterator, context):
        self.num_sessions += 1
        out: asyncio.Queue[pb.SessionResponse | None] = asyncio.Queue()
        tasks: set[asyncio.Task[None]] = set()

        async def read():
            async for message in request_iterator:
                self._note_request(message.generate)
                if self.active >= self.capacity:
                    self.num_refused += 1
                    out.put_nowait(event(message.generate, error=FULL, done=True))
                    continue
                self.active += 1
                self.most_active = max(self.most_active, self.active)
                tasks.add(asyncio.create_task(self._serve(message.generate, out)))
            if tasks:
                await asyncio.wait(tasks)
            out.put_nowait(None)

        reader = asyncio.create_task(read())
        try:
            while (response := await out.get()) is not None:
                yield response
        except (asyncio.CancelledError, GeneratorExit):  # the latter if gRPC was sending when the call was cancelled
            self._note_cancel("session")
            raise
        finally:
            reader.cancel()
            for task in tasks:
                task.cancel()

    async def _serve(self, request, out):
        text = text_of(request)
        await asyncio.sleep(0.03 if text.startswith("slow") else 0.002)
        if text == "wait" and self.all_have_come is not None:
            await self.all_have_come.wait()
        if text == "hang":
            self.hanging.set()
            await asyncio.sleep(60)
        elif text == "bad":
            out.put_nowait(event(request, error=INVALID, done=True))
        elif text == "vanish":
            out.put_nowait(event(request, done=True))
        else:
            first, *rest = responses_to(request)
            out.put_nowait(event(request, response=first))
            for index, response in enumerate(rest):
                out.put_nowait(event(request, response=response, done=index == len(rest) - 1))
        self.active -= 1

    async def Abort(self, request, context):
        return pb.AbortResponse(aborted=request.request_id == "running")

    async def Tokenize(self, request, context):
        """A token for each word."""
        words = [word for turn in request.prompt[0].chat.messages for word in turn.content.split()]
        return pb.TokenizeResponse(token_ids=[0] * len(words))

    async def GetModelInfo(self, request, context):
        fingerprint = types_pb2.NumericsFingerprint(mode=types_pb2.NUMERICS_MODE_EXACT, digest=b"d")
        return pb.GetModelInfoResponse(
            model="m",
            vocab_size=7,
            max_model_len=1000,
            eos_token_ids=[2],
            bos_token_id=0,
            has_tokenizer=True,
            has_chat_template=True,
            fingerprint=fingerprint,
        )

    async def GetServerInfo(self, request, context):
        return pb.GetServerInfoResponse(
            version="1",
            options={"max_num_seqs": "4"},
            load=pb.SchedulerLoad(num_running=3),
            executors=[
                pb.ExecutorInfo(target="t", block_size=16, resident_bytes=2**33, max_num_seqs=self.max_num_seqs)
            ],
            resident_bytes=2**27,
        )

    async def WatchSteps(self, request, context):
        yield admin_pb2.WatchStepsResponse()
        try:
            yield admin_pb2.WatchStepsResponse(
                records=[admin_pb2.StepRecord(step_id=1, left=[admin_pb2.SequenceLeft(sequence_id=1)])], num_dropped=2
            )
            await asyncio.sleep(60)
        except (asyncio.CancelledError, GeneratorExit):  # the latter if gRPC was sending when the call was cancelled
            self._note_cancel("watch")
            raise


def event(request, *, response=None, error=None, done=False) -> pb.SessionResponse:
    return pb.SessionResponse(
        events=[pb.SessionEvent(request_id=request.request_id, response=response, error=error, done=done)]
    )


async def start(script: Script) -> tuple[grpc.aio.Server, str]:
    server = grpc.aio.server(options=transport.server_options())
    pb_grpc.add_GenerationServiceServicer_to_server(script, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(script, server)
    address = transport.bind(server, "127.0.0.1:0", default_port=0)
    await server.start()
    return server, address


def interrupt_when(event: threading.Event) -> None:
    """Ctrl-C in the main thread, as the terminal sends it, once `event` is set."""

    def send():
        if event.wait(10):
            time.sleep(0.05)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    threading.Thread(target=send, daemon=True).start()


async def until(condition: Callable[[], object], timeout_s: float = 5.0) -> None:
    """Return once the condition holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - the condition is any
            await asyncio.sleep(0.005)
