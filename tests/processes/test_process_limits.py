"""The environment of processes that run user code."""

from __future__ import annotations

import os
import sys

import pytest

from megarl.processes.children import clean_environment

pytestmark = pytest.mark.alone


def test_passes_only_listed_variables() -> None:
    environment = {
        "PATH": "/bin",
        "LC_ALL": "C",
        "HF_TOKEN": "x",
        "MINE": "y",
        "PYTHONPATH": "/odd",
        "OMP_NUM_THREADS": "8",
    }
    path = os.pathsep.join(filter(None, sys.path))
    always_passed = {"PATH": "/bin", "LC_ALL": "C", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    assert clean_environment((), environment) == always_passed
    assert clean_environment(("MINE", "NOWHERE"), environment) == always_passed | {"MINE": "y"}
    assert clean_environment(("OMP_NUM_THREADS",), environment)["OMP_NUM_THREADS"] == "8"
