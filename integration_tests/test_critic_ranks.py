"""One rank and two ranks of FSDP2, and a critic beside the policy or on ranks of its own, learn the same values."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest

from molt.train.actor.setup import RankSetup
from molt.train.config import ActorConfig, AlgorithmConfig, Config, CriticConfig, OptimizerConfig
from molt.train.controller.run_folder import RunFolder
from molt.train.experience import PayloadStore
from molt.train.launch.environment import ray
from molt.train.records.experience import Experience, Payload
from molt.train.records.window import Microbatch, Row, Scores, StepReport, TrainWindow

pytestmark = pytest.mark.timeout(600)

NUM_TOKENS = 29
LENGTHS = (12, 7, 20, 16)
ONE = (((0, 1), (2, 3)),)
TWO = (((0,), (1, 2)), ((3,), ()))
"""Rows of each microbatch of each rank; the second rank has an empty one."""
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3)  # a large eps: AdamW would make much of gradients that are almost 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=NUM_TOKENS,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        tie_word_embeddings=False,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def make_rows(store: PayloadStore) -> list[Row]:
    """Rows of random tokens, advantages and returns."""
    draw = np.random.default_rng(0)
    rows = []
    for index, length in enumerate(LENGTHS):
        actions = draw.random(length) < 0.5
        actions[0], actions[-1] = False, True
        payload = Payload(
            token_ids=draw.integers(0, NUM_TOKENS, length).astype(np.int32),
            action_mask=actions,
            logprobs=np.where(actions, -3.4, 0.0).astype(np.float32),
            versions=np.where(actions, 0, -1).astype(np.int32),
        )
        num_actions = int(actions.sum())
        experience = Experience(
            segment_id=f"{index}/0",
            rollout_id=str(index),
            group_id="g",
            num_tokens=length,
            num_actions=num_actions,
            oldest_version=0,
            newest_version=0,
            mean_version=0.0,
            payload=store.put(payload),
        )
        advantages, returns = draw.standard_normal((2, num_actions)).astype(np.float32)
        rows.append(Row(experience=experience, rollout=index, weight=0.02, advantages=advantages, returns=returns))
    return rows


def window_of(rows: Sequence[Row], layout: tuple, *, step: int) -> TrainWindow:
    return TrainWindow(
        step=step,
        policy_version=step - 1,
        ranks=tuple(
            tuple(Microbatch(rows=tuple(rows[i] for i in indices)) for indices in microbatches)
            for microbatches in layout
        ),
        num_action_tokens=sum(row.experience.num_actions for row in rows),
        num_rollouts=len(rows),
    )


async def train(
    checkpoint: Path, folder: Path, layout: tuple, *, placement: str
) -> tuple[list[StepReport], list[np.ndarray]]:
    """Two updates, a checkpoint, a third update, a resume and the third again. Reports, and the values at the end."""
    from molt.train.cluster.payloads import RayPayloadStore  # Ray is set up before it is imported
    from molt.train.cluster.placement import Placement
    from molt.train.cluster.ranks import ActorGroup

    store = RayPayloadStore()
    rows, order = make_rows(store), list(itertools.chain(*itertools.chain(*layout)))
    setup = RankSetup(
        rank=0,
        world_size=len(layout),
        model_path=str(checkpoint),
        actor=ActorConfig(num_ranks=len(layout), optimizer=OPTIMIZER),
        algorithm=AlgorithmConfig(estimator="gae"),
        critic=CriticConfig(placement=placement, warmup_updates=1, optimizer=OPTIMIZER),
        temperature=1.0,
        num_steps=3,
        seed=0,
        collective_timeout_s=60.0,
    )
    actor = ActorGroup(setup, store, placement=Placement(0, 0, "gloo"), timeout_s=300.0)

    async def scores(step: int) -> list[Scores]:
        found = await actor.score(window_of(rows, layout, step=step))
        return [score for _, score in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]

    async def update(step: int) -> StepReport:
        scored = [
            msgspec.structs.replace(row, values=score.values)
            for row, score in zip(rows, await scores(step), strict=True)
        ]
        return await actor.train([window_of(scored, layout, step=step)])

    try:
        await actor.start()
        reports = [await update(1), await update(2)]
        await actor.save(folder, step=2, progress={"kl_coef": 0.5})
        reports.append(await update(3))
        assert await actor.load(folder) == (2, {"kl_coef": 0.5})
        assert await update(3) == reports[-1], "policy and critic go on as if they had never stopped"
        return reports, [score.values for score in await scores(4)]
    finally:
        actor.kill()


async def test_values_do_not_depend_on_ranks_or_on_where_the_critic_is(checkpoint, tmp_path):
    with ray(Config(), RunFolder(tmp_path)):
        reports, values = await train(checkpoint, tmp_path / "one", ONE, placement="colocated")
        others = [
            await train(checkpoint, tmp_path / placement, TWO, placement=placement)
            for placement in ("colocated", "own")
        ]
    assert [report.lr for report in reports] == [0.0, OPTIMIZER.lr, OPTIMIZER.lr], "the policy waits for the critic"
    assert reports[2].metrics["value_loss"] < reports[0].metrics["value_loss"]
    for other_reports, other_values in others:
        for one, two in zip(reports, other_reports, strict=True):
            assert two.grad_norm == pytest.approx(one.grad_norm, abs=1e-5)
            assert two.metrics["critic_grad_norm"] == pytest.approx(one.metrics["critic_grad_norm"], abs=1e-5)
            assert two.metrics["value_loss"] == pytest.approx(one.metrics["value_loss"], abs=1e-6)
        for one, two in zip(values, other_values, strict=True):
            assert np.abs(one).max() > 1e-2
            np.testing.assert_allclose(two, one, atol=1e-5)
