"""One rank and two ranks of FSDP2 learn the same, however a window is split; and one rank twice, the same bits."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pytest

from integration_tests.rank_process import Found, Job, found_by, run_jobs
from integration_tests.rank_windows import (
    ADMITTED,
    GATE,
    REJECTED,
    TEMPERATURE,
    Oracle,
    Segment,
    make_groups,
    make_rollouts,
    make_windows,
    num_actions,
    only_rollout,
    save_policy,
)
from molt.train.actor.setup import RankSetup
from molt.train.config import ActorConfig, AlgorithmConfig, Config, CriticConfig, OptimizerConfig
from molt.train.controller.run_folder import RunFolder
from molt.train.experience import LocalPayloadStore
from molt.train.launch.environment import ray
from molt.train.records.window import Scores, StepReport, TrainWindow
from molt.train.window import WindowPlan, build_rows, in_row_order

pytestmark = pytest.mark.timeout(300)

HEADS, LAYOUTS = ("tied", "untied"), ("padded", "packed")
ALGORITHMS = {
    "token_mean": AlgorithmConfig(correction="tis", correction_high=1.01),
    "sequence_mean": AlgorithmConfig(aggregation="sequence_mean", correction="none", entropy_coef=0.1),
    "flash": AlgorithmConfig(loss="policy_gradient", aggregation="sequence_mean", correction="flash"),
}
BUDGETS = (1000, 60, 1)
"""Tokens of a microbatch: all rows of a rank in one, a few, each alone."""
LONE = 5
"""The one rollout, of one segment, of a window that leaves the second rank without rows."""
STILL = OptimizerConfig(lr=0.0, max_grad_norm=1e9)
MOVING = OptimizerConfig(lr=1e-2, eps=1e-3)  # a large eps: AdamW would make much of gradients that are almost 0
LEARNERS = {
    "adamw": (
        ActorConfig(layout="padded", optimizer=OptimizerConfig(lr=1e-3)),
        AlgorithmConfig(correction="flash", gate_high=0.01, kl_coef=0.1, entropy_coef=0.01, updates_per_window=2),
    ),
    "muon": (
        ActorConfig(layout="packed", optimizer=OptimizerConfig(name="muon", lr=1e-2, schedule="cosine")),
        AlgorithmConfig(loss="gspo", aggregation="sequence_mean", updates_per_window=3),
    ),
}
PPO = AlgorithmConfig(estimator="gae")
NUM_UPDATES = 3


@dataclass(frozen=True)
class Policy:
    folder: Path
    oracle: Oracle
    rollouts: list[list[Segment]]
    advantages: np.ndarray
    returns: np.ndarray


@pytest.fixture(scope="module")
def policies(tmp_path_factory) -> dict[str, Policy]:
    made = {}
    for head in HEADS:
        folder = save_policy(tmp_path_factory.mktemp("policy") / head, tied=head == "tied")
        oracle = Oracle(folder)
        rollouts = make_rollouts(oracle)
        count = num_actions(make_groups(rollouts, LocalPayloadStore()))
        advantages, returns = np.random.default_rng(1).standard_normal((2, count)).astype(np.float32)
        made[head] = Policy(folder, oracle, rollouts, advantages, returns)
    return made


@pytest.fixture(scope="module")
def found(policies, tmp_path_factory) -> dict[str, list[dict[str, Found]]]:
    """What the ranks found, rank by rank: `one` and `two` side by side, and `again` one in another process."""
    folder = tmp_path_factory.mktemp("ranks")
    learning = {name: learning_job(policies["tied"], name) for name in LEARNERS}
    jobs = {n: gradient_jobs(policies, n) | {"critic": critic_job(policies["untied"], n)} for n in (1, 2)}
    processes = [
        run_jobs(folder / "sizes", {1: learning | jobs[1], 2: jobs[2]}, hash_seed=1),
        run_jobs(folder / "again", {1: learning}, hash_seed=2),
    ]
    try:
        for process, name in zip(processes, ("sizes", "again"), strict=True):
            assert process.wait(280) == 0, (folder / name / "log").read_text()[-5000:]
    finally:
        for process in processes:
            process.kill()
    return {
        "one": found_by(folder / "sizes", world_size=1),
        "two": found_by(folder / "sizes", world_size=2),
        "again": found_by(folder / "again", world_size=1),
    }


def setup_of(policy: Policy, *, actor: ActorConfig, algorithm: AlgorithmConfig, world_size: int) -> RankSetup:
    return RankSetup(
        rank=0,
        world_size=world_size,
        model_path=str(policy.folder),
        actor=actor,
        algorithm=algorithm,
        critic=CriticConfig(warmup_updates=1, optimizer=MOVING),
        temperature=TEMPERATURE,
        num_steps=NUM_UPDATES * algorithm.updates_per_window,
        seed=0,
        collective_timeout_s=120.0,
    )


def plan_of(setup: RankSetup, *, budget: int) -> WindowPlan:
    return WindowPlan(
        num_ranks=setup.world_size,
        microbatch_tokens=budget,
        layout="packed" if setup.actor.layout == "packed" else "padded",
        hidden_size=32,
        num_steps=setup.algorithm.updates_per_window,
        aggregation=setup.algorithm.aggregation,
    )


def gradient_jobs(policies: dict[str, Policy], world_size: int) -> dict[str, Job]:
    """The window at each budget, and a window of one row."""
    jobs = {}
    for head, policy in policies.items():
        groups = make_groups(policy.rollouts, LocalPayloadStore())
        lone = only_rollout(groups, LONE)
        for layout in LAYOUTS:
            for name, algorithm in ALGORITHMS.items():
                actor = ActorConfig(num_ranks=world_size, layout=layout, optimizer=STILL, logprob_chunk=16)
                setup = setup_of(policy, actor=actor, algorithm=algorithm, world_size=world_size)
                updates = [make_windows(groups, plan_of(setup, budget=budget), policy.advantages) for budget in BUDGETS]
                last = policy.advantages[-num_actions(lone) :]
                updates.append(make_windows(lone, plan_of(setup, budget=BUDGETS[0]), last))
                jobs[f"{head}, {layout}, {name}"] = Job(kind="gradients", setup=setup, updates=updates)
    return jobs


def learning_job(policy: Policy, name: str) -> Job:
    actor, algorithm = LEARNERS[name]
    setup = setup_of(policy, actor=actor, algorithm=algorithm, world_size=1)
    groups = make_groups(policy.rollouts, LocalPayloadStore())
    windows = make_windows(groups, plan_of(setup, budget=BUDGETS[1]), policy.advantages)
    return Job(kind="learn", setup=setup, updates=[windows] * NUM_UPDATES)


def critic_setup(policy: Policy, world_size: int) -> RankSetup:
    actor = ActorConfig(num_ranks=world_size, optimizer=MOVING)
    return setup_of(policy, actor=actor, algorithm=PPO, world_size=world_size)


def critic_job(policy: Policy, world_size: int) -> Job:
    setup = critic_setup(policy, world_size)
    groups = make_groups(policy.rollouts, LocalPayloadStore())
    windows = make_windows(groups, plan_of(setup, budget=BUDGETS[1]), policy.advantages, returns=policy.returns)
    return Job(kind="learn", setup=setup, updates=[windows] * NUM_UPDATES)


def close(one: dict[str, np.ndarray], other: dict[str, np.ndarray], *, atol: float, case: str) -> None:
    assert one.keys() == other.keys()
    for name, expected in one.items():
        np.testing.assert_allclose(other[name], expected, rtol=0, atol=atol, err_msg=f"{case}: {name}")


def close_reports(one: StepReport, two: StepReport) -> None:
    assert two.metrics == pytest.approx(one.metrics, rel=1e-5, abs=1e-6)
    assert (two.loss, two.grad_norm) == pytest.approx((one.loss, one.grad_norm), rel=1e-5, abs=1e-6)
    assert two.logprob_gap_max == pytest.approx(one.logprob_gap_max, abs=1e-5)


def test_the_gate_has_to_see_both_segments_and_they_are_on_different_ranks(policies):
    for head, policy in policies.items():
        whole = {number: policy.oracle.divergence(policy.rollouts[number]) for number in (REJECTED, ADMITTED)}
        first = {number: policy.oracle.divergence(policy.rollouts[number][:1]) for number in whole}
        assert first[REJECTED] < GATE < whole[REJECTED], head
        assert whole[ADMITTED] < GATE < first[ADMITTED], head
    for name, job in gradient_jobs(policies, 2).items():
        *whole_windows, lone = job.updates
        for windows in whole_windows:
            ranks = [rollouts_of(windows[0], rank) for rank in (0, 1)]
            assert {REJECTED, ADMITTED} <= ranks[0] & ranks[1], name
        assert [len(rollouts_of(lone[0], rank)) for rank in (0, 1)] == [1, 0], name
        alone = [[len(microbatch.rows) for microbatch in rank] for rank in whole_windows[-1][0].ranks]
        assert alone == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]], f"{name}: an empty microbatch beside a full one"


def rollouts_of(window: TrainWindow, rank: int) -> set[int]:
    return {row.rollout for microbatch in window.ranks[rank] for row in microbatch.rows}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("head", HEADS)
def test_gradients_do_not_depend_on_ranks_or_microbatches(policies, found, head, layout, algorithm):
    policy, case = policies[head], f"{head}, {layout}, {algorithm}"
    one, two = found["one"][0][case], found["two"][0][case]
    whole, *_, lone = one.gradients
    assert max(np.abs(gradient).max() for gradient in whole.values()) > 0.1
    expected = policy.oracle.gradients(policy.rollouts, policy.advantages, ALGORITHMS[algorithm])
    close(expected, whole, atol=2e-6, case="oracle")
    for name, ranks in (("one rank", one), ("two ranks", two)):
        for budget, gradients in zip(BUDGETS, ranks.gradients[:-1], strict=True):
            close(whole, gradients, atol=1e-6, case=f"{name}, budget {budget}")
        close(lone, ranks.gradients[-1], atol=1e-6, case=f"{name}, one row")
    for report, same in zip(one.reports, two.reports, strict=True):
        close_reports(report, same)


@pytest.mark.parametrize("learner", LEARNERS)
def test_the_same_windows_give_the_same_bits(found, learner):
    one, again = found["one"][0][learner], found["again"][0][learner]
    assert again.reports == one.reports
    assert one.again == one.reports[-1], "after a resume as if it had never stopped"
    assert one.reports[-1].loss != one.reports[0].loss
    assert one.weights.keys() == again.weights.keys()
    for name, weight in one.weights.items():
        np.testing.assert_array_equal(again.weights[name], weight, err_msg=name)
    for before, same in zip(one.scores, again.scores, strict=True):
        for score, same_score in zip(before, same, strict=True):
            np.testing.assert_array_equal(same_score.reference, score.reference)


def values_of(found: list[dict[str, Found]], policy: Policy) -> list[np.ndarray]:
    """The critic's at the end, in the order of the rows."""
    plan = plan_of(critic_setup(policy, len(found)), budget=BUDGETS[1])
    steps = build_rows(make_groups(policy.rollouts, LocalPayloadStore()), plan)
    scores = [score for rank in found for score in rank["critic"].scores[-1]]
    return [score.values for score in in_row_order([scores], steps, plan)]


def close_critics(one: tuple[list[StepReport], list[np.ndarray]], two: tuple[list[StepReport], list[np.ndarray]]):
    for report, same in zip(one[0], two[0], strict=True):
        assert same.grad_norm == pytest.approx(report.grad_norm, abs=1e-5)
        assert same.metrics["critic_grad_norm"] == pytest.approx(report.metrics["critic_grad_norm"], abs=1e-5)
        assert same.metrics["value_loss"] == pytest.approx(report.metrics["value_loss"], abs=1e-6)
    for values, same in zip(one[1], two[1], strict=True):
        assert np.abs(values).max() > 1e-2
        np.testing.assert_allclose(same, values, atol=1e-5)


def test_a_critic_beside_the_policy_learns_the_same_on_one_rank_and_on_two(found, policies):
    one, two = found["one"][0]["critic"], found["two"][0]["critic"]
    assert [report.lr for report in one.reports] == [0.0, MOVING.lr, MOVING.lr], "the policy waits for the critic"
    assert one.reports[2].metrics["value_loss"] < one.reports[0].metrics["value_loss"]
    assert [ranks[0]["critic"].again for ranks in (found["one"], found["two"])] == [one.reports[2], two.reports[2]]
    values = [values_of(found[name], policies["untied"]) for name in ("one", "two")]
    close_critics((one.reports, values[0]), (two.reports, values[1]))


async def test_a_critic_with_ranks_of_its_own_learns_the_same_on_ray(found, policies, tmp_path):
    policy = policies["untied"]
    with ray(Config(), RunFolder(tmp_path)):
        reports, values = await train_on_ray(policy, tmp_path / "checkpoint")
    close_critics((found["one"][0]["critic"].reports, values_of(found["one"], policy)), (reports, values))


async def train_on_ray(policy: Policy, folder: Path) -> tuple[list[StepReport], list[np.ndarray]]:
    """What `critic_job` does, on two ranks of the policy and two of the critic."""
    from molt.train.cluster.payloads import RayPayloadStore  # Ray is set up before it is imported
    from molt.train.cluster.placement import Placement
    from molt.train.cluster.ranks import ActorGroup

    setup = critic_setup(policy, 2)
    setup = msgspec.structs.replace(setup, critic=msgspec.structs.replace(setup.critic, placement="own"))
    store, plan = RayPayloadStore(), plan_of(setup, budget=BUDGETS[1])
    groups = make_groups(policy.rollouts, store)
    actor = ActorGroup(setup, store, placement=Placement(0, 0, "gloo"), timeout_s=240.0)

    async def score(step: int) -> list[Scores]:
        window = make_windows(groups, plan, policy.advantages, step=step)[0]
        return in_row_order([await actor.score(window)], build_rows(groups, plan), plan)

    async def update(step: int) -> StepReport:
        arrays = {"returns": policy.returns, "scores": await score(step)}
        return await actor.train(make_windows(groups, plan, policy.advantages, step=step, **arrays))

    try:
        await actor.start()
        reports = [await update(1), await update(2)]
        await actor.save(folder, step=2, progress={"kl_coef": 0.5})
        reports.append(await update(3))
        assert await actor.load(folder) == (2, {"kl_coef": 0.5})
        assert await update(3) == reports[-1], "policy and critic go on as if they had never stopped"
        return reports, [score.values for score in await score(4)]
    finally:
        actor.kill()
