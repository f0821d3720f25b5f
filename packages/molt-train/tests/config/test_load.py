"""The config loader: typed, frozen, and every mistake named with its nearest remedy in one line."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from molt.train.config import Config, OptimizerConfig, TrainConfig, known_keys, load_config, to_toml
from molt.train.errors import ConfigError


@pytest.fixture
def toml(tmp_path):
    def write(text):
        path = tmp_path / "run.toml"
        path.write_text(text)
        return path

    return write


def refused(path, *overrides):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, Config)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_nothing_given_is_the_defaults():
    assert load_config(None, [], Config) == Config()


def test_a_file_sets_what_it_names_and_leaves_the_rest(toml):
    config = load_config(toml("[train]\nnum_updates = 7\n[actor.optimizer]\nlr = 3e-4\n"), [], Config)
    assert (config.train.num_updates, config.train.groups_per_update) == (7, TrainConfig().groups_per_update)
    assert (config.actor.optimizer.lr, config.actor.optimizer.beta2) == (3e-4, OptimizerConfig().beta2)


def test_an_override_wins_over_the_file_and_the_last_one_over_others(toml):
    path = toml("[train]\nnum_updates = 7\n")
    assert load_config(path, ["train.num_updates=8", "train.num_updates=9"], Config).train.num_updates == 9


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("actor.optimizer.lr=0", "actor.optimizer", "lr", 0.0),
        ("actor.optimizer.lr=1e-3", "actor.optimizer", "lr", 1e-3),
        ("train.num_updates=3", "train", "num_updates", 3),
        ("data.shuffle=false", "data", "shuffle", False),
        ("agent.path=examples/calculator/agent.py", "agent", "path", "examples/calculator/agent.py"),
        ('agent.path="quoted, = and spaces"', "agent", "path", "quoted, = and spaces"),
        ("run.dir=/tmp/a b=c", "run", "dir", "/tmp/a b=c"),
        ("server.token=", "server", "token", ""),
        ("algorithm.correction=icepop", "algorithm", "correction", "icepop"),
        ("algorithm.estimator=own.py:median", "algorithm", "estimator", "own.py:median"),
        ("reward.clip_low=-1", "reward", "clip_low", -1.0),
    ],
)
def test_forms_of_an_override(override, section, key, value):
    node = load_config(None, [override], Config)
    for part in section.split("."):
        node = getattr(node, part)
    got = getattr(node, key)
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("override", ["train.num_updates", "=3", "train..num_updates=3", ".train=1", "train.=1"])
def test_what_is_no_override_is_refused(override):
    assert refused(None, override) == f"override {override!r} is not of the form key.path=value"


def test_a_path_through_a_value_is_refused(toml):
    path = toml("[train]\nnum_updates = 3\n")
    assert refused(path, "train.num_updates.x=1") == (
        "override 'train.num_updates.x=1': 'num_updates' is a value, not a table"
    )


@pytest.mark.parametrize(
    ("override", "nearest"),
    [
        ("train.num_update=3", "train.num_updates"),
        ("train.max_stalenes=3", "train.max_staleness"),
        ("actor.optimiser.lr=3", "actor.optimizer.lr"),
        ("actor.optimizer.learning_rate=3", "actor.optimizer."),
        ("trian.num_updates=3", "train.num_updates"),
        ("zzz=3", ""),
    ],
)
def test_an_unknown_key_names_the_nearest_known_one(override, nearest):
    message = refused(None, override)
    assert message.startswith("unknown key '")
    known = message.rpartition(" is ")[2].strip("'")
    assert known.startswith(nearest)
    assert known in known_keys(Config)


def test_a_list_of_tables_is_read_and_written_back(toml):
    text = '[[data.sets]]\nname = "a"\npath = "a.jsonl"\n[[data.sets]]\nname = "b"\npath = "b.jsonl"\nweight = 2.5\n'
    config = load_config(toml(text + '[data.sets.labels]\nos = "linux"\n'), [], Config)
    assert [(s.name, s.weight, s.labels) for s in config.data.sets] == [("a", 1.0, {}), ("b", 2.5, {"os": "linux"})]
    assert load_config(toml(to_toml(config)), [], Config) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('name = "a"', "data.sets[0] is {'name': 'a'}: object missing required field `path`"),
        (
            'name = "a"\npath = "a"\nwieght = 2',
            "unknown key 'data.sets.wieght'; the nearest known key is 'data.sets.weight'",
        ),
        ('name = "a"\npath = "a"\nweight = "x"', "data.sets[0].weight is 'x': expected `float`, got `str`"),
    ],
)
def test_a_fault_in_a_list_of_tables_names_its_entry(toml, text, message):
    with pytest.raises(ConfigError) as refused:
        load_config(toml(f"[[data.sets]]\n{text}\n"), [], Config)
    assert str(refused.value) == message


def test_an_unknown_key_of_a_file_is_found_at_any_depth(toml):
    assert refused(toml("[trian]\n")).startswith("unknown key 'trian'; the nearest known key is ")
    message = refused(toml("[actor.optimizer]\nlearn = 1\n"))
    assert message.startswith("unknown key 'actor.optimizer.learn'; the nearest known key is 'actor.optimizer.")


@pytest.mark.parametrize(
    ("override", "start"),
    [
        ("train.num_updates=many", "train.num_updates is 'many': expected `int`, got `str`"),
        ("train.num_updates=1.5", "train.num_updates is 1.5: expected `int`, got `float`"),
        ("actor.optimizer.lr='1'", "actor.optimizer.lr is '1': expected `float`, got `str`"),
        ("data.shuffle=1", "data.shuffle is 1: expected `bool`, got `int`"),
        ("algorithm.loss=ppoo", "algorithm.loss is 'ppoo': invalid enum value 'ppoo'"),
        ("train=3", "train is 3; it must be a table of keys"),
    ],
)
def test_a_wrong_value_names_the_key_the_value_and_what_is_expected(override, start):
    assert refused(None, override).startswith(start)


def test_a_missing_file_is_named(tmp_path):
    assert refused(tmp_path / "no.toml") == f"config file {str(tmp_path / 'no.toml')!r} does not exist"


@pytest.mark.parametrize("content", [b"[train\n", b"a = \n", b"\xff\xfe"])
def test_a_file_that_is_not_toml_is_named(tmp_path, content):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    assert refused(path).startswith(f"config file {str(path)!r} is not TOML: ")


def test_a_config_cannot_be_changed():
    with pytest.raises(AttributeError):
        Config().train.num_updates = 5


def test_known_keys_are_the_dotted_leaves():
    keys = known_keys(Config)
    assert "actor.optimizer.lr" in keys
    assert "actor.optimizer" not in keys
    assert len(keys) == len(set(keys))


texts = st.text(st.characters(codec="utf-8"), max_size=12)
floats = st.floats(allow_nan=False, allow_infinity=False)


@example('\x7f \\ " \n', "ü€\U0001f600", 1e-7, 1, False, "grpo")
@given(texts, texts, floats, st.integers(0, 2**40), st.booleans(), st.sampled_from(["grpo", "rloo", "reinforce_pp"]))
def test_the_resolved_config_reads_back_equal(tmp_path_factory, run_dir, name, lr, num_updates, shuffle, estimator):
    config = Config(
        run=msgspec.structs.replace(Config().run, dir=run_dir),
        model=msgspec.structs.replace(Config().model, name=name),
        actor=msgspec.structs.replace(Config().actor, optimizer=OptimizerConfig(lr=lr)),
        train=TrainConfig(num_updates=num_updates),
        data=msgspec.structs.replace(Config().data, shuffle=shuffle),
        algorithm=msgspec.structs.replace(Config().algorithm, estimator=estimator),
    )
    path = tmp_path_factory.mktemp("toml") / "config.toml"
    path.write_text(to_toml(config))
    assert load_config(path, [], Config) == config
