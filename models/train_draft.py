"""Train the demo model's draft: `python models/train_draft.py` writes models/cadenza-demo-draft/ (seeded, CPU only).

The draft is a Llama of one layer with the demo model's width and vocabulary. It begins as the demo model's embeddings,
last layer and norm, and learns the demo model's distributions over the answers of the same generated conversations
(distillation): what decides is how often both choose the same token, not how well the draft would answer by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from demo_batches import Batcher
from demo_data import REFINE, Renderer, training_conversation
from demo_tokenizer import PAD, token_id
from tokenizers import Tokenizer
from torch.nn.functional import log_softmax, softmax
from train_demo import DEFAULT_OUT, Stage, TrainSettings, attention_in_fp32, learning_rate, make_optimizer, save
from transformers import AttentionInterface, LlamaConfig, LlamaForCausalLM

DEFAULT_DRAFT = DEFAULT_OUT.with_name("cadenza-demo-draft")


@dataclass(frozen=True, slots=True)
class DraftSettings:
    """Everything that decides the result, beside the demo model; saved next to the weights."""

    seed: int = 20261
    stage: Stage = field(default_factory=lambda: Stage(1500, decay_steps=900, peak_learning_rate=2e-3, warmup_steps=50))
    conversations_per_step: int = 80
    micro_batch_tokens: int = 768
    threads: int = 1


def build_draft(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """Return a model of one layer with the target's embeddings, last layer and norm."""
    config = LlamaConfig.from_dict({**target.config.to_dict(), "num_hidden_layers": 1})
    draft = LlamaForCausalLM(config)
    last = f"model.layers.{target.config.num_hidden_layers - 1}."
    weights = target.state_dict()
    taken = {name: weights[name.replace("model.layers.0.", last)] for name in draft.state_dict()}
    draft.load_state_dict(taken)
    return draft


def distillation_loss(
    draft: LlamaForCausalLM, target: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """Return the summed cross entropy with the target's distributions over answer tokens, and how often both agree.

    ids, weights: [rows, width], from `Batcher`.
    """
    learnt = weights[:, 1:] > 0
    with torch.no_grad():
        expected = target.lm_head(target.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[learnt])
    made = draft.lm_head(draft.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state[learnt])
    losses = -(softmax(expected.float(), -1) * log_softmax(made.float(), -1)).sum(-1)
    agreed = int((expected.argmax(-1) == made.argmax(-1)).sum())
    return losses.sum(), agreed


def train(target: LlamaForCausalLM, tokenizer: Tokenizer, settings: DraftSettings) -> tuple[LlamaForCausalLM, float]:
    """Return the trained draft, and the share of answer tokens on which both agree in the last hundred steps."""
    rng, renderer = random.Random(settings.seed), Renderer(tokenizer)
    batcher = Batcher(
        lambda: renderer.render(training_conversation(rng, REFINE)),
        token_id(tokenizer, PAD),
        settings.micro_batch_tokens,
    )
    draft = build_draft(target)
    draft.set_attn_implementation("attention_in_fp32")
    optimizer = make_optimizer(draft, TrainSettings())
    recent: list[float] = []
    start = time.monotonic()
    for step in range(settings.stage.steps):
        batches = batcher.step(settings.conversations_per_step)
        count = sum(int((weights[:, 1:] > 0).sum()) for _, weights in batches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, settings.stage)
        num_agreed = 0
        for ids, weights in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, agreed = distillation_loss(draft, target, ids, weights)
            torch.autograd.backward(loss / count)
            num_agreed += agreed
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-99:], num_agreed / count]
        if (step + 1) % 50 == 0 or step == 0:
            mean = sum(recent[-50:]) / len(recent[-50:])
            print(f"step {step + 1} agreement {mean:.4f} {time.monotonic() - start:.0f} s", flush=True)
    return draft, sum(recent) / len(recent)


def main() -> None:
    """Train the draft, and leave a record of the run beside its weights."""
    defaults = DraftSettings()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--out", type=Path, default=DEFAULT_DRAFT)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    given = parser.parse_args()
    settings = DraftSettings(seed=given.seed)
    start = time.monotonic()
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    AttentionInterface.register("attention_in_fp32", attention_in_fp32)
    target = LlamaForCausalLM.from_pretrained(given.target, dtype=torch.float32)
    target.set_attn_implementation("attention_in_fp32")
    tokenizer = Tokenizer.from_file(str(given.target / "tokenizer.json"))
    draft, agreement = train(target.eval(), tokenizer, settings)
    given.out.mkdir(parents=True, exist_ok=True)
    save(draft, tokenizer, given.out)
    record = {
        "settings": asdict(settings),
        "num_parameters": sum(p.numel() for p in draft.parameters()),
        "agreement": round(agreement, 4),
        "minutes": round((time.monotonic() - start) / 60, 1),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    (given.out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
