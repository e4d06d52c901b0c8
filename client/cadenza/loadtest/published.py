"""Length distributions with published parameters.

ShareGPT, people's conversations with ChatGPT: the PagedAttention paper prints for its workload of it a mean input of
161.31 tokens and a mean output of 337.99 (Kwon et al., SOSP 2023, figure 11 in section 6.1,
https://arxiv.org/abs/2309.06180; its text says 8.4 and 5.8 times Alpaca's, for which it prints 19.31 and 58.45).
vLLM's benchmark leaves out what has a prompt or an output of under 4 tokens, a prompt of over 1,024, or over 2,048
together (`benchmarks/benchmark_serving.py` in https://github.com/vllm-project/vllm).

Published are the two means and the limits. Assumed are the form, log-normal on each side; the standard deviations of
the logarithm, chosen for a long tail; that output does not depend on input; and that an output has at most 1,024
tokens, so that no request is over 2,048 together.
"""

from __future__ import annotations

from cadenza.loadtest.lengths import LogNormal

SHAREGPT_MEAN_INPUT = 161.31
SHAREGPT_MEAN_OUTPUT = 337.99
_SIGMA_INPUT, _SIGMA_OUTPUT = 1.6, 0.8
_SHORTEST, _LONGEST = 4, 1024


def sharegpt_lengths() -> tuple[str, str]:
    """Prompt and output lengths as `parse_lengths` takes them."""
    return (
        lognormal_text(SHAREGPT_MEAN_INPUT, _SIGMA_INPUT, _SHORTEST, _LONGEST),
        lognormal_text(SHAREGPT_MEAN_OUTPUT, _SIGMA_OUTPUT, _SHORTEST, _LONGEST),
    )


def lognormal_text(mean: float, sigma: float, low: int, high: int) -> str:
    """Log-normal lengths that have `mean` after they are clipped to low and high, where low < mean < high."""
    from scipy.optimize import brentq

    def too_large(center: float) -> float:
        return LogNormal(center, low, high, sigma).mean - mean

    # Clipping at 1,024 takes less than all but a small part of the mean: a center 1,000 times `high` clips all of it.
    center = float(brentq(too_large, mean / 1000, high * 1000.0))
    return f"lognormal:{center:.6g}:{sigma:g}:{low}:{high}"
