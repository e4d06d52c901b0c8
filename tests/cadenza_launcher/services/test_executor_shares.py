"""What each of several executors gets of a machine."""

from __future__ import annotations

import pytest

from cadenza.errors import OptionError
from cadenza_launcher.services.executor_shares import ExecutorShare, executor_shares
from cadenza_launcher.services.options import Setting


@pytest.fixture
def machine(monkeypatch):
    """A machine with 8 cores, and as many GPUs as the test says."""
    monkeypatch.setattr("cadenza_launcher.services.executor_shares._cores", lambda: 8)

    def with_gpus(count: int) -> None:
        monkeypatch.setattr("cadenza_launcher.services.executor_shares.count_gpus", lambda: count)

    with_gpus(0)
    return with_gpus


def shares(count: int, environment: dict[str, str] | None = None, **options) -> dict[str, ExecutorShare]:
    settings = {name: Setting(value) for name, value in {"executors": count, **options}.items()}
    return executor_shares(count, settings, environment or {})


def test_an_executor_that_is_alone_is_started_as_before(machine):
    machine(8)
    assert shares(1) == {"executor": ExecutorShare()}


def test_executors_on_the_cpu_divide_cores_and_memory(machine):
    equal = ExecutorShare(["--num-threads=2", "--gpu-memory-utilization=0.1667"])
    assert shares(3) == {"executor 0": equal, "executor 1": equal, "executor 2": equal}
    assert shares(16)["executor 15"].arguments[0] == "--num-threads=1"
    machine(4)
    assert shares(3, device="cpu")["executor 2"] == equal
    assert shares(3, {"TRITON_INTERPRET": "1"}, device="cuda")["executor 2"].environment == {}


def test_options_that_are_given_are_not_divided(machine):
    assert shares(2, num_threads=8)["executor 1"].arguments == ["--gpu-memory-utilization=0.25"]
    assert shares(2, gpu_memory_utilization=0.4)["executor 1"].arguments == ["--num-threads=4"]
    assert shares(2, num_gpu_blocks=100)["executor 1"].arguments == ["--num-threads=4"]
    assert shares(2, simulate="instant") == {"executor 0": ExecutorShare(), "executor 1": ExecutorShare()}


def test_each_executor_has_a_gpu_of_its_own(machine):
    machine(4)
    assert [each.environment for each in shares(3).values()] == [{"CUDA_VISIBLE_DEVICES": str(gpu)} for gpu in range(3)]
    assert shares(3)["executor 0"].arguments == ["--num-threads=2"], "the memory of a GPU is not divided"
    machine(2)
    named = {"CUDA_VISIBLE_DEVICES": "5, GPU-abc"}
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in shares(2, named).values()] == ["5", "GPU-abc"]


@pytest.mark.parametrize(
    ("num_gpus", "options", "message"),
    [
        (2, {}, "3 executors need a GPU each, and there are 2; with --device cuda executors share them, with "
         "--device cpu they use none"),
        (1, {"device": "auto"}, "3 executors need a GPU each, and there is 1; "),
        (2, {"device": "cuda"}, "3 executors share GPUs, since there are 2: --num-gpu-blocks must give the KV blocks "
         "of each"),
    ],
)  # fmt: skip
def test_too_few_gpus_are_an_error(machine, num_gpus, options, message):
    machine(num_gpus)
    with pytest.raises(OptionError) as caught:
        shares(3, **options)
    assert str(caught.value).startswith(f"option executors: {message}")


def test_executors_share_gpus_if_that_is_meant(machine):
    machine(2)
    made = shares(3, device="cuda", num_gpu_blocks=100)
    assert [each.environment["CUDA_VISIBLE_DEVICES"] for each in made.values()] == ["0", "1", "0"]
