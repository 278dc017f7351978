"""What goes from a rank's environment to a process of somebody else's code."""

from __future__ import annotations

import os
import sys

import pytest

from megarl.processes.children import clean_environment

pytestmark = pytest.mark.alone


def test_what_is_named_and_nothing_else() -> None:
    given = {"PATH": "/bin", "LC_ALL": "C", "HF_TOKEN": "x", "MINE": "y", "PYTHONPATH": "/odd", "OMP_NUM_THREADS": "8"}
    path = os.pathsep.join(filter(None, sys.path))
    kept = {"PATH": "/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    assert clean_environment((), given) == kept
    assert clean_environment(("MINE", "NOWHERE"), given) == kept | {"MINE": "y"}
    assert clean_environment(("OMP_NUM_THREADS",), given)["OMP_NUM_THREADS"] == "8"
