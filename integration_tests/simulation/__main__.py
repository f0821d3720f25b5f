"""`python -m integration_tests.simulation`: run it, check it, print one JSON line; exit 1 with the violations."""

import argparse
import json
import logging
import signal
import sys
import tempfile
from pathlib import Path

import uvloop

from integration_tests.simulation.check import check
from integration_tests.simulation.evidence import read_evidence
from integration_tests.simulation.run import Simulation
from integration_tests.simulation.scenario import Scenario, scenario_of


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="simulation", description=__doc__)
    parser.add_argument("--rollouts", type=int, default=Scenario().num_rollouts)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=float, default=900.0, help="give up after so many seconds (900)")
    parser.add_argument("--out", type=Path, help="a new folder for the run and all evidence (a temporary one)")
    args = parser.parse_args()
    scenario = scenario_of(args.rollouts, args.seed)
    with tempfile.TemporaryDirectory(prefix="molt-simulation-") as scratch:
        folder = args.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        logging.basicConfig(filename=folder / "crowd.log", level=logging.INFO)
        logging.getLogger("httpx").setLevel(logging.WARNING)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        figures = uvloop.run(Simulation(scenario, folder, limit_s=args.limit_s).run())
        evidence = read_evidence(folder)
        violations = check(evidence)
    print(json.dumps({"simulation": args.seed, **figures, **evidence.figures(), "violations": len(violations)}))  # noqa: T201
    for violation in violations:
        print(violation, file=sys.stderr)  # noqa: T201
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
