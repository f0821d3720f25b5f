"""The faults that `make mutants` plants: each was shipped by a trainer, or would be easy to ship here."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One fault, and the tests that should notice it."""

    number: int
    fault: str
    changes: tuple[tuple[str, str, str], ...]
    """Of files below `molt/train/`: path, words that stand in it once, what they become."""
    tests: tuple[str, ...]
    """Files and folders of the trainer's tests."""


STEP, WINDOW, LOSS, ADVANTAGE = "actor/test_step.py", "window", "loss", "advantage"

MUTANTS = (
    Mutant(
        1,
        "the loss is the mean of each microbatch",
        (
            (
                "actor/step.py",
                "weighted_sum(loss_N, batch.weights_N, dp_size=trainer.policy.dp_size).backward()\n    totals",
                "(loss_N.mean() * trainer.policy.dp_size).backward()\n    totals",
            ),
        ),
        (STEP,),
    ),
    Mutant(
        2,
        "each rank has a denominator of its own",
        (("loss/reduce.py", "(loss_N * weights_N).sum() * dp_size", "(loss_N * weights_N).sum()"),),
        ("loss/test_reduce.py",),
    ),
    Mutant(
        3,
        "rejected tokens leave the denominator",
        (
            (
                "loss/policy.py",
                "loss_N = inputs.correction_N * surrogate_N",
                "loss_N = inputs.correction_N * surrogate_N / inputs.correction_N.gt(0).float().mean()",
            ),
        ),
        ("loss/test_policy_loss.py", "loss/test_correction.py"),
    ),
    Mutant(
        4,
        "ranks that share samples count as data parallel",
        (
            (
                "actor/model.py",
                "return torch.distributed.get_world_size()",
                "return 2 * torch.distributed.get_world_size()",
            ),
        ),
        (STEP,),
    ),
    Mutant(
        5,
        "the last groups of a window are dropped where its steps do not divide it",
        (
            (
                "window/build.py",
                "np.array_split(np.arange(len(groups)), plan.num_steps)",
                "np.arange(len(groups) // plan.num_steps * plan.num_steps).reshape(plan.num_steps, -1)",
            ),
        ),
        ("window/test_build.py", "window/test_layout.py", "window/test_invariance.py"),
    ),
    Mutant(
        6,
        "Dr. GRPO divides by the longest row instead of a constant",
        (
            (
                "window/aggregate.py",
                "np.where(actions_R > 0, num_rollouts * length, 0)",
                "np.where(actions_R > 0, num_rollouts * actions_R.max(), 0)",
            ),
        ),
        ("window/test_aggregate.py",),
    ),
    Mutant(
        7,
        "the sequence mean is taken of sums, so that long rollouts weigh more",
        (
            (
                "window/aggregate.py",
                "counts_R = num_rollouts * actions_R",
                "counts_R = np.where(actions_R > 0, num_rollouts, 0)",
            ),
        ),
        ("window/test_aggregate.py",),
    ),
    Mutant(
        8,
        "rounding noise of a group of equal rewards is scaled to unit size",
        (
            (
                "advantage/centre.py",
                "torch.where((low_G == high_G)[index_R], 0.0, values_R - means_G[index_R])",
                "values_R - means_G[index_R]",
            ),
            ("advantage/grpo.py", "EPSILON = 1e-6", "EPSILON = 1e-20"),
        ),
        (ADVANTAGE,),
    ),
    Mutant(
        9,
        "GRPO divides by the population's deviation",
        (("advantage/grpo.py", "(sizes_R - 1).clamp(min=1)", "sizes_R"),),
        (ADVANTAGE,),
    ),
    Mutant(
        10,
        "a group of one is its own reward",
        (
            (
                "advantage/centre.py",
                "torch.where((low_G == high_G)[index_R], 0.0,",
                "torch.where((sizes_G == 1)[index_R], values_R,",
            ),
        ),
        (ADVANTAGE,),
    ),
    Mutant(
        11,
        "a rollout counts once a segment in the baseline",
        (
            (
                "window/build.py",
                "members = [(index, rollout) for index, group in enumerate(groups) for rollout in group.rollouts]\n    return RolloutArrays(",
                "members = [(i, r) for i, g in enumerate(groups) for r in g.rollouts for _ in r.experiences]\n    return RolloutArrays(",
            ),
        ),
        ("window/test_build.py", "window/test_invariance.py", "controller/test_learning.py"),
    ),
    Mutant(
        12,
        "the discount runs through prompts and tool texts",
        (
            (
                "window/build.py",
                "return sum(experience.num_actions for experience in rollout.experiences)",
                "return sum(experience.num_tokens for experience in rollout.experiences)",
            ),
        ),
        ("controller/test_learning.py", "window/test_build.py"),
    ),
    Mutant(
        13,
        "an episode ends at a tool call",
        (
            (
                "advantage/gae.py",
                "torch.where(batch.tokens_left() == 0, 0.0, batch.values_N.roll(-1))",
                "torch.zeros_like(batch.values_N)",
            ),
        ),
        (ADVANTAGE,),
    ),
    Mutant(
        14,
        "the critic learns whitened returns",
        (
            (
                "advantage/gae.py",
                "returns_N=advantages_N + batch.values_N",
                "returns_N=whiten(advantages_N + batch.values_N)",
            ),
        ),
        (ADVANTAGE,),
    ),
    Mutant(
        15,
        "positions that are no actions are trained",
        (("actor/batch.py", "predicts_BT[:, :-1] = actions_BT[:, 1:]", "predicts_BT[:, :-1] = True"),),
        ("actor/test_batch.py",),
    ),
    Mutant(
        16,
        "k3 is the divergence in the loss",
        (("loss/policy.py", "* k2(inputs.current_N, reference_N)", "* k3(inputs.current_N, reference_N)"),),
        (LOSS,),
    ),
    Mutant(
        17,
        "the divergence of off-policy tokens is not weighted",
        (("loss/policy.py", "kl_coef * (inputs.correction_N * ratio_N) * k2", "kl_coef * k2"),),
        (LOSS,),
    ),
    Mutant(
        18,
        "the correction is counted twice",
        (
            (
                "loss/policy.py",
                "loss_N = inputs.correction_N * surrogate_N",
                "loss_N = inputs.correction_N * inputs.correction_N * surrogate_N",
            ),
        ),
        (LOSS,),
    ),
    Mutant(
        19,
        "the importance weights have a gradient",
        (("loss/correction.py", "old_N, behaviour_N = old_N.detach(), behaviour_N.detach()\n", ""),),
        (LOSS,),
    ),
    Mutant(
        20,
        "what stands in slots that are no actions reaches the loss",
        (
            (
                "actor/batch.py",
                "payload.logprobs[payload.action_mask] for payload",
                "payload.logprobs[-int(payload.action_mask.sum()) :] for payload",
            ),
        ),
        ("actor/test_batch.py",),
    ),
    Mutant(
        21,
        "log-probs are those of the token before",
        (("actor/batch.py", "predicts_BT[:, :-1] = actions_BT[:, 1:]", "predicts_BT[:] = actions_BT"),),
        ("actor/test_batch.py", STEP),
    ),
    Mutant(
        22,
        "the temperature of sampling is left out",
        (
            (
                "actor/policy_update.py",
                "temperature=trainer.temperature,\n            chunk_size=trainer.logprob_chunk,\n            with_entropy=with_entropy",
                "temperature=1.0,\n            chunk_size=trainer.logprob_chunk,\n            with_entropy=with_entropy",
            ),
        ),
        ("actor",),
    ),
    Mutant(
        23,
        "ratios are computed in bfloat16",
        (
            (
                "loss/ratio.py",
                "(numerator_N.to(wide) - denominator_N.to(wide))",
                "(numerator_N.bfloat16() - denominator_N.bfloat16()).to(wide)",
            ),
        ),
        (LOSS,),
    ),
    Mutant(
        24,
        "the reward of a rollout falls on its first action",
        (
            (
                "advantage/batch.py",
                "torch.where(self.tokens_left() == 0, self.per_token(self.rewards_R), 0.0)",
                "torch.where(self.tokens_left() == self.per_token(self.num_actions_R) - 1, self.per_token(self.rewards_R), 0.0)",
            ),
        ),
        (ADVANTAGE,),
    ),
    Mutant(
        25,
        "a window without actions divides by zero",
        (
            (
                "window/aggregate.py",
                "np.divide(1.0, counts_R, out=np.zeros(num_rollouts), where=counts_R > 0)",
                "np.ones(num_rollouts) / counts_R",
            ),
        ),
        ("window/test_aggregate.py",),
    ),
    Mutant(
        26,
        "entropy and divergence have a denominator of their own",
        (
            (
                "loss/policy.py",
                "loss_N = loss_N - settings.entropy_coef *",
                "loss_N = loss_N - settings.entropy_coef / len(loss_N) *",
            ),
        ),
        (LOSS,),
    ),
    Mutant(
        27,
        "the old log-probs come from another computation than the current ones",
        (
            (
                "actor/policy_update.py",
                "temperature=trainer.temperature,\n                chunk_size=trainer.logprob_chunk,\n                with_entropy=False",
                "temperature=1.0,\n                chunk_size=trainer.logprob_chunk,\n                with_entropy=False",
            ),
        ),
        ("actor",),
    ),
    Mutant(
        28,
        "the learning rate has no warm-up",
        (("actor/optimizer.py", "if step < settings.warmup_steps:", "if step < 0:"),),
        ("actor/test_optimizer.py",),
    ),
)
