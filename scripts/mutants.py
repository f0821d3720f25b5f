"""Plant each fault of the learning maths that peers shipped, and see that a test notices: `make mutants`.

A fault is a change of a few words in a copy of the trainer's source; the tests named with it run against the copy and
must fail. Ends with `killed N/N`, and exits 1 when a fault survives or no longer fits the source.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "packages" / "molt-train" / "src"
TESTS = ROOT / "packages" / "molt-train" / "tests"
LIMIT_S = 300
TESTS_FAILED = 1
"""Exit status of pytest."""


def main() -> int:
    """Plant them one by one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, help="only these")
    wanted = parser.parse_args().numbers
    chosen = [mutant for mutant in MUTANTS if not wanted or mutant.number in wanted]
    with tempfile.TemporaryDirectory() as scratch:
        if failed := run_tests(
            copy_of_source(Path(scratch)), sorted({test for mutant in chosen for test in mutant.tests})
        ):
            print(f"the tests fail without any fault:\n{failed}")
            return 1
    killed = 0
    for mutant in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            verdict = plant(mutant, Path(scratch))
        killed += verdict == "killed"
        print(f"{mutant.number:2d} {mutant.fault}: {verdict}", flush=True)
    print(f"killed {killed}/{len(chosen)}")
    return 0 if killed == len(chosen) else 1


def plant(mutant: Mutant, scratch: Path) -> str:
    """What became of a fault: `killed`, or why not."""
    copy = copy_of_source(scratch)
    for path, old, new in mutant.changes:
        file = copy / "molt" / "train" / path
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            return f"does not fit: {path} has {text.count(old)} times {old!r}"
        file.write_text(text.replace(old, new), encoding="utf-8")
    return "killed" if run_tests(copy, mutant.tests) else "survived"


def copy_of_source(scratch: Path) -> Path:
    """A copy that can be changed."""
    copy = scratch / "src"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    return copy


def run_tests(source: Path, tests: Sequence[str]) -> str:
    """The end of what pytest says where tests fail on `source`; empty where they pass.

    Raises:
        RuntimeError: Tests could not be run at all: that is no verdict.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *(str(TESTS / t) for t in tests)]
    environment = os.environ | {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if run.returncode not in (0, TESTS_FAILED):
        raise RuntimeError(f"pytest broke off:\n{run.stdout[-2000:]}")
    return run.stdout[-2000:] if run.returncode else ""


if __name__ == "__main__":
    sys.exit(main())
