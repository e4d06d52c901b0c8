"""The list of executors, their certificates, and what is said where Ray is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cadenza.errors import OptionError
from cadenza_common.settings.service import read_config
from cadenza_launcher.on_ray.certificates import make_link_certificates
from cadenza_launcher.on_ray.cluster import RayCluster, _check_address
from cadenza_launcher.on_ray.executors import ExecutorList
from cadenza_launcher.services.checks import check_scaling
from cadenza_launcher.services.options import Setting
from executor_svc.config import ExecutorConfig
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.executors.addresses import addresses_in, executor_entries
from scheduler_svc.links import executor_files


def test_the_scheduler_reads_the_list(tmp_path: Path) -> None:
    made = ExecutorList(tmp_path / "executors")
    (path,) = executor_entries([made.entry]).files

    def read() -> list[str]:
        return addresses_in(Path(path).read_text())

    assert read() == []
    made.join("executor 1", "10.0.0.7:4000")
    made.join("executor 0", "[::1]:4001")
    assert read() == ["[::1]:4001", "10.0.0.7:4000"]
    made.join("executor 1", "10.0.0.8:4000")
    made.leave("executor 0")
    made.leave("executor 0")
    assert read() == ["10.0.0.8:4000"]
    before = Path(path).stat().st_ino
    made.join("executor 1", "10.0.0.8:4000")
    assert Path(path).stat().st_ino == before, "nothing has changed"


def test_the_certificates_of_a_server_know_each_other_and_leave_no_authority_behind(tmp_path: Path) -> None:
    made = make_link_certificates(tmp_path)
    assert [each.name for each in tmp_path.iterdir()] == ["scheduler"]
    files = tmp_path / "on another machine"
    files.mkdir()
    for name, text in made.files.items():
        (files / name).write_text(text)
    arguments = [each.replace("{files}", str(files)) for each in made.executor_arguments]
    executor = read_config(ExecutorConfig, ["--simulate=instant", *arguments], pytest.fail)
    assert executor is not None
    assert executor.tls_client_ca == str(files / "ca.pem")
    scheduler = read_config(SchedulerConfig, ["--executor=a:1", *made.scheduler_arguments], pytest.fail)
    assert scheduler is not None
    assert executor_files(scheduler) is not None, "they are read, and the pair belongs together"
    assert scheduler.executor_server_name == made.tls.server_name == "cadenza-executor"
    assert (files / "ca.pem").read_text() == Path(str(made.tls.ca)).read_text()


def test_without_ray_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(OptionError, match=r"distributed_executor_backend: ray: Ray is not installed here .*\[ray\]"):
        RayCluster(None)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:10001", "a:b"])
def test_an_address_without_a_cluster_is_refused_at_once(address: str) -> None:
    """Ray itself tries for a minute."""
    with pytest.raises(OptionError, match="option ray_address: "):
        _check_address(address)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_executors": 3}, "max_executors: .* --distributed-executor-backend ray"),
        ({"max_executors": 3, "executors": 4, "distributed_executor_backend": "ray"}, "3 is less than executors 4"),
    ],
)
def test_a_number_of_executors_that_cannot_change_is_refused(values: dict[str, object], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        check_scaling(values, {name: Setting(value) for name, value in values.items()})


def test_a_number_of_executors_that_can_change_is_allowed() -> None:
    check_scaling({"max_executors": 3, "executors": 3, "distributed_executor_backend": "ray"}, {})
    check_scaling({"executors": 3}, {})
