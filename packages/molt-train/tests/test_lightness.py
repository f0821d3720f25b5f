"""What the light stages bring into a process, and errors that cross process boundaries."""

import pickle
import subprocess
import sys

import pytest

from molt.train import errors

HEAVY = {"torch", "ray", "vllm"}
LIGHT = ("launch.gateway", "pool.pool", "trajectory", "experience", "window", "server", "cli", "audit", "actor.setup")


def test_the_light_stages_bring_no_torch_no_ray_and_no_vllm():
    program = f"""
import importlib, sys
for name in {LIGHT}:
    importlib.import_module("molt.train." + name)
print(*sorted({HEAVY} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True)
    assert result.stdout.split() == []


ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MoltError)]


@pytest.mark.parametrize("kind", ERRORS)
def test_errors_cross_process_boundaries(kind):
    copy = pickle.loads(pickle.dumps(kind("the field, the value, the fix")))
    assert (type(copy), str(copy)) == (kind, "the field, the value, the fix")
