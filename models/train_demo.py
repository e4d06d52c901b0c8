"""Train the demo model from nothing: `python models/train_demo.py` writes models/cadenza-demo/ (seeded, CPU only).

All data are generated on the fly from the seed; nothing is downloaded. The weights are trained in fp32 under bf16
autocast and saved as bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from demo_batches import Batcher
from demo_data import LEARN, REFINE, Curriculum, Renderer, tokenizer_texts, training_conversation
from demo_tokenizer import BOS, EOS, PAD, token_id, train_tokenizer, wrap
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM

DEFAULT_OUT = Path(__file__).resolve().parent / "cadenza-demo"
MAX_POSITIONS = 2048


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage's learning rate over its steps."""

    steps: int
    decay_steps: int
    peak_learning_rate: float
    warmup_steps: int


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Everything that decides the result; saved next to the weights."""

    seed: int = 20260
    learn: Stage = Stage(steps=4200, decay_steps=1300, peak_learning_rate=2e-3, warmup_steps=120)
    refine: Stage = Stage(steps=2000, decay_steps=1500, peak_learning_rate=1e-3, warmup_steps=60)
    conversations_per_step: int = 80
    weight_decay: float = 0.05
    clip_norm: float = 1.0
    vocab_size: int = 2048
    tokenizer_samples: int = 40_000
    micro_batch_tokens: int = 768
    threads: int = 1  # two hardware threads of one core gain nothing, and suffer when other work shares them
    autocast: bool = True


def build_model(settings: TrainSettings, tokenizer: Tokenizer) -> LlamaForCausalLM:
    """Return the untrained Llama model (about 3.5 million parameters, grouped-query attention, tied embeddings)."""
    config = LlamaConfig(
        vocab_size=settings.vocab_size,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=token_id(tokenizer, EOS),
        pad_token_id=token_id(tokenizer, PAD),
    )
    return LlamaForCausalLM(config)


def learning_rate(step: int, stage: Stage) -> float:
    """Linear warm-up, a constant plateau, then half a cosine down to 1 % of the peak over the last `decay_steps`."""
    if step < stage.warmup_steps:
        return stage.peak_learning_rate * (step + 1) / stage.warmup_steps
    progress = max(0.0, (step - (stage.steps - stage.decay_steps)) / stage.decay_steps)
    return stage.peak_learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * progress)))


def attention_in_fp32(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Causal attention in fp32: torch's bf16 attention backward is several times slower than fp32 on this CPU."""
    groups = query.shape[1] // key.shape[1]
    keys, values = (tensor.float().repeat_interleave(groups, dim=1) for tensor in (key, value))
    with torch.autocast("cpu", enabled=False):
        mixed = scaled_dot_product_attention(query.float(), keys, values, is_causal=True, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None


def weighted_loss(model: LlamaForCausalLM, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the summed weighted loss of the answer tokens.

    Padding is on the right, so that causal attention alone keeps it out; logits are computed for answers only.
    """
    hidden = model.model(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
    learnt = weights[:, 1:] > 0
    logits = model.lm_head(hidden[learnt])
    losses = cross_entropy(logits.float(), ids[:, 1:][learnt], reduction="none")
    return (losses * weights[:, 1:][learnt]).sum()


def make_optimizer(model: LlamaForCausalLM, settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=settings.learn.peak_learning_rate, betas=(0.9, 0.98), fused=True)


def train(
    model: LlamaForCausalLM, renderer: Renderer, pad_id: int, settings: TrainSettings, stage: Stage, fed: Curriculum
) -> float:
    """Run one stage with an optimizer of its own and return the mean loss of its last hundred steps."""
    rng = random.Random(settings.seed + (1 if fed is LEARN else 2))
    batcher = Batcher(lambda: renderer.render(training_conversation(rng, fed)), pad_id, settings.micro_batch_tokens)
    optimizer = make_optimizer(model, settings)
    recent: list[float] = []
    start, num_tokens = time.monotonic(), 0
    model.train()
    for step in range(stage.steps):
        batches = batcher.step(settings.conversations_per_step)
        total_weight = sum(float(weights[:, 1:].sum()) for _, weights in batches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, stage)
        step_loss = 0.0
        for ids, weights in batches:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=settings.autocast):
                loss = weighted_loss(model, ids, weights) / total_weight
            torch.autograd.backward(loss)
            step_loss += loss.item()
            num_tokens += ids.numel()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recent = [*recent[-99:], step_loss]
        if (step + 1) % 50 == 0 or step == 0:
            seconds = time.monotonic() - start
            mean = sum(recent[-50:]) / len(recent[-50:])
            print(f"step {step + 1} loss {mean:.4f} {seconds:.0f} s {num_tokens / seconds:.0f} tokens/s", flush=True)
    return sum(recent) / len(recent)


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the checkpoint in Hugging Face format, weights in bfloat16."""
    model.eval()
    model.set_attn_implementation("sdpa")
    model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=256,
        bos_token_id=token_id(tokenizer, BOS),
        eos_token_id=token_id(tokenizer, EOS),
        pad_token_id=token_id(tokenizer, PAD),
    )
    model.save_pretrained(out)
    wrap(tokenizer, MAX_POSITIONS).save_pretrained(out)


def parse_arguments() -> tuple[Path, Path | None, TrainSettings]:
    """Read the command line; every default is what the committed model was made with."""
    defaults = TrainSettings()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    parser.add_argument("--learnt", type=Path, help="a folder that holds the first stage's result: only refine it")
    parser.add_argument("--steps", type=int, default=defaults.learn.steps, help="steps of the first stage")
    parser.add_argument("--refine-steps", type=int, default=defaults.refine.steps)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    given = parser.parse_args()
    settings = TrainSettings(
        seed=given.seed,
        learn=replace(defaults.learn, steps=given.steps),
        refine=replace(defaults.refine, steps=given.refine_steps),
    )
    return given.out, given.learnt, settings


def learn(out: Path, settings: TrainSettings) -> None:
    """First stage: train tokenizer and model from nothing and save both."""
    tokenizer = train_tokenizer(tokenizer_texts(settings.tokenizer_samples, settings.seed), settings.vocab_size)
    model = build_model(settings, tokenizer)
    model.set_attn_implementation("attention_in_fp32")
    train(model, Renderer(tokenizer), token_id(tokenizer, PAD), settings, settings.learn, LEARN)
    save(model, tokenizer, out)


def refine(learnt: Path, out: Path, settings: TrainSettings) -> dict[str, float]:
    """Second stage: continue from the saved weights, with harder questions and more counts; returns facts about it."""
    tokenizer = Tokenizer.from_file(str(learnt / "tokenizer.json"))
    model = LlamaForCausalLM.from_pretrained(learnt, dtype=torch.float32)
    model.set_attn_implementation("attention_in_fp32")
    loss = train(model, Renderer(tokenizer), token_id(tokenizer, PAD), settings, settings.refine, REFINE)
    save(model, tokenizer, out)
    return {"num_parameters": sum(p.numel() for p in model.parameters()), "final_loss": round(loss, 5)}


def main() -> None:
    """Run both stages, or the second alone, and leave a record of the run beside the weights."""
    out, learnt, settings = parse_arguments()
    start = time.monotonic()
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    AttentionInterface.register("attention_in_fp32", attention_in_fp32)
    out.mkdir(parents=True, exist_ok=True)
    minutes = 0.0
    if learnt is None:
        learn(out, settings)
    else:
        minutes = json.loads((learnt / "training.json").read_text(encoding="utf-8"))["minutes"]
    made = refine(learnt or out, out, settings)
    record = {
        "settings": asdict(settings),
        **made,
        "minutes": round(minutes + (time.monotonic() - start) / 60, 1),
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
    }
    (out / "training.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
