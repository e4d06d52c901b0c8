"""Which rank a process is, from the variables of torchrun or of a LeaderWorkerSet."""

from __future__ import annotations

import pytest

from executor_svc.ranks.hosts.places import PlaceError, RankPlace, read_place

TORCHRUN = {
    "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}  # fmt: skip
GROUP = {"LWS_WORKER_INDEX": "1", "LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "cadenza-group-0.cadenza-group"}


def test_variables_of_torchrun() -> None:
    assert read_place(TORCHRUN, 4, None) == RankPlace(3, 4, 1, 2, "node-a", 29501)
    assert read_place(TORCHRUN | GROUP, None, 7000) == RankPlace(3, 4, 1, 2, "node-a", 7000)


def test_variables_of_a_group() -> None:
    assert read_place(GROUP, None, None) == RankPlace(1, 2, 0, 1, "cadenza-group-0.cadenza-group", 50053)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"RANK": "4"}, 4, "RANK=4: must be a number from 0 to 3"),
        ({"RANK": "-1"}, 4, "RANK=-1: must be"),
        ({"RANK": None}, 4, "RANK is not set: --distributed-executor-backend external needs RANK, WORLD_SIZE"),
        ({"MASTER_ADDR": ""}, 4, "MASTER_ADDR is not set"),
        ({}, 2, "WORLD_SIZE=4 is not --tensor-parallel-size 2"),
        ({"WORLD_SIZE": "four"}, None, "WORLD_SIZE=four: must be a number"),
        ({"LOCAL_WORLD_SIZE": "5"}, 4, "LOCAL_WORLD_SIZE=5: must be a number from 1 to 4"),
        ({"MASTER_PORT": "65535"}, 4, "MASTER_PORT=65535: must be a number from 1 to 65534"),
    ],
)
def test_wrong_variables_are_named(changes: dict[str, str | None], size: int | None, message: str) -> None:
    environment = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(PlaceError, match=message):
        read_place(environment, size, None)


def test_nothing_is_set() -> None:
    with pytest.raises(PlaceError, match="or LWS_WORKER_INDEX, LWS_GROUP_SIZE, LWS_LEADER_ADDRESS"):
        read_place({}, 2, None)
    with pytest.raises(PlaceError, match="LWS_GROUP_SIZE is not set"):
        read_place({"LWS_WORKER_INDEX": "1"}, 2, None)
