"""What `import molt.agents` brings, and what it costs."""

import pkgutil
import subprocess
import sys
from pathlib import Path

import molt.agents

HEAVY = "torch ray vllm transformers starlette numpy openai anthropic"


def python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_brings_neither_httpx_nor_anything_heavy():
    code = f"import molt.agents, sys; print([m for m in '{HEAVY} httpx asyncio'.split() if m in sys.modules])"
    assert python(code) == "[]"


def test_every_module_imports_without_anything_heavy():
    names = [m.name for m in pkgutil.walk_packages(molt.agents.__path__, "molt.agents.") if "__main__" not in m.name]
    assert "molt.agents.testing.leases" in names
    code = f"import {', '.join(names)}, sys; print([m for m in '{HEAVY}'.split() if m in sys.modules])"
    assert python(code) == "[]"


def test_import_takes_under_150_ms():
    code = "import time; t = time.perf_counter(); import molt.agents; print(time.perf_counter() - t)"
    assert min(float(python(code)) for _ in range(5)) < 0.150


def test_httpx_stays_behind_one_module():
    sources = Path(molt.agents.__path__[0]).rglob("*.py")
    assert [path.name for path in sources if "import httpx" in path.read_text()] == ["_http.py"]


def test_public_names_are_pinned():
    assert molt.agents.__all__ == sorted(molt.agents.__all__)
    classes = (
        "AgentRunner ChatAgent ChatAgentRunner Context Env OutcomeKind Result SamplingParams StepEnvRunner StepState"
    )
    errors = (
        "AgentLoad Authentication Fenced Infrastructure Input InvalidResult MoltAgent NoGrader Server "
        "ServerUnavailable Task"
    )
    assert set(molt.agents.__all__) == {*classes.split(), *(f"{error}Error" for error in errors.split())}
    assert all(hasattr(molt.agents, name) for name in molt.agents.__all__)


def test_the_package_is_typed():
    assert (Path(molt.agents.__path__[0]) / "py.typed").is_file()
