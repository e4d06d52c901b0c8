"""Call Cadenza with its Python client: an answer as it arrives, an error with its details, a request ended early.

python examples/python_client.py --target 127.0.0.1:50051 "What is 27 + 48?"
python examples/python_client.py --model models/cadenza-demo "What is 27 + 48?"    no server: LLM starts one
"""

from __future__ import annotations

import argparse
import contextlib

from cadenza import LLM, CadenzaError, Client, InvalidRequestError, QueueFullError, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=64)
ENDLESS = SamplingParams(temperature=0, max_tokens=1000, ignore_eos=True)


def stream(client: Client, prompt: str) -> None:
    """Print the text as it arrives, then the finish reason."""
    finish_reason = None
    for delta in client.stream_chat([{"role": "user", "content": prompt}], GREEDY):
        print(delta.outputs[0].text, end="", flush=True)
        finish_reason = delta.outputs[0].finish_reason
    print(f"\n[{finish_reason}]")


def batch(client: Client, prompts: list[str]) -> None:
    """Many prompts in one call, which run together; `generate` applies no chat template."""
    for output in client.generate(prompts, GREEDY):
        print(f"{output.prompt}{output.outputs[0].text}")


def show_refusal(client: Client, prompt: str) -> None:
    """Every error of the server is a CadenzaError, whose class says what to do. This token id is not the model's."""
    try:
        client.generate(prompt, SamplingParams(logit_bias={10**6: 1.0}))
    except InvalidRequestError as error:  # do not send it again
        for violation in error.field_violations:
            print(f"[invalid] {violation.field}: {violation.description}")
    except QueueFullError as error:  # send it again later
        print(f"[queue full] try again in {error.retry_after_s} s")
    except CadenzaError as error:
        print(f"[{type(error).__name__}] {error}")


def stop_early(client: Client, prompt: str) -> None:
    """Leaving a stream aborts its request, which frees what it holds on the server; `abort` does so from anywhere."""
    with contextlib.closing(client.stream(prompt, ENDLESS)) as deltas:
        next(deltas)

    reasons = []
    for delta in client.stream(prompt, ENDLESS, request_id="example"):
        if client.abort("example"):
            print("[aborted]")
        reasons.append(delta.outputs[0].finish_reason)
    print(f"[{reasons[-1]}]")


def offline(model: str, prompt: str) -> None:
    """`LLM` starts both services as processes of this machine and stops them at the end."""
    with LLM(model=model) as llm:
        (output,) = llm.chat([{"role": "user", "content": prompt}], GREEDY)
        print(output.outputs[0].text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="127.0.0.1:50051", help="HOST:PORT of a running server")
    parser.add_argument("--model", help="folder or hub id of a model: start it here, call no server")
    parser.add_argument("prompt", nargs="?", default="What is 27 + 48?")
    options = parser.parse_args()
    if options.model:
        offline(options.model, options.prompt)
        return
    with Client(options.target) as client:
        stream(client, options.prompt)
        batch(client, ["12+34=", "56+78="])
        show_refusal(client, options.prompt)
        stop_early(client, options.prompt)


if __name__ == "__main__":
    main()
