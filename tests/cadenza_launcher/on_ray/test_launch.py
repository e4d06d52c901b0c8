"""What the processes of an executor run."""

from __future__ import annotations

from cadenza_launcher.on_ray.launch import RayLaunch, rank_variables


def test_an_executor_listens_at_any_port_of_its_machine() -> None:
    launch = RayLaunch(["-m", "x"], ["--model=m"], 1, {"ca.pem": "text"})
    (order,) = launch.orders("executor 1")(["10.0.0.7:4000"])
    assert (order.name, order.arguments) == ("executor 1", ["--model=m", "--listen=10.0.0.7:0"])
    assert (order.environment, order.files) == ({}, {"ca.pem": "text"})
    fixed = RayLaunch(["-m", "x"], [], 1, listen="0.0.0.0:50052")
    assert fixed.orders("e")(["10.0.0.7:4000"])[0].arguments == ["--listen=0.0.0.0:50052"]


def test_ranks_have_a_secret_that_is_on_no_command_line_and_in_no_other_life() -> None:
    orders = RayLaunch(["-m", "x"], ["--a"], 2, {"ca.pem": "text"}).orders("executor")
    first, second = orders(["10.0.0.7:4000", "10.0.0.8:5000"])
    assert first.arguments[:2] == ["--a", "--listen=10.0.0.7:0"]
    assert second.arguments == ["--a", *first.arguments[2:]]
    assert {"--distributed-executor-backend=external", "--rank-port=4000"} < set(second.arguments)
    secret = first.files["rank-secret"]
    assert second.files == first.files
    assert len(secret) >= 32
    assert "--rank-secret-file={files}/rank-secret" in second.arguments
    assert not any(secret in each for each in (*second.arguments, *second.environment.values()))
    assert orders(["10.0.0.7:4000", "10.0.0.8:5000"])[0].files["rank-secret"] != secret


def test_ranks_know_who_shares_their_machine() -> None:
    made = rank_variables(["a", "b", "a"])
    assert [(each["LOCAL_RANK"], each["LOCAL_WORLD_SIZE"]) for each in made] == [("0", "2"), ("0", "1"), ("1", "2")]
    assert {(each["WORLD_SIZE"], each["MASTER_ADDR"]) for each in made} == {("3", "a")}
    assert [each["RANK"] for each in made] == ["0", "1", "2"]
