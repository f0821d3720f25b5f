"""The value head in the place of a language model's own, on a small Qwen3 as AutoModel loads it."""

import pytest
import torch
from transformers import Qwen3ForCausalLM

from molt.train.actor import value_model
from molt.train.actor.batch import collate
from molt.train.actor.value_model import ValueHead, action_values, load_value_model
from molt.train.config import ActorConfig
from molt.train.errors import ConfigError

CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request, save_qwen3, tmp_path_factory):
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), tie_word_embeddings=request.param)


@pytest.fixture(scope="module")
def loaded(checkpoint, process_group):
    return load_value_model(str(checkpoint), ActorConfig())


@pytest.fixture
def batch(make_payload, row_of):
    def make(layout):
        payloads = [make_payload([3, 7, 11, 2, 5], [0, 1, 1, 0, 1]), make_payload([8, 1, 4], [0, 0, 1])]
        rows = [(payload, row_of(payload, name=str(i))) for i, payload in enumerate(payloads)]
        return collate(rows, device=CPU, layout=layout)

    return make


def set_head(model):
    head = model.model.lm_head
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-1, 1, 16))
        head.bias.fill_(0.5)
    return head


def test_values_start_at_zero_and_the_old_head_is_gone(loaded, batch):
    assert isinstance(loaded.model.lm_head, ValueHead)
    names = {name: parameter.shape for name, parameter in loaded.model.named_parameters() if "lm_head" in name}
    assert names == {"lm_head.weight": (1, 16), "lm_head.bias": (1,)}
    assert loaded.model.model.embed_tokens.weight.shape == (29, 16), "tied or not, the embeddings stay"


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_values_are_the_head_of_the_trunk_s_last_state_before_each_action(checkpoint, loaded, batch, layout):
    head = set_head(loaded)
    values_N = action_values(loaded, batch(layout))
    trunk = Qwen3ForCausalLM.from_pretrained(checkpoint, attn_implementation="eager").model
    expected = []
    with torch.no_grad():
        for tokens, actions in (([3, 7, 11, 2, 5], [1, 2, 4]), ([8, 1, 4], [2])):
            for action in actions:  # of the prefix alone: nothing that comes later counts
                state = trunk(input_ids=torch.tensor([tokens[:action]])).last_hidden_state[0, -1]
                expected.append(float(sum(w * h for w, h in zip(head.weight[0], state, strict=True)) + head.bias))
    assert values_N.tolist() == pytest.approx(expected, abs=1e-5)
    assert values_N.requires_grad


def test_a_microbatch_without_rows_still_has_a_gradient(loaded):
    values_N = action_values(loaded, collate([], device=CPU, layout="padded"))
    assert values_N.shape == (0,)
    values_N.sum().backward()
    assert loaded.model.lm_head.weight.grad is not None
    assert not loaded.model.lm_head.weight.grad.any()


def test_the_head_stays_in_float32_where_the_trunk_computes_in_bfloat16():
    head = ValueHead(4, device=CPU)
    with torch.no_grad():
        head.weight.fill_(1.0 + 2**-20)  # which bfloat16 rounds to 1
    hidden = torch.ones(1, 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        value = head(hidden)
    assert value.dtype == torch.float32
    assert value.item() == 4.0 + 2**-18


def test_a_model_without_a_head_is_refused_with_its_path(monkeypatch, policy_of, tiny):
    tiny.get_output_embeddings = lambda: None
    monkeypatch.setattr(value_model, "load_policy", lambda path, settings: policy_of(tiny))
    with pytest.raises(ConfigError, match=r"critic\.path 'somewhere' has no language-model head"):
        load_value_model("somewhere", ActorConfig())
