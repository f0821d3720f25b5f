"""Models that read the policy's token ids must mean the same by them."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from molt.train.config import Config, load_config
from molt.train.errors import ConfigError
from molt.train.launch.same_tokens import check_same_tokens


@pytest.fixture
def folder(tmp_path):
    def make(name, *tokens):
        path = tmp_path / name
        path.mkdir()
        Tokenizer(WordLevel({token: i for i, token in enumerate(tokens)})).save(str(path / "tokenizer.json"))
        return str(path)

    return make


KEYS = {
    "algorithm.reference_path": "algorithm.kl_coef=0.1",
    "algorithm.teacher_path": "algorithm.estimator=distillation",
    "critic.path": "algorithm.estimator=gae",
}


def config(*overrides):
    return load_config(None, list(overrides), Config)


@pytest.mark.parametrize("key", KEYS)
def test_a_model_with_other_ids_is_refused_by_key_and_token(folder, key):
    own, other = folder("own", "a", "b", "c"), folder("other", "a", "c", "b")
    with pytest.raises(ConfigError) as caught:
        check_same_tokens(config(f"model.path={own}", f"{key}={other}", KEYS[key]))
    assert str(caught.value) == (
        f"{key} {other!r} reads token ids otherwise than model.path {own!r}: token 1 ('b') and 1 others; give a model "
        "of the same tokenizer"
    )


def test_a_model_that_lacks_a_token_is_refused(folder):
    own, other = folder("own", "a", "b"), folder("other", "a")
    with pytest.raises(ConfigError, match=r"token 1 \('b'\) and 0 others"):
        check_same_tokens(config(f"model.path={own}", f"critic.path={other}", "algorithm.estimator=gae"))


def test_tokens_besides_the_policy_s_are_fine(folder):
    own, other = folder("own", "a", "b"), folder("other", "a", "b", "c")
    assert check_same_tokens(config(f"model.path={own}", f"critic.path={other}", "algorithm.estimator=gae")) is None


def test_what_is_not_used_is_not_looked_at(folder):
    own = folder("own", "a")
    assert check_same_tokens(config(f"model.path={own}", "critic.path=nowhere")) is None


def test_a_model_without_a_tokenizer_is_refused(folder, tmp_path):
    own = folder("own", "a")
    with pytest.raises(ConfigError, match=r"critic\.path .* has no fast tokenizer \(tokenizer\.json\)"):
        check_same_tokens(config(f"model.path={own}", f"critic.path={tmp_path}", "algorithm.estimator=gae"))
