"""Asks a server with litellm, as `openai/…`, `hosted_vllm/…` and for completions; prints what it got."""

import json
import sys

import litellm

asked = json.loads(sys.argv[1])
server = {"api_base": f"{asked['url']}/v1", "api_key": "any", "temperature": 0, "max_tokens": asked["max_tokens"]}
chat = {**server, "messages": [{"role": "user", "content": asked["question"]}]}
found = {}
for provider in ("openai", "hosted_vllm"):
    model = f"{provider}/{asked['model']}"
    whole = litellm.completion(model=model, **chat)
    chunks = list(litellm.completion(model=model, **chat, stream=True, stream_options={"include_usage": True}))
    found[provider] = {
        "text": whole.choices[0].message.content,
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "finish": whole.choices[0].finish_reason,
        "tokens": whole.usage.completion_tokens,
        "streamed_tokens": chunks[-1].usage.completion_tokens,
    }
# As hosted_vllm it takes additionalProperties out of schemas: objects have what is named without.
tools = {
    "model": f"hosted_vllm/{asked['model']}",
    "tools": [{"type": "function", "function": asked["tool"]}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 120,
}
called = litellm.completion(**chat | tools)
streamed = litellm.stream_chunk_builder(list(litellm.completion(**chat | tools, stream=True)))
found["calls"] = [
    {"name": call.function.name, "arguments": json.loads(call.function.arguments)}
    for answer in (called, streamed)
    for call in answer.choices[0].message.tool_calls
]
turn = called.choices[0].message  # as it is, with what litellm has noted in it
results = [{"role": "tool", "tool_call_id": call.id, "content": "21"} for call in turn.tool_calls]
loop = {**chat, "messages": [*chat["messages"], turn, *results], "tools": tools["tools"]}
found["ends"] = [
    litellm.completion(model=f"{provider}/{asked['model']}", **loop).choices[0].finish_reason
    for provider in ("openai", "hosted_vllm")
]
completion = litellm.text_completion(model=f"text-completion-openai/{asked['model']}", prompt=asked["prompt"], **server)
found["completion"] = completion.choices[0].text
try:
    litellm.completion(model=f"openai/{asked['model']}", **server, messages=[{"role": "user", "content": "5 " * 5000}])
except litellm.ContextWindowExceededError:
    found["is_too_long"] = True
print(json.dumps(found))
