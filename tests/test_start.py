"""What `./cookbook` prepares for a command before it runs."""

import pytest

from utils.cookbook.start import wanted_extras


@pytest.mark.parametrize(
    ("command", "extras"),
    [
        ("sweep a.yaml --engine=ray", ("ray",)),
        ("sweep a.yaml --engine=ray --dry-run", ()),
        ("sweep a.yaml --out ray", ()),
        ("sweep ray --scratch=ray", ()),
    ],
)
def test_ray_is_wanted_by_its_engine_alone(command, extras):
    assert wanted_extras(command.split()) == extras
