"""Bucket bounds. Those of vLLM's families are vLLM's own, so that its dashboards fit; ours have finer ones too."""

from __future__ import annotations

VLLM_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)  # fmt: skip
VLLM_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
VLLM_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
VLLM_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
VLLM_REQUEST_TOKENS = (
    1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000,
)  # fmt: skip
"""vLLM's own end at the model's longest sequence, which may change here while the service runs."""

FIRST_TOKEN_S = VLLM_FIRST_TOKEN_S
TOKEN_S = (0.001, 0.0025, 0.005, *VLLM_TOKEN_S)
REQUEST_S = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, *VLLM_REQUEST_S)
STEP_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0, 60.0)
GAP_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5, 2.5)
STEP_SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
PLAN_BYTES = (100, 200, 500, 1000, 2000, 5000, 10_000, 50_000, 200_000, 1_000_000, 5_000_000, 50_000_000)
