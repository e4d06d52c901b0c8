"""How often the demo model's draft is right, on held-out questions: `python models/eval_draft.py` writes its card.

The demo model answers greedily, with plain transformers. Where the draft's most likely token, behind the same tokens,
is the demo model's, a draft is accepted; so one pass over each answer says what any number of drafts would give.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from demo_tasks import Turn
from eval_demo import DEFAULT_MODEL, Case, arithmetic_cases, load, other_cases, question_cases, render_prompt
from train_draft import DEFAULT_DRAFT
from transformers import PreTrainedModel, PreTrainedTokenizerBase

NUM_DRAFTS = 5
_MOST_TOKENS = 256
_STORIES = (
    "Tell me a long story about a dragon.",
    "Tell me a short story about a girl.",
    "Tell me a long story about a bear.",
    "Tell me a story about an owl.",
    "讲一个长故事，主角是小狗。",
    "讲一个关于小猫的故事。",
)

_CARD = """---
license: apache-2.0
language: [en, zh]
---

# cadenza-demo-draft

A draft model for [cadenza-demo](../cadenza-demo/README.md): a Llama of one layer ({num_parameters:,} parameters) with its
vocabulary. Alone it is of no use; with it the demo model answers in fewer steps, and with the same tokens:

```sh
cadenza up models/cadenza-demo --speculative draft --speculative-model models/cadenza-demo-draft
make demo DEMO_ARGS='--speculative draft'
```

## How it was made

`python models/train_draft.py`: it begins as the demo model's embeddings, last layer and norm, and learns the demo model's
distributions over the answers of generated conversations, {steps} steps of about {conversations_per_step} conversations, seed
{seed}. The committed run took {minutes} minutes on {machine}; torch {torch}. In its last hundred steps both models chose the
same token {agreement:.1%} of the time.

## Held out

Greedy answers in bfloat16 to the held-out questions of the demo model's card, asked as chat messages, and to {num_stories} requests
for stories. *Same token*: how often the draft's choice is the demo model's, behind the same tokens. *Tokens a step*: with
{num_drafts} drafts in a step, which end at the first wrong one. `python models/eval_draft.py` makes this page and `heldout.json`.

| category | answers | same token | tokens a step |
|---|---|---|---|
{table}

Licence: Apache-2.0.
"""


@torch.inference_mode()
def agreement(target: PreTrainedModel, draft: PreTrainedModel, prompt: list[int]) -> list[bool]:
    """Return for each token of the target's greedy answer but the first whether the draft would choose it too."""
    output = target.generate(torch.tensor([prompt]), max_new_tokens=_MOST_TOKENS, do_sample=False)
    chosen = draft(output[:, :-1]).logits[0].argmax(-1)
    first = len(prompt)
    return (chosen[first:] == output[0, first + 1 :]).tolist()


def num_steps(right: list[bool], num_drafts: int) -> int:
    """Return how many steps give the tokens behind the first; right: of each whether its draft is accepted."""
    at = steps = 0
    while at < len(right):
        drafts = right[at : at + num_drafts]
        at += 1 + (drafts.index(False) if False in drafts else len(drafts))
        steps += 1
    return steps


def evaluate(
    target: PreTrainedModel, draft: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, cases: Iterable[Case]
) -> dict[str, dict[str, float]]:
    """Return figures by category."""
    by_category: dict[str, list[list[bool]]] = defaultdict(list)
    for case in cases:
        prompt = render_prompt(tokenizer, case.turn.prompt, "chat")
        by_category[case.category].append(agreement(target, draft, prompt))
    found = {}
    for category, answers in by_category.items():
        tokens = sum(map(len, answers))
        found[category] = {
            "answers": len(answers),
            "same_token": round(sum(map(sum, answers)) / tokens, 4),
            "tokens_per_step": round(tokens / sum(num_steps(right, NUM_DRAFTS) for right in answers), 2),
        }
    return found


def write_card(folder: Path, found: dict[str, dict[str, float]]) -> None:
    """Write README.md from training.json and the figures."""
    training: dict[str, Any] = json.loads((folder / "training.json").read_text(encoding="utf-8"))
    rows = [
        f"| {category} | {each['answers']} | {each['same_token']:.1%} | {each['tokens_per_step']:.2f} |"
        for category, each in found.items()
    ]
    settings = training["settings"]
    card = _CARD.format(
        **settings, **training, steps=settings["stage"]["steps"], num_stories=len(_STORIES), num_drafts=NUM_DRAFTS,
        table="\n".join(rows),
    )  # fmt: skip
    (folder / "README.md").write_text(card, encoding="utf-8")


def main() -> None:
    """Evaluate, and write heldout.json and README.md beside the draft's weights."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=DEFAULT_MODEL)
    parser.add_argument("--draft", type=Path, default=DEFAULT_DRAFT)
    given = parser.parse_args()
    torch.set_num_threads(2)
    target, tokenizer = load(given.target, torch.bfloat16)
    draft, _ = load(given.draft, torch.bfloat16)
    stories = [Case("stories", Turn("story", prompt, "")) for prompt in _STORIES]
    cases = [*question_cases(2, seed=7), *arithmetic_cases(20, seed=8), *other_cases(20, seed=9), *stories]
    found = evaluate(target, draft, tokenizer, cases)
    (given.draft / "heldout.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_card(given.draft, found)
    print((given.draft / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
