"""Plain `pytest` runs everything: see utils/cookbook/pytest_plugin.py."""

pytest_plugins = ["utils.cookbook.pytest_plugin"]
