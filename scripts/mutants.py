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
    copy = scratch / "src"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for path, old, new in mutant.changes:
        file = copy / "molt" / "train" / path
        text = file.read_text(encoding="utf-8")
        if text.count(old) != 1:
            return f"does not fit: {path} has {text.count(old)} times {old!r}"
        file.write_text(text.replace(old, new), encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *(str(TESTS / t) for t in mutant.tests),
    ]
    environment = os.environ | {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    if run.returncode == TESTS_FAILED:
        return "killed"
    return "survived" if run.returncode == 0 else f"pytest broke off:\n{run.stdout[-2000:]}"


if __name__ == "__main__":
    sys.exit(main())
