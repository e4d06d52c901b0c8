"""A tiny model served by both services and loaded by transformers: what tests of SamplingParams compare."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LogitsProcessor, SuppressTokensLogitsProcessor

from cadenza import AsyncClient, RequestOutput, SamplingParams
from tests.checkpoints import make_llama
from tests.helpers.services import cadenza_services

VOCAB_SIZE, EOS = 300, 1
NUM_TOKENS = 24
FIRST_BYTE = 5
"""Id of the token of `!`: the tokenizer has the printable ASCII characters in their order."""
LETTERS = [FIRST_BYTE + ord(letter) - ord("!") for letter in "abcdefghijklmnopqrstuvwxyz"]
PROMPT = [FIRST_BYTE + (7 * i + i * i) % 90 for i in range(21)]
ROOMY = {"num_gpu_blocks": 400, "block_size": 8, "max_num_seqs": 32, "max_num_batched_tokens": 48}


def letters(token_ids: Sequence[int]) -> str:
    """Their text, if they are printable ASCII characters."""
    return "".join(chr(token_id - FIRST_BYTE + ord("!")) for token_id in token_ids)


@dataclasses.dataclass
class Reference:
    """The same checkpoint in transformers."""

    folder: Path
    model: Any

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[len, vocab] float64."""
        with torch.inference_mode():
            return self.model(torch.tensor([list(token_ids)])).logits[0].double()

    def greedy(
        self, *processors: LogitsProcessor, eos: Sequence[int] = (EOS,), num_tokens: int = NUM_TOKENS
    ) -> list[int]:
        """What `generate` makes of PROMPT."""
        ids = torch.tensor([PROMPT])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=num_tokens, pad_token_id=0,
            eos_token_id=list(eos) or None, logits_processor=list(processors),
        )  # fmt: skip
        return [int(token) for token in out[0, len(PROMPT) :]]


def load_reference(folder: Path) -> Reference:
    """Make the checkpoint in this folder."""
    make_llama(folder, tokenizer=True, vocab_size=VOCAB_SIZE)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return Reference(folder, model)


def params(**given: Any) -> SamplingParams:
    """Greedy, NUM_TOKENS tokens, unless given otherwise."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": NUM_TOKENS, **given})


def only(token_ids: Sequence[int]) -> LogitsProcessor:
    """Rules all other tokens out."""
    return SuppressTokensLogitsProcessor([i for i in range(VOCAB_SIZE) if i not in set(token_ids)])


def facts(output: RequestOutput) -> dict[str, Any]:
    """All of a result that must not depend on what else runs."""
    (sample,) = output.outputs
    return dataclasses.asdict(sample) | {"prompt": output.prompt_token_ids, "prompt_logprobs": output.prompt_logprobs}


@asynccontextmanager
async def serving(reference: Reference, order: str = "fcfs", **options: Any) -> AsyncIterator[AsyncClient]:
    """Both services and a client; after the test nothing is held."""
    options = ROOMY | options
    async with (
        cadenza_services(reference.folder, dtype="float32", scheduler={"order": order}, **options) as running,
        AsyncClient(running.target) as client,
    ):
        yield client
        await running.wait_until_free()
