"""Algorithms that cannot be, and keys without a part in them: each refused in one line with key, value and fix."""
# ruff: noqa: TID252 - the folders of tests are no installed package

import pytest

from molt.train.config import ESTIMATORS, GROUP_ESTIMATORS

from .refusals import refusal

OWN = "algorithm.estimator=estimators.py:median"
TWO_STEPS = "algorithm.updates_per_window=2"
DISTIL = ("algorithm.estimator=distillation", "algorithm.teacher_path=teacher")
SINGLE = "rollout.group_size=1"


def estimator(name):
    return DISTIL if name == "distillation" else (f"algorithm.estimator={name}",)


def no_effect(*overrides):
    """The key that is said to have no effect, and what it is said to have none with."""
    message = refusal(*overrides)
    key, found, rest = message.partition(", which has no effect with ")
    assert found, message
    assert ": leave it out, or " in rest
    return key.partition(" is ")[0], rest.partition(":")[0]


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_is_sound_with_groups(name):
    assert refusal(*estimator(name)) is None


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_an_estimator_that_compares_needs_a_group(name):
    assert refusal(SINGLE, *estimator(name)) == (
        f"rollout.group_size is 1, but algorithm.estimator {name!r} compares the rollouts of a group: set "
        "rollout.group_size to 2 or more, or algorithm.estimator to 'batch_mean' or 'reinforce_pp'"
    )


@pytest.mark.parametrize("name", [*(name for name in ESTIMATORS if name not in GROUP_ESTIMATORS), "own.py:median"])
def test_an_estimator_that_does_not_compare_needs_none(name):
    assert refusal(SINGLE, *estimator(name)) is None


def test_a_mean_over_the_window_needs_two_rollouts_in_it():
    one = ("algorithm.estimator=batch_mean", SINGLE, "train.groups_per_update=1")
    assert refusal(*one).startswith("train.groups_per_update is 1 with rollout.group_size 1, but algorithm.estimator ")
    assert refusal(*one[:2], "train.groups_per_update=2") is None


def test_an_unknown_estimator_names_the_known_ones_and_the_nearest():
    assert refusal("algorithm.estimator=gropo") == (
        f"algorithm.estimator is 'gropo', which is none of {', '.join(ESTIMATORS)}: the nearest is 'grpo'; a function "
        "of your own is FILE.py:FUNCTION or module:FUNCTION"
    )


@pytest.mark.parametrize("name", [":median", "own.py:", "own.py:not a name", ":"])
def test_a_function_of_ones_own_has_a_file_and_a_name(name):
    assert refusal(f"algorithm.estimator={name!r}") == (
        f"algorithm.estimator is {name!r}; a function of your own is FILE.py:FUNCTION or module:FUNCTION"
    )


@pytest.mark.parametrize("name", ["own.py:median", "a.b.c:median", "/x/y.py:median"])
def test_a_function_of_ones_own_is_left_to_be_found(name):
    assert refusal(f"algorithm.estimator={name}", "algorithm.gamma=0.9", "algorithm.lam=0.9") is None


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in ("reinforce", "reinforce_pp", "gae")])
def test_a_discount_that_does_nothing_is_refused(name):
    assert no_effect("algorithm.gamma=0.9", *estimator(name)) == ("algorithm.gamma", f"algorithm.estimator {name!r}")


@pytest.mark.parametrize("name", ["reinforce", "reinforce_pp", "gae"])
def test_a_discount_of_returns_is_accepted(name):
    assert refusal("algorithm.gamma=0.9", *estimator(name)) is None


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n != "gae"])
@pytest.mark.parametrize(
    "key", ["algorithm.lam=0.9", "critic.path=x", "critic.placement=own", "critic.optimizer.lr=1e-3"]
)
def test_what_belongs_to_gae_is_refused_without_it(name, key):
    assert no_effect(key, *estimator(name)) == (key.partition("=")[0], f"algorithm.estimator {name!r}")
    assert refusal(key, "algorithm.estimator=gae") is None


@pytest.mark.parametrize("name", [n for n in ESTIMATORS if n not in GROUP_ESTIMATORS])
def test_keeping_single_rollouts_is_refused_where_none_are_compared(name):
    assert no_effect("algorithm.singleton=keep", *estimator(name))[0] == "algorithm.singleton"


@pytest.mark.parametrize("name", [*GROUP_ESTIMATORS, "own.py:median"])
def test_keeping_single_rollouts_is_accepted_where_rollouts_are_compared(name):
    assert refusal("algorithm.singleton=keep", f"algorithm.estimator={name}") is None


@pytest.mark.parametrize("loss", ["gspo", "cispo"])
def test_a_loss_that_one_step_makes_plain_policy_gradient_is_refused(loss):
    assert refusal(f"algorithm.loss={loss}") == (
        f"algorithm.loss is {loss!r}, which is plain policy gradient with algorithm.updates_per_window 1, where the "
        "policy ratio is always 1: set algorithm.updates_per_window to 2 or more, or algorithm.loss to "
        "'policy_gradient'"
    )
    assert refusal(f"algorithm.loss={loss}", TWO_STEPS) is None


def test_several_steps_need_a_policy_ratio():
    assert refusal("algorithm.loss=policy_gradient", TWO_STEPS).startswith(
        "algorithm.updates_per_window is 2, but algorithm.loss 'policy_gradient' has no policy ratio"
    )
    assert refusal("algorithm.loss=policy_gradient") is None


@pytest.mark.parametrize("key", ["clip_low", "clip_high", "dual_clip"])
def test_a_clip_that_does_nothing_is_refused(key):
    value = "3.0" if key == "dual_clip" else "0.1"
    where = "algorithm.updates_per_window 1, where policy and values are still those before the window"
    assert no_effect(f"algorithm.{key}={value}") == (f"algorithm.{key}", where)
    assert refusal(f"algorithm.{key}={value}", TWO_STEPS) is None


def test_a_value_clip_acts_from_the_second_step_on():
    gae = ("algorithm.estimator=gae", "critic.value_clip=0.2")
    assert no_effect(*gae)[0] == "critic.value_clip"
    assert refusal(*gae, TWO_STEPS) is None


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        ("cispo", "clip_low=0.1"),
        ("cispo", "dual_clip=3.0"),
        ("gspo", "dual_clip=3.0"),
        ("policy_gradient", "clip_low=0.1"),
        ("policy_gradient", "clip_high=0.1"),
        ("policy_gradient", "dual_clip=3.0"),
    ],
)
def test_a_clip_that_the_loss_does_not_have_is_refused(loss, key):
    steps = () if loss == "policy_gradient" else (TWO_STEPS,)
    found = no_effect(f"algorithm.loss={loss}", f"algorithm.{key}", *steps)
    assert found == (f"algorithm.{key.partition('=')[0]}", f"algorithm.loss {loss!r}")


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "prompt_mean"])
def test_a_length_belongs_to_the_constant(aggregation):
    keys = (f"algorithm.aggregation={aggregation}", "algorithm.aggregation_length=100")
    assert no_effect(*keys) == ("algorithm.aggregation_length", f"algorithm.aggregation {aggregation!r}")
    assert refusal("algorithm.aggregation=constant", keys[1]) is None


@pytest.mark.parametrize("key", ["kl_placement=reward", "kl_target=0.1", "kl_horizon=5", "reference_path=base"])
def test_what_belongs_to_the_divergence_is_refused_without_it(key):
    assert no_effect(f"algorithm.{key}") == (f"algorithm.{key.partition('=')[0]}", "algorithm.kl_coef 0")


def test_a_horizon_belongs_to_a_target():
    keys = ("algorithm.kl_coef=0.1", "algorithm.kl_horizon=5")
    assert no_effect(*keys) == ("algorithm.kl_horizon", "algorithm.kl_target 0")
    assert refusal(*keys, "algorithm.kl_target=0.1", "algorithm.kl_placement=reward") is None


def test_distillation_has_a_teacher_and_nothing_else_has():
    assert refusal("algorithm.estimator=distillation").startswith("algorithm.teacher_path is empty, but ")
    assert no_effect("algorithm.teacher_path=teacher") == ("algorithm.teacher_path", "algorithm.estimator 'grpo'")
    assert no_effect("algorithm.distillation_coef=0.5")[0] == "algorithm.distillation_coef"
    assert refusal(*DISTIL, "algorithm.distillation_coef=0.5") is None


def test_distillation_has_no_rewards_to_take_a_divergence_from():
    assert refusal(*DISTIL, "algorithm.kl_coef=0.1", "algorithm.kl_placement=reward").startswith(
        "algorithm.kl_placement is 'reward', but algorithm.estimator 'distillation' makes no advantage of rewards"
    )
    assert refusal(*DISTIL, "algorithm.kl_coef=0.1") is None


@pytest.mark.parametrize("key", ["clip_low=0.0", "clip_high=1.0", "overlong_length=100"])
def test_rewards_are_not_shaped_where_none_are_learned_from(key):
    assert no_effect(*DISTIL, f"reward.{key}")[0] == f"reward.{key.partition('=')[0]}"
    assert refusal(f"reward.{key}") is None


@pytest.mark.parametrize(("warmup", "is_sound"), [(9, True), (10, False), (11, False)])
def test_the_policy_learns_after_the_warm_up_of_the_critic(warmup, is_sound):
    message = refusal("algorithm.estimator=gae", "train.num_updates=10", f"critic.warmup_updates={warmup}")
    assert (message is None) is is_sound
    if message:
        assert message.startswith(f"critic.warmup_updates is {warmup}, so that the policy never learns in the 10 ")


@pytest.mark.parametrize(("low", "high"), [("1.0", "1.0"), ("2.0", "-2.0")])
def test_a_reward_has_a_range_to_lie_in(low, high):
    assert refusal(f"reward.clip_low={low}", f"reward.clip_high={high}") == (
        f"reward.clip_low is {low} and reward.clip_high {high}; the first must be below the second"
    )
    assert refusal("reward.clip_low=-1.0", "reward.clip_high=1.0") is None


def test_a_ramp_leads_up_to_a_length():
    assert refusal("reward.overlong_ramp=10").startswith(
        "reward.overlong_ramp is 10, which has no effect with reward.overlong_length 0"
    )
    assert refusal("reward.overlong_ramp=11", "reward.overlong_length=10").startswith(
        "reward.overlong_ramp is 11, which is more than reward.overlong_length 10"
    )
    assert refusal("reward.overlong_ramp=10", "reward.overlong_length=10") is None


def test_a_penalty_begins_where_segments_can_be():
    keys = ("engine.max_model_len=100", "reward.overlong_length=120")
    assert refusal(*keys, "reward.overlong_ramp=20").startswith(
        "reward.overlong_length is 120, whose penalty begins at 100 tokens, which no segment exceeds"
    )
    assert refusal(*keys, "reward.overlong_ramp=21") is None
