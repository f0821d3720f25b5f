"""Named corrections and algorithms: what they stand for, and that the user's own keys win."""
# ruff: noqa: TID252 - the folders of tests are no installed package

from math import inf
from typing import get_args

import msgspec
import pytest

from molt.train.config import AlgorithmConfig, Config, CorrectionRule, correction_rule, known_keys, load_config, to_toml
from molt.train.config.algorithm import Correction, Preset
from molt.train.config.chosen import chosen_keys, leaf_values
from molt.train.config.presets import CORRECTIONS, PRESETS

from .refusals import refusal

NAMES = [name for name in get_args(Preset) if name]
TEACHER = ("algorithm.teacher_path=teacher",)


def own(name):
    """What a preset leaves to the user."""
    return TEACHER if name == "distillation" else ()


def load(*overrides):
    return load_config(None, overrides, Config)


@pytest.mark.parametrize(
    ("name", "level", "mode", "bounds", "gate", "gate_bounds"),
    [
        ("none", "token", "none", (0, inf), "none", (0, inf)),
        ("tis", "token", "truncate", (0, 2), "none", (0, inf)),
        ("icepop", "token", "mask", (0.5, 5), "none", (0, inf)),
        ("seq-mask-tis", "token", "truncate", (0, 2), "geometric", (0.99, 1.01)),
        ("mis", "sequence", "mask", (0, 2), "none", (0, inf)),
        ("k3-gate", "token", "truncate", (0, 2), "k3", (0, 0.01)),
        ("flash", "token", "truncate", (0, inf), "binary_kl", (0, 0.003)),
        ("decoupled-ppo", "token", "truncate", (0, 5), "none", (0, inf)),
    ],
)
def test_what_a_named_correction_stands_for(name, level, mode, bounds, gate, gate_bounds):
    rule = correction_rule(AlgorithmConfig(correction=name))
    assert (rule.level, rule.mode, rule.gate) == (level, mode, gate)
    assert ((rule.low, rule.high), (rule.gate_low, rule.gate_high)) == (bounds, gate_bounds)


def test_every_correction_has_a_rule():
    assert set(CORRECTIONS) == set(get_args(Correction))


def test_keys_that_are_given_take_the_place_of_the_names():
    given = AlgorithmConfig(
        correction="seq-mask-tis",
        correction_level="sequence",
        correction_mode="clip",
        correction_low=0.25,
        correction_high=4.0,
        gate_low=0.9,
        gate_high=1.1,
    )
    assert correction_rule(given) == CorrectionRule(
        level="sequence", mode="clip", low=0.25, high=4.0, gate="geometric", gate_low=0.9, gate_high=1.1
    )


def test_bounds_of_another_gate_are_not_taken_over():
    rule = correction_rule(AlgorithmConfig(correction="seq-mask-tis", gate="k3"))
    assert (rule.gate, rule.gate_low, rule.gate_high) == ("k3", 0.0, inf)
    assert correction_rule(AlgorithmConfig(correction="flash", gate="none")).gate_high == inf


def test_a_bound_of_zero_is_a_bound():
    assert correction_rule(AlgorithmConfig(correction="icepop", correction_low=0.0)).low == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_every_preset_sets_known_keys_that_toml_could_set_back(name):
    keys = [f"{section}.{key}" for section, values in PRESETS[name].items() for key in values]
    defaults = leaf_values(Config())
    assert set(keys) <= set(known_keys(Config))
    assert all(defaults[key] is not None for key in keys)


def test_every_preset_that_is_offered_is_there():
    assert set(PRESETS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_is_sound_as_it_is(name):
    assert refusal(f"algorithm.preset={name}", *own(name)) is None


@pytest.mark.parametrize("name", NAMES)
def test_a_preset_sets_its_keys_and_no_others(name):
    config = load(f"algorithm.preset={name}")
    expected = leaf_values(Config()) | {"algorithm.preset": name}
    expected |= {f"{section}.{key}": value for section, keys in PRESETS[name].items() for key, value in keys.items()}
    assert leaf_values(config) == expected


@pytest.mark.parametrize(
    ("name", "estimator", "loss", "aggregation", "steps"),
    [
        ("grpo", "grpo", "ppo", "sequence_mean", 1),
        ("dapo", "grpo", "ppo", "token_mean", 4),
        ("dr_grpo", "group_mean", "ppo", "constant", 1),
        ("rloo", "rloo", "policy_gradient", "constant", 1),
        ("reinforce_pp", "reinforce_pp", "ppo", "token_mean", 1),
        ("flash_reinforce", "batch_mean", "policy_gradient", "sequence_mean", 1),
        ("ppo", "gae", "ppo", "token_mean", 4),
        ("gspo", "grpo", "gspo", "sequence_mean", 4),
        ("cispo", "grpo", "cispo", "token_mean", 4),
        ("distillation", "distillation", "policy_gradient", "token_mean", 1),
    ],
)
def test_the_algorithm_of_a_preset(name, estimator, loss, aggregation, steps):
    algorithm = load(f"algorithm.preset={name}").algorithm
    assert (algorithm.estimator, algorithm.loss, algorithm.aggregation) == (estimator, loss, aggregation)
    assert algorithm.updates_per_window == steps


def test_flash_reinforce_is_one_sample_a_prompt_behind_its_gate():
    config = load("algorithm.preset=flash_reinforce")
    assert (config.rollout.group_size, config.train.groups_per_update) == (1, 128)
    rule = correction_rule(config.algorithm)
    assert (rule.gate, rule.gate_high, rule.mode, rule.high) == ("binary_kl", 3e-3, "truncate", inf)


def test_the_users_keys_lie_above_the_preset_in_the_file_and_behind_it(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[algorithm]\npreset = "gspo"\nclip_low = 0.001\n[rollout]\ngroup_size = 4\n')
    config = load_config(path, ["algorithm.clip_high=0.002"], Config)
    assert (config.algorithm.clip_low, config.algorithm.clip_high, config.algorithm.loss) == (0.001, 0.002, "gspo")
    assert config.rollout.group_size == 4


def test_a_preset_of_the_command_lies_beneath_the_keys_of_the_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[rollout]\ngroup_size = 4\n")
    config = load_config(path, ["algorithm.preset=flash_reinforce"], Config)
    assert (config.rollout.group_size, config.train.groups_per_update) == (4, 128)


def test_an_unknown_preset_is_refused():
    with pytest.raises(Exception, match=r"^algorithm\.preset is 'grop': invalid enum value"):
        load("algorithm.preset=grop")


@pytest.mark.parametrize("name", NAMES)
def test_the_written_configuration_of_a_preset_reads_back_equal(name, tmp_path):
    config = load(f"algorithm.preset={name}", "algorithm.gate_high=0.5", "reward.clip_low=-1.0")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load_config(path, [], Config) == config


def test_setting_a_preset_back_to_the_default_survives_the_run_folder(tmp_path):
    config = load("algorithm.preset=gspo", "algorithm.updates_per_window=1", "algorithm.loss=ppo")
    path = tmp_path / "config.toml"
    path.write_text(to_toml(config))
    assert load_config(path, [], Config).algorithm == config.algorithm
    assert config.algorithm.updates_per_window == 1


def test_what_is_none_is_left_out_of_the_file():
    assert "correction_low" not in to_toml(Config())
    changed = msgspec.structs.replace(Config(), algorithm=AlgorithmConfig(correction_low=0.5, correction="icepop"))
    assert "correction_low = 0.5\n" in to_toml(changed)


def test_only_what_differs_from_default_and_preset_was_chosen():
    config = load("algorithm.preset=ppo", "algorithm.lam=0.9", "critic.value_clip=0.0", "rollout.group_size=4")
    assert chosen_keys(config) == {"algorithm.lam": 0.9, "rollout.group_size": 4}


def test_a_key_of_the_preset_is_not_held_against_a_user_who_changed_the_algorithm():
    assert refusal("algorithm.preset=ppo", "algorithm.estimator=grpo") is None
