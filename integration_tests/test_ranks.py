"""One rank and two ranks of FSDP2 make the same updates of the same recorded windows."""

import subprocess
from pathlib import Path

import pytest

from integration_tests.conftest import COMMAND
from molt.train.actor.setup import RankSetup
from molt.train.advantage import compute_advantages
from molt.train.config import Config, load_config
from molt.train.controller.results import experiences_into
from molt.train.controller.run_folder import RunFolder
from molt.train.launch.environment import ray
from molt.train.pool.ledger import Ledger
from molt.train.pool.pool import Pool
from molt.train.window import build_window

NUM_UPDATES = 5
pytestmark = pytest.mark.timeout(420)


@pytest.fixture(scope="module")
def recorded_run(run_arguments, tmp_path_factory):
    """A strictly on-policy run whose windows are trained again here."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    arguments = [f"run.dir={folder}", f"train.num_updates={NUM_UPDATES}", "train.max_staleness=0"]
    result = subprocess.run(
        [*COMMAND, *run_arguments, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return folder


async def losses(config: Config, folder: Path, *, num_ranks: int) -> list[tuple[float, float]]:
    """(loss, gradient norm) of each recorded window, trained on `num_ranks` ranks."""
    from molt.train.cluster.payloads import RayPayloadStore  # Ray is set up before it is imported
    from molt.train.cluster.placement import Placement
    from molt.train.cluster.ranks import ActorGroup

    store = RayPayloadStore()
    ledger = Ledger(RunFolder(folder).ledger)
    pool = Pool(ledger, settings=config.pool, clock=lambda: 0.0, experiences_of=experiences_into(store))
    setup = RankSetup(
        rank=0,
        world_size=num_ranks,
        model_path=config.model.path,
        actor=config.actor,
        algorithm=config.algorithm,
        temperature=config.rollout.temperature,
        num_steps=NUM_UPDATES,
        seed=config.run.seed,
        collective_timeout_s=60.0,
    )
    actor = ActorGroup(setup, store, placement=Placement(0, 0, "gloo"), timeout_s=120.0)
    try:
        await actor.start()
        reports = []
        for window in ledger.windows():
            windows = build_window(
                pool.recorded_groups(window.group_ids),
                step=window.step,
                policy_version=window.policy_version,
                num_ranks=num_ranks,
                # Small, so that ranks have several microbatches, and not equally full ones.
                microbatch_tokens=600,
                advantages=lambda *rollouts: compute_advantages(config.algorithm.estimator, *rollouts, gamma=1.0),
            )
            reports.append(await actor.train(windows))
    finally:
        actor.kill()
        ledger.close()
    return [(report.loss, report.grad_norm) for report in reports]


async def test_two_ranks_make_the_updates_of_one(recorded_run):
    config = load_config(recorded_run / "config.toml", [], Config)
    with ray(config, RunFolder(recorded_run)):
        one = await losses(config, recorded_run, num_ranks=1)
        two = await losses(config, recorded_run, num_ranks=2)
    assert len(one) == NUM_UPDATES
    for (loss_one, norm_one), (loss_two, norm_two) in zip(one, two, strict=True):
        assert loss_two == pytest.approx(loss_one, abs=1e-4)
        assert norm_two == pytest.approx(norm_one, rel=1e-4)
    assert any(abs(loss) > 1e-3 for loss, _ in one), "all losses vanish; the test compares nothing"
