"""The rotary embedding of a GGUF file, as the fields of a config.json."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from cadenza_common.gguf.file import GgufFile
from executor_svc.models.folder import LoaderError
from executor_svc.models.gguf.latent_content import LATENTS, LOG_MULTIPLIER

_PARTIAL = ("glm4", "glm4moe", "gptneox", "minimax-m2", "nemotron", "phi2", "phi3", "qwen35", "qwen35moe", "qwen3next")
"""Architectures that rotate a part of each head."""
_NOT_ROTATED = ("nemotron_h", "nemotron_h_moe")
"""Architectures without rotary embedding, whose files state hidden_size / num_attention_heads for it."""
VectorReader = Callable[[str], list[float] | None]


def rope_content(file: GgufFile, architecture: str, head_size: int, read_vector: VectorReader) -> dict[str, Any]:
    """Return the fields; read_vector: returns the tensor of a name. Raises GgufError, and what read_vector raises."""
    metadata, prefix = file.metadata, f"{architecture}.rope"
    theta = shortest(metadata.number(f"{prefix}.freq_base", 10_000.0))
    if architecture == "gemma4":
        windowed = {"rope_theta": shortest(metadata.number(f"{prefix}.freq_base_swa", 10_000.0))}
        full = _proportional(file, read_vector("rope_freqs.weight")) | {"rope_theta": theta}
        return {"rope_parameters": {"full_attention": full, "sliding_attention": windowed}}
    content: dict[str, Any] = {"rope_theta": theta}
    size = metadata.integer(f"{prefix}.dimension_count", head_size)
    if architecture in _PARTIAL:
        content["partial_rotary_factor"] = _share(size, head_size)
    elif size != head_size and architecture not in _NOT_ROTATED:
        raise metadata.error(f"{prefix}.dimension_count", f"must be the size of a head, {head_size}, not {size}")
    if architecture == "gemma3":
        content["rope_local_base_freq"] = shortest(metadata.number(f"{prefix}.freq_base_swa", 10_000.0))
    context = metadata.integer(f"{architecture}.context_length")
    original = metadata.integer(f"{prefix}.scaling.original_context_length", context)
    factors = _factors(file, read_vector)
    if factors is None:
        scaling = _scaling(file, prefix, original)
    else:
        short, long = factors
        scaling = {
            "rope_type": "longrope",
            "short_factor": short,
            "long_factor": long,
            "original_max_position_embeddings": original,
            "attention_factor": shortest(metadata.number(f"{prefix}.scaling.attn_factor", 1.0)),
        }
        kind = metadata.text(f"{prefix}.scaling.type", "none")
        if kind not in ("none", "longrope"):
            raise metadata.error(f"{prefix}.scaling.type", f"is {kind[:100]!r}, and the file has factors of its own")
    if scaling:
        content["rope_scaling"] = scaling | {"rope_theta": theta}
    if architecture == "phi3":
        content["original_max_position_embeddings"] = original
    return content


def _proportional(file: GgufFile, factors: list[float] | None) -> dict[str, Any]:
    """Return the type of Gemma 4's layers with full attention: factors are 1, and 1e30 where nothing is rotated."""
    if factors is None:
        return {}
    rotated = sum(factor == 1.0 for factor in factors)
    if any(factor != 1.0 for factor in factors[:rotated]) or any(factor < 1e29 for factor in factors[rotated:]):
        raise LoaderError(f"{file.paths[0]}: tensor rope_freqs.weight must hold 1, and 1e30 from some number on")
    return {"rope_type": "proportional", "partial_rotary_factor": _share(2 * rotated, 2 * len(factors))}


def _factors(file: GgufFile, read_vector: VectorReader) -> tuple[list[float], list[float]] | None:
    """Return the factors of wavelengths within the original length and beyond it.

    `rope_freqs` are those of Llama 3.1 for all lengths: converters store the factors and not what they come from.
    """
    uniform = read_vector("rope_freqs.weight")
    if uniform is not None:
        return uniform, uniform
    short, long = read_vector("rope_factors_short.weight"), read_vector("rope_factors_long.weight")
    if (short is None) != (long is None):
        raise LoaderError(f"{file.paths[0]}: of the tensors rope_factors_short and rope_factors_long, one is missing")
    return None if short is None or long is None else (short, long)


def _scaling(file: GgufFile, prefix: str, original: int) -> dict[str, Any] | None:
    """Return rope_scaling of the metadata alone."""
    metadata = file.metadata
    factor = shortest(metadata.number(f"{prefix}.scaling.factor", metadata.number(f"{prefix}.scale_linear", 0.0)))
    kind = metadata.text(f"{prefix}.scaling.type", "linear" if factor else "none")
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind != "yarn":
        raise metadata.error(f"{prefix}.scaling.type", f"{kind[:100]!r} is not supported; supported: linear, yarn")
    log_multiplier = metadata.number(f"{prefix}.scaling.yarn_log_multiplier", 0.0)
    latent = prefix.removesuffix(".rope") in LATENTS
    if log_multiplier and prefix != "mistral3.rope" and not latent:
        raise metadata.error(f"{prefix}.scaling.yarn_log_multiplier", "other than 0 is not supported")
    if metadata.number(f"{prefix}.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise metadata.error(f"{prefix}.scaling.yarn_ext_factor", "other than 1 is not supported")
    attention = metadata.number(f"{prefix}.scaling.attn_factor", 1.0)
    attention *= metadata.number(f"{prefix}.scaling.yarn_attn_factor", 1.0)
    scaling: dict[str, Any] = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": shortest(metadata.number(f"{prefix}.scaling.yarn_beta_fast", 32.0)),
        "beta_slow": shortest(metadata.number(f"{prefix}.scaling.yarn_beta_slow", 1.0)),
    }
    if log_multiplier and latent:  # mscale, which files do not have, is the same in all that are published
        mscale = shortest(log_multiplier / LOG_MULTIPLIER)
        scaling |= {"mscale": mscale, "mscale_all_dim": mscale}
    elif log_multiplier:  # mscale_all_dim; the other one, which files do not have, is 1
        scaling |= {"mscale": 1.0, "mscale_all_dim": shortest(log_multiplier)}
    elif attention != 1.0 and factor >= 1:
        scaling["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0)
    return scaling


def _share(size: int, head_size: int) -> float:
    """Return the number whose product with head_size has the integer part `size`, as transformers computes it."""
    share = size / head_size
    return share if int(head_size * share) == size else math.nextafter(share, math.inf)


def shortest(number: float) -> float:
    """Return the decimal number of fewest digits with the same float32: 1e-05 instead of 9.999999747378752e-06."""
    with np.errstate(over="ignore"):  # infinite then, which is refused by its field
        return float(str(np.float32(number)))
