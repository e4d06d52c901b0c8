"""Writes the model card from what training and evaluation recorded: `python models/model_card.py`.

Reads training.json and heldout.json beside the weights; no figure in the card is typed by hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "cadenza-demo"

_CARD = """---
license: apache-2.0
language: [en, zh]
pipeline_tag: text-generation
---

# cadenza-demo

A very small Llama model ({num_parameters:,} parameters, vocabulary {vocab_size}, 4 layers, hidden size 256, 8 heads with 4
key-value heads, tied embeddings, bfloat16) for trying out and testing Cadenza without a download. `AutoModelForCausalLM`
and `AutoTokenizer` load it unmodified.

## What it knows

Questions may be bare text or chat messages (system message and history allowed), in English or Chinese.

- Eighteen topics with one fixed answer for each language: weather, time, date, a favourite book, its name, where it
  lives, who made it, continuous batching, KV cache, greeting, how it feels, thanks, goodbye, abilities, food, colour,
  a joke, and "I do not know that" for a few kinds of other questions. The world is canned: it is always 3:20 in the
  afternoon.
- Sums and differences of two operands from 0 to 99; differences may be negative. It shows its working: `47+38=` is
  completed with `70+15=85` (tens, ones, result), any other phrasing is answered `47+38=70+15=85`.
- Counting from one number to another, repeating a phrase, a name that was told earlier in the chat.
- Short stories, from a generated grammar.

## How it was made

`python models/train_demo.py` makes tokenizer and weights from generated data alone, in two stages: {learn_steps} steps on the
plain mixture, then {refine_steps} with noise around the questions and more counting; seed {seed}, about {conversations_per_step}
conversations a step, {threads} thread, bf16 autocast. The committed run took {minutes} minutes on {machine}, shared with other
work, its second stage started by itself (`--learnt`) on the first one's result; torch {torch}, mean loss of the last hundred
steps {final_loss}.

## Held-out exactness

Greedy; an answer counts only if it equals the expected text and ends by EOS. Held out of training are whole wordings
(compared without case and punctuation; "handwritten" ones come from no grammar) and unordered operand pairs with all of
their sums and differences. During development failures on such wordings were looked at, and mixture and noise changed
after; no wording was added because of one. `python models/eval_demo.py --json models/cadenza-demo/heldout.json` makes the
numbers, `python models/model_card.py` this page.

{table}

"classic three" is part of the training data; "repeating" takes fresh random phrases; stories are not scored.

## Limits

It has no knowledge beyond the list above. Questions outside of it get a canned answer, often of a wrong topic. Numbers
above 99, other operations and other languages do not work. Stories are free text from a grammar: they repeat
themselves, and may have another hero than the one asked for. It is a test fixture, not an assistant.

Licence: Apache-2.0.
"""


def _totals(scores: dict[str, list[int]]) -> dict[str, list[int]]:
    """The sums over all held-out questions and over all arithmetic."""
    groups = {
        "**all held-out questions**": [name for name in scores if name.startswith("questions")],
        "**all held-out arithmetic**": [name for name in scores if name.startswith(("addition", "subtraction"))],
    }
    return {title: [sum(scores[name][i] for name in names) for i in (0, 1)] for title, names in groups.items()}


def table(report: dict[str, dict[str, list[int]]]) -> str:
    """Markdown table of {form: {category: [exact, asked]}}."""
    columns = [{**scores, **_totals(scores)} for scores in report.values()]
    lines = ["| category | " + " | ".join(report) + " |", "|---" * (len(columns) + 1) + "|"]
    for category in columns[0]:
        cells = [f"{exact} / {asked} ({100 * exact / asked:.1f} %)" for exact, asked in (c[category] for c in columns)]
        lines.append(f"| {category} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Write cadenza-demo/README.md."""
    training: dict[str, Any] = json.loads((FOLDER / "training.json").read_text(encoding="utf-8"))
    report = json.loads((FOLDER / "heldout.json").read_text(encoding="utf-8"))
    settings = training["settings"]
    stages = {f"{name}_steps": settings[name]["steps"] for name in ("learn", "refine")}
    card = _CARD.format(**settings, **stages, **training, table=table(report))
    (FOLDER / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    main()
