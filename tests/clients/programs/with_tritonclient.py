"""Asks a model over KServe's gRPC protocol with tritonclient, as clients of Triton's vLLM backend do.

Its argument is a JSON object: url (HOST:PORT), model, prompts, max_tokens. Prints a JSON object.
"""

import asyncio
import json
import sys

import numpy as np
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as aio
from tritonclient.utils import InferenceServerException


def inputs_of(kind, prompt, parameters, **flags):
    """Tensors of a request, with parameters as texts in a JSON object."""

    def tensor(name, value, type_name):
        made = kind.InferInput(name, [1], type_name)
        made.set_data_from_numpy(np.array([value], dtype=object if type_name == "BYTES" else bool))
        return made

    texts = {"text_input": prompt, "sampling_parameters": json.dumps(parameters)}
    return [
        *(tensor(name, value.encode(), "BYTES") for name, value in texts.items()),
        *(tensor(name, value, "BOOL") for name, value in flags.items()),
    ]


async def ask_all(asked, **flags):
    """Text by prompt, of all prompts over one stream; the errors by request id."""
    parameters = {"temperature": "0", "max_tokens": str(asked["max_tokens"])}
    texts, errors = dict.fromkeys(asked["prompts"], ""), {}

    async def requests():
        for index, prompt in enumerate(asked["prompts"]):
            yield {
                "model_name": asked["model"],
                "inputs": inputs_of(aio, prompt, parameters, **flags),
                "outputs": [aio.InferRequestedOutput("text_output")],
                "request_id": str(index),
                "parameters": parameters,
            }
        yield {
            "model_name": asked["model"],
            "inputs": inputs_of(aio, "wrong", {"temperature": "warm"}, **flags),
            "request_id": "wrong",
        }

    async with aio.InferenceServerClient(url=asked["url"]) as client:
        async for result, error in client.stream_infer(inputs_iterator=requests()):
            if error is not None:
                errors["wrong"] = str(error)
                continue
            prompt = asked["prompts"][int(result.get_response().id)]
            texts[prompt] += result.as_numpy("text_output")[0].decode()
    return texts, errors


def ask_with_callback(asked):
    """(texts, whether each answer is the last) of one prompt, by the blocking client, with an empty last answer."""
    answers = []
    parameters = {"temperature": "0", "max_tokens": str(asked["max_tokens"])}
    with blocking.InferenceServerClient(url=asked["url"]) as client:
        client.start_stream(lambda result, error: answers.append((result, error)))
        client.async_stream_infer(
            asked["model"],
            inputs_of(blocking, asked["prompts"][0], parameters, stream=True),
            request_id="1",
            enable_empty_final_response=True,
        )
        client.stop_stream()
    assert not any(error for _, error in answers), answers
    seen = [result.get_response() for result, _ in answers]
    texts = [result.as_numpy("text_output")[0].decode() for result, _ in answers if result.get_response().outputs]
    return "".join(texts), [each.parameters["triton_final_response"].bool_param for each in seen]


def describe(asked):
    """What the server says of itself and of its model, and of a call that it refuses."""
    with blocking.InferenceServerClient(url=asked["url"]) as client:
        try:
            client.infer(asked["model"], inputs_of(blocking, "x", {}))
            refusal = ""
        except InferenceServerException as error:
            refusal = error.message()
        return {
            "live": client.is_server_live(),
            "ready": client.is_server_ready() and client.is_model_ready(asked["model"]),
            "server": client.get_server_metadata(as_json=True)["name"],
            "inputs": [each["name"] for each in client.get_model_metadata(asked["model"], as_json=True)["inputs"]],
            "decoupled": client.get_model_config(asked["model"]).config.model_transaction_policy.decoupled,
            "answered": client.get_inference_statistics(asked["model"]).model_stats[0].inference_count,
            "models": [each.name for each in client.get_model_repository_index().models],
            "refusal": refusal,
        }


def main():
    """Ask, and print what came."""
    asked = json.loads(sys.argv[1])
    whole, errors = asyncio.run(ask_all(asked, stream=False))
    streamed, _ = asyncio.run(ask_all(asked, stream=True))
    alone, finals = ask_with_callback(asked)
    found = {"whole": whole, "streamed": streamed, "alone": alone, "finals": finals, "errors": errors}
    print(json.dumps(found | describe(asked)))


if __name__ == "__main__":
    main()
