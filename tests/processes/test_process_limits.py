"""What goes from a rank's environment to a process of somebody else's code."""

from __future__ import annotations

import os
import sys

import pytest

from megarl.processes.children import clean_environment

pytestmark = pytest.mark.alone


def test_what_is_named_and_nothing_else() -> None:
    value = {"PATH": "/bin", "LC_ALL": "C", "HF_TOKEN": "x", "MINE": "y", "PYTHONPATH": "/odd", "OMP_NUM_THREADS": "8"}
    path = os.pathsep.join(filter(None, sys.path))
    retained = {"PATH": "/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    assert clean_environment((), value) == retained
    assert clean_environment(("MINE", "NOWHERE"), value) == retained | {"MINE": "y"}
    assert clean_environment(("OMP_NUM_THREADS",), value)["OMP_NUM_THREADS"] == "8"
