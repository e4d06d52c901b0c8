"""Options of a simulated model, and of faults for tests."""

from __future__ import annotations

from pydantic import Field

from cadenza_common.settings.help import about
from cadenza_common.settings.service import ServiceSettings


class SimulationOptions(ServiceSettings):
    """Come before the other options of the executor: `model`, whose check reads `simulate`, comes after it."""

    simulate: str | None = Field(
        None,
        min_length=1,
        description="Simulate the model: steps take no time (instant), or the time that a JSON file of step costs "
        "gives; docs/simulated.md.",
        json_schema_extra=about("Simulation", values="instant, COSTS.json"),
    )
    simulate_vocab_size: int = Field(
        32768,
        ge=2,
        le=2**21,
        description="Number of token ids of the simulated model; a config.json in the folder of --model overrides it.",
        json_schema_extra=about("Simulation", "tokens"),
    )
    simulate_eos_token_id: int | None = Field(
        None,
        ge=0,
        description="Token id that ends outputs of the simulated model; a config.json in the folder of --model "
        "overrides it.",
        json_schema_extra=about("Simulation"),
    )
    simulate_kv_groups: str | None = Field(
        None,
        min_length=1,
        description="KV groups of the simulated model, joined by commas: the positions that a row reads, or full, and "
        "the pages of a block; --num-gpu-blocks then counts pages.",
        json_schema_extra=about("Simulation", values="full:1,1024:5"),
    )
    simulate_state_pages: int = Field(
        0,
        ge=0,
        le=256,
        description="Pages of the recurrent state of each sequence of the simulated model; 0: it has none. "
        "--num-gpu-blocks then counts pages.",
        json_schema_extra=about("Simulation"),
    )
    inject: str | None = Field(
        None,
        min_length=1,
        description="Only for tests, with --simulate or a model on the CPU: faults of this process, joined by commas, "
        "each in its step of this number; die only with --simulate; docs/simulated.md.",
        json_schema_extra=about(
            "Simulation",
            values="hang@STEP[:SECONDS], oom@STEP, device-error@STEP, non-finite@STEP[:SLOT], die@TOKEN:POSITION",
        ),
    )
