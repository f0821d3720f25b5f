"""The promise of the light SDK: its wheel, alone in a new environment, brings nothing heavy."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ["torch", "ray", "vllm", "transformers", "starlette", "numpy", "openai", "anthropic", "pydantic"]
pytestmark = pytest.mark.timeout(180)

PROBE = """
import importlib, json, pkgutil, sys
import molt.agents
found = pkgutil.walk_packages(molt.agents.__path__, "molt.agents.")
modules = sorted(module.name for module in found if "__main__" not in module.name)
for name in modules:
    importlib.import_module(name)
print(json.dumps({"modules": modules, "loaded": sorted({name.partition(".")[0] for name in sys.modules})}))
"""
TIMED = "import time; t = time.process_time(); import molt.agents; print(time.process_time() - t)"


def uv(*arguments, **kwargs):
    command = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
    return subprocess.run([command, *arguments], check=True, capture_output=True, text=True, timeout=120, **kwargs)


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """The interpreter of an environment that holds the wheel and what it needs."""
    folder = tmp_path_factory.mktemp("sdk")
    uv("build", "--quiet", "--package", "molt-agent", "--wheel", "--out-dir", str(folder / "dist"), cwd=ROOT)
    (wheel,) = (folder / "dist").glob("molt_agent-*.whl")
    uv("venv", "--quiet", "--python", sys.executable, str(folder / "venv"))
    interpreter = folder / "venv" / "bin" / "python"
    # Outside the workspace, so that its sources and overrides cannot help.
    uv("pip", "install", "--quiet", "--python", str(interpreter), str(wheel), cwd=folder)
    return interpreter


def run(python, *arguments):
    return subprocess.run([python, *arguments], check=True, capture_output=True, text=True, timeout=60).stdout


def test_every_module_imports_without_anything_heavy(python):
    found = json.loads(run(python, "-I", "-c", PROBE))
    assert "molt.agents.worker" in found["modules"]
    assert not set(HEAVY) & set(found["loaded"])


def test_it_brings_only_httpx_and_msgspec(python):
    folder = python.parents[1]
    names = {item["name"] for item in json.loads(uv("pip", "list", "--format", "json", "--python", str(python)).stdout)}
    alone = folder.parent / "needs"
    uv("venv", "--quiet", "--python", sys.executable, str(alone))
    uv("pip", "install", "--quiet", "--python", str(alone / "bin" / "python"), "httpx", "msgspec", cwd=folder)
    listing = uv("pip", "list", "--format", "json", "--python", str(alone / "bin" / "python")).stdout
    needed = {item["name"] for item in json.loads(listing)}
    assert len(names - needed) <= 5
    assert names - needed == {"molt-agent"}


def test_import_takes_under_150_ms(python):
    # The first import compiles and fills the disk cache; what a user waits for is every one after it. In CPU time, so
    # that it does not matter what else the machine does.
    run(python, "-I", "-c", TIMED)
    assert min(float(run(python, "-I", "-c", TIMED)) for _ in range(5)) < 0.150


def test_the_command_is_installed(python):
    command = python.parent / "molt-agent"
    result = subprocess.run([command, "--help"], check=True, capture_output=True, text=True, timeout=60)
    assert "work" in result.stdout
