"""Call Cadenza with the stubs in `cadenza.v1` and grpcio alone, without our client.

    python examples/python_stubs.py --target 127.0.0.1:50051 "What is 27 + 48?"

The stubs need grpcio and protobuf; `rpc_status` and `error_details_pb2` come with grpcio-status.
"""

from __future__ import annotations

import argparse
import asyncio

import grpc
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from cadenza.v1 import generation_pb2 as pb
from cadenza.v1 import generation_pb2_grpc, types_pb2

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),  # 4 MiB by default; many logprobs need more
    ("grpc.keepalive_time_ms", 60_000),  # notice a dead connection; pinging faster makes servers hang up
    ("grpc.enable_http_proxy", 0),  # `http_proxy` is meant for the web
]


def make_request(prompt: str, max_tokens: int, request_id: str = "") -> pb.GenerateRequest:
    """A chat of one message, answered greedily. Fields that are not set take the server's defaults."""
    chat = types_pb2.Chat(messages=[types_pb2.ChatMessage(role="user", content=prompt)])
    return pb.GenerateRequest(
        request_id=request_id,
        prompt=[types_pb2.PromptPart(chat=chat)],
        sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=max_tokens),
    )


def stream(stub: generation_pb2_grpc.GenerationServiceStub, prompt: str) -> None:
    """Print the text as it arrives, then the finish reason."""
    for response in stub.Generate(make_request(prompt, max_tokens=64)):
        for output in response.outputs:
            print(output.text, end="", flush=True)
            if output.HasField("finish"):
                print(f"\n[{types_pb2.FinishReason.Name(output.finish.reason)}]")


def show_refusal(stub: generation_pb2_grpc.GenerationServiceStub, prompt: str) -> None:
    """A wrong field is refused with its path; the details are google.rpc messages."""
    request = make_request(prompt, max_tokens=8)
    request.sampling_params.top_p = 2.0
    try:
        list(stub.Generate(request))
    except grpc.RpcError as error:
        status = rpc_status.from_call(error)
        for detail in status.details:
            bad_request = error_details_pb2.BadRequest()
            if detail.Unpack(bad_request):
                for violation in bad_request.field_violations:
                    print(f"[{error.code().name}] {violation.field}: {violation.description}")


def stop_early(stub: generation_pb2_grpc.GenerationServiceStub, prompt: str) -> None:
    """Three ways to end a request early; each frees what it holds on the server at once."""
    endless = make_request(prompt, max_tokens=1000)
    endless.sampling_params.ignore_eos = True

    call = stub.Generate(endless)
    next(call)
    call.cancel()  # the output is not needed any more
    print(f"[cancelled] {call.code().name}")

    try:
        list(stub.Generate(endless, timeout=0.05))  # the call's deadline: the stream ends with an error
    except grpc.RpcError as error:
        print(f"[deadline] {error.code().name}")

    endless.timeout_s = 0.05  # the request's own limit: the stream ends normally, with the output so far
    *_, last = stub.Generate(endless)
    print(f"[timeout_s] {types_pb2.FinishDetail.Name(last.outputs[0].finish.detail)}")


def session(stub: generation_pb2_grpc.GenerationServiceStub, prompts: list[str]) -> None:
    """Many requests over one stream. When the iterator ends, the stream half-closes; requests already sent are
    finished."""
    requests = (make_request(prompt, 32, request_id=f"r{index}") for index, prompt in enumerate(prompts))
    texts: dict[str, str] = {}
    for response in stub.Session(pb.SessionRequest(generate=request) for request in requests):
        for event in response.events:
            if event.HasField("error"):  # an error of this request only
                texts[event.request_id] = event.error.message
            for output in event.response.outputs:
                texts[event.request_id] = texts.get(event.request_id, "") + output.text
    for request_id, text in sorted(texts.items()):
        print(f"[{request_id}] {text}")


async def stream_async(target: str, prompt: str) -> None:
    """The same on grpc.aio. Always cancel a call that you leave: an abandoned call keeps running (grpc#43462)."""
    async with grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS) as channel:
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(make_request(prompt, max_tokens=64))
        try:
            async for response in call:
                print("".join(output.text for output in response.outputs), end="", flush=True)
        finally:
            call.cancel()  # does nothing once the stream has ended
        print()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of a running server")
    parser.add_argument("prompt", nargs="?", default="What is 27 + 48?")
    options = parser.parse_args()
    with grpc.insecure_channel(options.target, options=CHANNEL_OPTIONS) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        stream(stub, options.prompt)
        show_refusal(stub, options.prompt)
        stop_early(stub, options.prompt)
        session(stub, [options.prompt, "Hello!", "Count from 3 to 9."])
    asyncio.run(stream_async(options.target, options.prompt))


if __name__ == "__main__":
    main()
