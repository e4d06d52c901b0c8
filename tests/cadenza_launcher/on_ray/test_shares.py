"""What each rank gets of its machine on Ray."""

from __future__ import annotations

from typing import Any

import pytest

from cadenza.errors import OptionError
from cadenza_launcher.on_ray.cluster import Machine, all_on_loopback
from cadenza_launcher.on_ray.shares import Placement, RankShare, placement_of, rank_share

CPUS = [Machine("10.0.0.1", 8, 0), Machine("10.0.0.2", 16, 0)]
GPUS = [Machine("10.0.0.1", 8, 0), Machine("10.0.0.2", 16, 4)]


@pytest.mark.parametrize(
    ("values", "machines", "count", "share"),
    [
        ({}, CPUS, 2, RankShare({"CPU": 8.0}, ["--device=cpu", "--num-threads=8", "--gpu-memory-utilization=0.5"])),
        ({}, CPUS, 4, RankShare({"CPU": 4.0}, ["--device=cpu", "--num-threads=4", "--gpu-memory-utilization=0.25"])),
        (
            {"num_gpu_blocks": 9, "tensor_parallel_size": 2},
            CPUS,
            3,
            RankShare({"CPU": 2.0}, ["--device=cpu", "--num-threads=2"]),
        ),
        (
            {"num_threads": 3, "gpu_memory_utilization": 0.1},
            CPUS,
            99,
            RankShare({"CPU": 3.0}, ["--device=cpu", "--num-threads=3"]),
        ),
        ({}, GPUS, 4, RankShare({"GPU": 1.0}, ["--device=cuda"])),
        ({"device": "cuda"}, GPUS, 9, RankShare({"GPU": 1.0}, ["--device=cuda"])),
        (
            {"device": "cpu", "num_gpu_blocks": 1},
            GPUS,
            1,
            RankShare({"CPU": 8.0}, ["--device=cpu", "--num-threads=8"]),
        ),
        ({"simulate": "instant"}, GPUS, 9, RankShare({"CPU": 1.0}, [])),
    ],
)
def test_all_ranks_get_the_same(values: dict[str, Any], machines: list[Machine], count: int, share: RankShare) -> None:
    assert rank_share(values, machines, count) == share


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(OptionError, match="no machine of the Ray cluster has a GPU"):
        rank_share({"device": "cuda"}, CPUS, 1)
    with pytest.raises(OptionError, match="no machine that is alive"):
        rank_share({}, [], 1)


def test_machines_that_no_other_can_reach() -> None:
    assert all_on_loopback([Machine("127.0.0.1", 1, 0), Machine("127.0.0.2", 1, 0)])
    assert not all_on_loopback([Machine("127.0.0.1", 1, 0), CPUS[0]])


@pytest.mark.parametrize(
    ("values", "placement"),
    [
        ({}, Placement({"GPU": 1.0}, 1, "SPREAD")),
        ({"tensor_parallel_size": 4}, Placement({"GPU": 4.0}, 1, "SPREAD")),
        ({"tensor_parallel_size": 4, "ray_placement": "strict-pack"}, Placement({"GPU": 1.0}, 4, "STRICT_PACK")),
        ({"ray_placement": "pack"}, Placement({"GPU": 1.0}, 1, "PACK")),
    ],
)
def test_ranks_are_together_unless_told(values: dict[str, Any], placement: Placement) -> None:
    assert placement_of(values, RankShare({"GPU": 1.0}, [])) == placement
