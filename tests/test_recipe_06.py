"""Recipe 06: its rules on made-up values."""

import pytest
from recipe_notebook import source_with


@pytest.fixture(scope="module")
def rules():
    names = {"launch_us": 5.0}
    exec(source_with("06_cuda_graph", "def buckets_rule"), names)
    return names


def test_rule_of_g2(rules):
    rule = rules["buckets_rule"]
    assert rule({1: True, 3: True}, {1: False, 3: True}, True) == (
        "refined",
        "buckets equal eager for batches 1, 3, for networks that compute each row alone",
    )
    assert "any network" in rule({1: True}, {1: True}, True)[1]
    assert rule({1: False}, {1: False}, True)[0] == "confirmed" and rule({1: True}, {}, False)[0] == "refuted"


@pytest.mark.parametrize(
    "longer, verdict", [("aa", "refuted"), ("la", "refined"), ("ll", "confirmed"), ("al", "confirmed")]
)
def test_rule_of_g4_reads_the_table(rules, longer, verdict):
    words = {"a": "arithmetic", "l": "launches"}
    table = [{"image": str(n), "takes longer": words[one]} for n, one in enumerate(longer)]
    found, evidence = rules["flux_rule"](table)
    assert found == verdict and ("0" in evidence.split("longer at")[1]) == (longer[0] == "l")
