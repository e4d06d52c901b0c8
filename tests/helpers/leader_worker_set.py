"""Makes and replaces groups of pods as LeaderWorkerSet does.

By its documents on variables (https://lws.sigs.k8s.io/docs/reference/labels-annotations-and-environment-variables/) and
rollouts (https://lws.sigs.k8s.io/docs/concepts/rollout-strategy/).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.helpers.manifest_compose import PodInstance
from tests.helpers.manifests import PodTemplate, worker_template

if TYPE_CHECKING:
    from tests.helpers.compose_cluster import ComposeCluster, Replica


def group_pods(overlay: str, leader: PodTemplate, index: int) -> list[PodInstance]:
    """The pods of a group. Their containers are not started again by themselves: the group is made anew instead."""
    owner, worker = leader.owner, worker_template(overlay)
    assert worker is not None
    assert owner["spec"]["leaderWorkerTemplate"]["restartPolicy"] == "RecreateGroupOnPodRestart"
    size, name = owner["spec"]["leaderWorkerTemplate"]["size"], f"{leader.name}-{index}"
    address = f"{name}.{leader.name}.{owner['metadata']['namespace']}"
    common = {"LWS_LEADER_ADDRESS": address, "LWS_GROUP_SIZE": str(size)}
    first = PodInstance(name, leader, {**common, "LWS_WORKER_INDEX": "0"}, (address,), is_restarted=False)
    others = [
        PodInstance(f"{name}-{number}", worker, {**common, "LWS_WORKER_INDEX": str(number)}, is_restarted=False)
        for number in range(1, size)
    ]
    return [first, *others]


async def make_anew(cluster: ComposeCluster, broken: Replica) -> list[tuple[int, str]]:
    """Replace a group of which a pod has ended, by RecreateGroupOnPodRestart. Returns exit codes and logs.

    All its pods must end by themselves; LeaderWorkerSet would end those that do not.
    """
    ended = await cluster.remove_ended(broken)
    await cluster.start(broken.owner, broken.index)
    return ended


async def roll_groups(cluster: ComposeCluster, owner: str) -> list[str]:
    """A rolling update with maxSurge 1 and maxUnavailable 0: a group more comes first, then the others are replaced at
    their places, the last first, each as soon as the one before it is ready; at last the one more goes.

    Returns the logs of the leaders that have gone.
    """
    strategy = cluster.templates[owner].owner["spec"]["rolloutStrategy"]
    assert strategy == {
        "type": "RollingUpdate",
        "rollingUpdateConfiguration": {"maxSurge": 1, "maxUnavailable": 0},
    }
    old = sorted(cluster.replicas[owner], key=lambda replica: replica.index, reverse=True)
    surplus = await cluster.start(owner, len(old))
    logs = []
    for group in old:
        logs.append(await cluster.end(group))
        await cluster.start(owner, group.index)
    logs.append(await cluster.end(surplus))
    return [leader for leader, *_ in logs]
