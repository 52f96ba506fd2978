"""The command line and the notebook machinery. Notebooks import anything of `utils` except this."""
