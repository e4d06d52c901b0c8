"""Length distributions with published parameters.

ShareGPT, users' conversations with ChatGPT: the PagedAttention paper prints for its workload a mean input of 161.31
tokens and a mean output of 337.99 (Kwon et al., SOSP 2023, figure 11 in section 6.1, https://arxiv.org/abs/2309.06180;
its text states 8.4 and 5.8 times Alpaca's means, which are 19.31 and 58.45). vLLM's benchmark leaves out requests with
a prompt or an output of under 4 tokens, a prompt of over 1,024, or over 2,048 tokens together
(`benchmarks/benchmark_serving.py` in https://github.com/vllm-project/vllm).

The two means and the limits are published. The following is assumed: both lengths are log-normal; the standard
deviations of the logarithm, chosen for a long tail; outputs do not depend on inputs; an output has at most 1,024
tokens, so that no request has over 2,048 tokens together.
"""

from __future__ import annotations

from cadenza_loadtest.workloads.lengths import LogNormal

SHAREGPT_MEAN_INPUT = 161.31
SHAREGPT_MEAN_OUTPUT = 337.99
_SIGMA_INPUT, _SIGMA_OUTPUT = 1.6, 0.8
_SHORTEST, _LONGEST = 4, 1024


def sharegpt_lengths() -> tuple[str, str]:
    """Prompt and output lengths in the form of `parse_lengths`."""
    return (
        lognormal_text(SHAREGPT_MEAN_INPUT, _SIGMA_INPUT, _SHORTEST, _LONGEST),
        lognormal_text(SHAREGPT_MEAN_OUTPUT, _SIGMA_OUTPUT, _SHORTEST, _LONGEST),
    )


def lognormal_text(mean: float, sigma: float, low: int, high: int) -> str:
    """Log-normal lengths whose mean after clipping to low and high is `mean`; low < mean < high."""
    from scipy.optimize import brentq

    def too_large(center: float) -> float:
        return LogNormal(center, low, high, sigma).mean - mean

    # Clipping at 1,024 takes less than all but a small part of the mean: a center 1,000 times `high` clips all of it.
    center = float(brentq(too_large, mean / 1000, high * 1000.0))
    return f"lognormal:{center:.6g}:{sigma:g}:{low}:{high}"
