"""From numpy arrays to numpy arrays, by a name of Molt's or by the place of a user's own function."""

import math
from pathlib import Path

import numpy as np
import pytest

from molt.train.advantage import ESTIMATORS, EstimatorSettings, TokenSignals, compute_advantages, find_estimator
from molt.train.config.algorithm import ESTIMATORS as CONFIG_NAMES
from molt.train.errors import ConfigError

EXAMPLE = Path(__file__).parents[4] / "docs" / "examples" / "custom_estimator.py"


def compute(name, rewards, groups, num_actions, signals=None, **settings):
    return compute_advantages(
        str(name),
        np.array(rewards),
        np.array(groups),
        np.array(num_actions),
        settings=EstimatorSettings(**settings),
        signals=signals,
    )


def test_numpy_in_and_float32_numpy_out():
    advantages, returns = compute("rloo", [1.0, 0.0], [4, 4], [1, 2])
    assert advantages.dtype == np.float32
    assert advantages.tolist() == [1.0, -1.0, -1.0]
    assert returns is None


def test_token_signals_reach_the_estimator_and_returns_come_back():
    signals = TokenSignals(values=np.array([0.5, 0.4, 0.3], dtype=np.float32))
    advantages, returns = compute("gae", [1.0], [0], [3], signals, gamma=0.9, lam=0.8)
    assert returns is not None
    assert (advantages.dtype, returns.dtype) == (np.float32, np.float32)
    assert returns.tolist() == pytest.approx([0.62928, 0.774, 1.0], rel=1e-6)
    gap = TokenSignals(teacher_gap=np.array([0.5, -1.0]))
    assert compute("distillation", [9.0], [0], [2], gap, distillation_coef=2.0)[0].tolist() == [1.0, -2.0]
    penalties = TokenSignals(penalties=np.array([0.25, 0.5]))
    assert compute("reinforce", [1.0], [0], [2], penalties)[0].tolist() == [0.25, 0.5]


def test_advantages_are_computed_in_float64_before_they_are_narrowed():
    # in float32 these two rewards are one number, and the group would be constant
    advantages, _ = compute("grpo", [1e8, 1e8 + 1], [0, 0], [1, 1])
    assert advantages.tolist() == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)], rel=1e-5)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_name_is_found(name):
    assert find_estimator(name) is ESTIMATORS[name]


def test_the_configuration_knows_the_same_names():
    assert sorted(ESTIMATORS) == sorted(CONFIG_NAMES)


def test_signals_of_another_length_are_refused():
    with pytest.raises(ValueError, match=r"values_N has shape \[2\]; the window makes it \[3\]"):
        compute("gae", [1.0], [0], [3], TokenSignals(values=np.zeros(2)))
    with pytest.raises(ValueError, match=r"groups_R has shape \[1\]; the window makes it \[2\]"):
        compute("rloo", [1.0, 0.0], [0], [3, 1])


def test_a_misspelt_name_is_answered_with_all_names():
    with pytest.raises(
        ConfigError, match=r"algorithm.estimator is 'grop'; it must be one of reinforce, .*FILE.py:FUNCTION"
    ):
        find_estimator("grop")


# The documentation's example


def test_the_example_is_a_complete_estimator_of_forty_lines():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40
    place = f"{EXAMPLE}:group_median"
    # medians 0, 2, (1 + 2) / 2 and the singleton's own
    rewards, groups = [1, 0, 0, 0, 9, 1, 2, 1, 2, 5], [0, 0, 0, 0, 1, 1, 1, 2, 2, 3]
    advantages, returns = compute(place, np.array(rewards, dtype=np.float64), groups, [1] * 10)
    assert advantages.tolist() == [1, 0, 0, 0, 7, -1, 0, -0.5, 0.5, 0]
    assert returns is None


def test_the_example_gives_each_token_of_a_rollout_its_advantage_and_counts_kl_penalties():
    place = f"{EXAMPLE}:group_median"
    signals = TokenSignals(penalties=np.array([0.25, 0.25, 0.0, 0.0]))
    # outcomes 1/2, 0 and 0
    assert compute(place, [1.0, 0.0, 0.0], [0, 0, 0], [2, 1, 1], signals)[0].tolist() == [0.5, 0.5, 0.0, 0.0]
    assert compute(place, [0.1] * 3, [0] * 3, [1, 2, 1])[0].tolist() == [0.0] * 4
    with pytest.raises(ConfigError, match="'group_median' discounts nothing"):
        compute(place, [1.0], [0], [1], gamma=0.5)


# Estimators of the user's own


@pytest.fixture
def write(tmp_path):
    def save(text, name="mine.py"):
        path = tmp_path / name
        path.write_text("from molt.train.advantage import Advantages\n" + text, encoding="utf-8")
        return path

    return save


def test_an_estimator_of_an_installed_module(write, tmp_path, monkeypatch):
    write(
        "def half(batch, settings):\n    return Advantages(batch.per_token(batch.rewards_R / 2))\n", "own_estimators.py"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert compute("own_estimators:half", [1.0, 3.0], [0, 0], [1, 2])[0].tolist() == [0.5, 1.5, 1.5]


def test_a_relative_path_is_looked_up_from_the_working_directory(write, tmp_path, monkeypatch):
    write("def same(batch, settings):\n    return Advantages(batch.token_rewards())\n", "from_here.py")
    monkeypatch.chdir(tmp_path)
    assert compute("from_here.py:same", [2.0], [0], [2])[0].tolist() == [0.0, 2.0]


def test_a_file_is_read_once_a_run(write):
    path = write("def one(batch, settings):\n    return Advantages(batch.token_rewards())\n")
    first = find_estimator(f"{path}:one")
    write("def one(batch, settings):\n    raise RuntimeError\n")
    assert find_estimator(f"{path}:one") is first


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("nowhere.py:f", r"cannot be imported \(FileNotFoundError: .*nowhere.py.*\): give FILE.py:FUNCTION"),
        (
            "no_such_package_here:f",
            r"cannot be imported \(ModuleNotFoundError: No module named .*\): give FILE.py:FUNCTION",
        ),
        (":f", r"cannot be imported \(ValueError: Empty module name\): give FILE.py:FUNCTION"),
        ("math:no_such_function", r"but math has no function 'no_such_function': define it"),
        ("math:pi", r"but math has no function 'pi'"),
    ],
)
def test_what_is_not_there_is_refused_with_the_fix(place, message):
    with pytest.raises(ConfigError, match=f"^algorithm.estimator is '{place}', (which )?{message}"):
        find_estimator(place)


def test_a_file_that_fails_to_import_is_refused_with_the_cause_in_one_line(write):
    path = write("raise RuntimeError('first\\nsecond')\n")
    with pytest.raises(ConfigError, match=r"cannot be imported \(RuntimeError: first second\)") as refused:
        find_estimator(f"{path}:f")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("body", "returned"),
    [
        ("batch.rewards_R", r"shape \[2\]"),
        ("Advantages(batch.rewards_R)", r"shape \[2\]"),
        ("None", "a NoneType"),
    ],
)
def test_an_estimator_that_does_not_return_an_advantage_a_token_is_refused(write, body, returned):
    path = write(f"def f(batch, settings):\n    return {body}\n")
    with pytest.raises(
        ConfigError, match=rf"which returned {returned}: return Advantages of the window's 3 action tokens"
    ):
        compute(f"{path}:f", [1.0, 0.0], [0, 0], [1, 2])
