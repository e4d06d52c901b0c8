"""pydantic-ai against a gateway: `python with_pydantic_ai.py '{"url": …}'` prints what it made, as JSON in one line.

The types are those that programs write: a union with a discriminator that has a default, and a dict of known keys.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models import Model
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.run import AgentRunResult
from pydantic_ai.settings import ModelSettings

asked = json.loads(sys.argv[1])
_MAX_TOKENS = 1500
"""The demo model likes whitespace."""
Small = Annotated[int, Field(ge=0, le=9)]


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: Small


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    is_good: bool


class Owner(BaseModel):
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    rooms: dict[Literal["large", "small"], Small]
    secret: Annotated[str, Field(max_length=4, json_schema_extra={"format": "password"})]


async def run(model: Model, output: Any, max_tokens: int) -> AgentRunResult[Any]:
    settings = ModelSettings(max_tokens=max_tokens, temperature=0)
    return await Agent(model, output_type=output, retries=0).run(asked["question"], model_settings=settings)


async def main() -> None:
    url, name = asked["url"], asked["model"]
    openai = OpenAIProvider(base_url=f"{url}/v1", api_key="any")
    chat, responses = OpenAIChatModel(name, provider=openai), OpenAIResponsesModel(name, provider=openai)
    messages = AnthropicModel(name, provider=AnthropicProvider(base_url=url, api_key="any"))
    outputs = [(each, kind) for each in (chat, responses) for kind in (NativeOutput, ToolOutput)]
    made = [await run(model, kind(Owner), _MAX_TOKENS) for model, kind in [*outputs, (messages, ToolOutput)]]
    plain = await run(chat, str, asked["max_tokens"])
    found = {"made": [each.output.model_dump() for each in made], "text": plain.output}
    print(json.dumps({**found, "tokens": plain.usage.output_tokens}))


asyncio.run(main())
