"""The alert rules by Prometheus' own tool: each fires when it should, and none while all is well."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.prometheus import WATCH, needs_prometheus

pytestmark = [pytest.mark.slow, needs_prometheus]
TESTS = Path(__file__).with_name("alerts_test.yml")
RULES: list[dict[str, Any]] = yaml.safe_load((WATCH / "alerts.yml").read_text())["groups"][0]["rules"]


def promtool(*arguments: str) -> str:
    answer = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def test_the_rules_are_valid_and_fire_as_their_tests_say() -> None:
    assert f"{len(RULES)} rules found" in promtool("check", "rules", str(WATCH / "alerts.yml"))
    promtool("check", "config", str(WATCH / "prometheus.yml"))
    promtool("test", "rules", str(TESTS))


def test_each_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    expected: dict[str, set[bool]] = {rule["alert"]: set() for rule in RULES}
    for group in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in group["alert_rule_test"]:
            expected[case["alertname"]].add(bool(case["exp_alerts"]))
    assert {name for name, found in expected.items() if found != {True, False}} == set()
