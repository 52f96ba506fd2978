"""`sweep` with the cells executed in this process instead of a kernel, and a SIGKILL of itself at a given moment.

python sweep_driver.py N sweep SPEC …     killed right before (N even) or after (N odd) the file system changes
                                          for the (N // 2)-th time; N < 0: never
"""

import os
import signal
import sys

from toy_recipes import papermill_here

from utils.cookbook import cli
from utils.cookbook import run as run_module

moments, replace = int(sys.argv[1]), os.replace


def counted(*args, **options):
    """os.replace, the step that every finished file takes."""
    global moments
    if moments == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*args, **options)
    if moments == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    moments -= 2


if moments >= 0:
    os.replace = counted
run_module._papermill, run_module.check_jobs = papermill_here, lambda jobs: None
sys.exit(cli.main(sys.argv[2:]))
