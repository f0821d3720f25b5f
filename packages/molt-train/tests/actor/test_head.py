"""The head inside real models: the log-probs, entropies and gradients of the full logits, at action positions only."""

from types import SimpleNamespace

import pytest
import torch
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM, Qwen3Config
from transformers import Qwen3ForCausalLM as Qwen3

from molt.train.actor import head as module
from molt.train.actor.head import action_logprobs
from molt.train.actor.model import load_policy
from molt.train.config import ActorConfig
from molt.train.errors import ActorError, ConfigError

pytestmark = pytest.mark.usefixtures("process_group")

TEMPERATURE = 0.7
SIZES = {
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def qwen3(*, tied):
    torch.manual_seed(0)
    return Qwen3(Qwen3Config(**SIZES, tie_word_embeddings=tied))


def granite():
    torch.manual_seed(0)
    sizes = {name: value for name, value in SIZES.items() if name != "head_dim"}
    return GraniteForCausalLM(GraniteConfig(**sizes, logits_scaling=3.0, tie_word_embeddings=False))


def gemma2():
    torch.manual_seed(0)
    return Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0, tie_word_embeddings=True))


@pytest.fixture
def batch():
    """Three padded rows, and four action tokens in two of them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 29, (3, 8), generator=generator)
    predicts = torch.zeros(3, 8, dtype=torch.bool)
    predicts[0, 2:5] = predicts[2, 6] = True
    attention = torch.ones(3, 8, dtype=torch.int64)
    attention[1, 5:] = 0
    return SimpleNamespace(
        input_ids_BT=ids,
        attention_mask_BT=attention,
        position_ids_BT=torch.arange(8).expand(3, 8),
        predicts_action_BT=predicts,
        targets_N=ids.roll(-1, 1)[predicts],
    )


def by_head(policy, batch, *, with_entropy=True):
    return action_logprobs(policy, batch, temperature=TEMPERATURE, chunk_size=3, with_entropy=with_entropy)


def by_logits(policy, batch):
    logits = policy.model(
        input_ids=batch.input_ids_BT,
        attention_mask=batch.attention_mask_BT,
        position_ids=batch.position_ids_BT,
        use_cache=False,
    ).logits
    logprobs = (logits[batch.predicts_action_BT] / TEMPERATURE).log_softmax(-1)
    return logprobs.gather(-1, batch.targets_N.unsqueeze(-1)).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def gradients(model, values):
    model.zero_grad()
    (values[0].sum() + (values[1] ** 2).sum()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def agree(policy, batch):
    expected, found = by_logits(policy, batch), by_head(policy, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    wanted, given = gradients(policy.model, expected), gradients(policy.model, found)
    torch.testing.assert_close(given, wanted, rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize("tied", [True, False])
def test_automodels_own_class_gives_what_its_full_logits_give(tmp_path, batch, tied):
    qwen3(tied=tied).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path), ActorConfig())
    assert type(policy.model).__module__.startswith("nemo_automodel")
    weights = policy.model.get_output_embeddings().weight, policy.model.get_input_embeddings().weight
    assert (weights[0] is weights[1]) == tied
    found = agree(policy, batch)
    assert len(found[0]) == len(found[1]) == 4


@pytest.mark.parametrize("build", [granite, gemma2])
def test_a_model_that_changes_its_logits_after_the_head_is_followed(policy_of, batch, build):
    found, _ = agree(policy_of(build()), batch)
    assert found.dtype == torch.float32


def test_the_logits_exist_at_no_position_that_predicts_no_action(policy_of, batch, monkeypatch):
    seen = []

    def watch(hidden_NH, *args, **kwargs):
        seen.append(tuple(hidden_NH.shape))
        return head_logprobs(hidden_NH, *args, **kwargs)

    head_logprobs = module.head_logprobs
    monkeypatch.setattr(module, "head_logprobs", watch)
    by_head(policy_of(qwen3(tied=True)), batch)
    assert seen == [(4, 16)]


def test_the_model_is_as_it_was_afterwards_and_after_an_error(policy_of, batch, monkeypatch):
    model = qwen3(tied=True)
    before = model(input_ids=batch.input_ids_BT).logits
    by_head(policy_of(model), batch)
    monkeypatch.setattr(module, "head_logprobs", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        by_head(policy_of(model), batch)
    assert "forward" not in vars(model.lm_head)
    assert torch.equal(model(input_ids=batch.input_ids_BT).logits, before)


def test_without_an_action_token_every_parameter_still_gets_a_gradient(policy_of, batch):
    model = qwen3(tied=False)
    batch.predicts_action_BT = torch.zeros_like(batch.predicts_action_BT)
    batch.targets_N = batch.targets_N[:0]
    found = by_head(policy_of(model), batch)
    assert found[0].shape == found[1].shape == (0,)
    assert all(not gradient.any() for gradient in gradients(model, found).values())


def test_entropies_are_given_on_demand(policy_of, batch):
    policy = policy_of(qwen3(tied=True))
    logprobs, entropies = by_head(policy, batch, with_entropy=False)
    assert entropies is None
    assert torch.allclose(logprobs, by_head(policy, batch)[0], atol=1e-6)


class Normalized(torch.nn.Linear):
    """A head whose rows have length 1."""

    def forward(self, input):  # noqa: A002  # the name that torch gives it
        return torch.nn.functional.linear(input, torch.nn.functional.normalize(self.weight), self.bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", [torch.nn.Linear, Normalized])
def test_another_kind_of_head_and_one_with_a_bias_are_taken_as_they_are(policy_of, batch, kind, bias):
    model = qwen3(tied=False)
    model.lm_head = kind(16, 29, bias=bias)
    found, _ = agree(policy_of(model), batch)
    assert found.shape == (4,)


def test_a_change_of_the_logits_that_is_not_known_is_an_error(policy_of, batch):
    class Doubled(Qwen3):
        def forward(self, **kwargs):
            output = super().forward(**kwargs)
            output.logits = output.logits * 2
            return output

    torch.manual_seed(0)
    with pytest.raises(ActorError, match="Doubled changes its logits after the head"):
        by_head(policy_of(Doubled(Qwen3Config(**SIZES))), batch)


def test_a_model_without_a_head_is_refused(policy_of, batch):
    with pytest.raises(ConfigError, match=r"model\.path: Qwen3Model has no language-model head"):
        by_head(policy_of(qwen3(tied=True).model), batch)
