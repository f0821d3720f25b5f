"""A policy small enough to follow by hand, in a process group of one."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from molt.train.actor.model import Policy
from molt.train.records.experience import Experience, Payload
from molt.train.records.window import Row

NUM_TOKENS = 5


class Tiny(torch.nn.Module):
    """The logits after a token are that token's row of one table, which starts at all zeros: every token is 1/5.

    It is a causal language model as others are: the hidden state says which token it is, and the head holds the table.
    """

    def __init__(self):
        super().__init__()
        self.lm_head = torch.nn.Linear(NUM_TOKENS, NUM_TOKENS, bias=False)
        torch.nn.init.zeros_(self.lm_head.weight)
        self.config = SimpleNamespace(get_text_config=SimpleNamespace)

    @property
    def table(self):
        """[token before, token]; writing to it writes to the weight."""
        return self.lm_head.weight.T

    def get_output_embeddings(self):
        return self.lm_head

    def set_output_embeddings(self, head):
        self.lm_head = head

    def forward(self, *, input_ids, attention_mask, position_ids, use_cache):
        assert position_ids.shape == input_ids.shape
        assert attention_mask.shape in (input_ids.shape, (1, 1, input_ids.shape[1], input_ids.shape[1]))
        assert not use_cache
        hidden = torch.nn.functional.one_hot(input_ids, NUM_TOKENS).float()
        return SimpleNamespace(logits=self.lm_head(hidden))


@pytest.fixture(scope="session")
def save_qwen3():
    """Save a small Qwen3 of random weights, and give back its folder."""

    def save(folder, **settings):
        torch.manual_seed(0)
        sizes = {"vocab_size": 29, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
        Qwen3ForCausalLM(Qwen3Config(**(sizes | heads | settings))).save_pretrained(folder)
        return folder

    return save


@pytest.fixture(scope="session")
def process_group(tmp_path_factory):
    meeting = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def tiny():
    return Tiny()


@pytest.fixture
def policy_of():
    """A model as the policy of a single rank."""

    def make(model):
        return Policy(
            model=model,
            device=torch.device("cpu"),
            mesh=SimpleNamespace(device_mesh=None, moe_mesh=None),
            compute_dtype=torch.float32,
        )

    return make


@pytest.fixture
def row_of():
    """A row of `payload`, of rollout 0 and weight 1 unless told otherwise; arrays have one entry an action."""

    def make(payload, *, rollout=0, weight=1.0, name="r", **arrays):
        num_actions = int(payload.action_mask.sum())
        arrays = {"advantages": np.zeros(num_actions)} | arrays
        experience = Experience(
            segment_id=f"{name}/0",
            rollout_id=name,
            group_id="g",
            num_tokens=len(payload.token_ids),
            num_actions=num_actions,
            oldest_version=0,
            newest_version=0,
            mean_version=0.0,
            payload=payload,
        )
        arrays = {key: np.asarray(values, np.float32) for key, values in arrays.items()}
        return Row(experience=experience, rollout=rollout, weight=weight, **arrays)

    return make


@pytest.fixture
def make_payload():
    def make(token_ids, actions, logprobs=None):
        """`actions` and `logprobs` have one entry a token; without log-probs an action's is that of chance."""
        actions = np.asarray(actions, bool)
        chance = np.where(actions, np.float32(-np.log(NUM_TOKENS)), np.float32(0))
        return Payload(
            token_ids=np.asarray(token_ids, np.int32),
            action_mask=actions,
            logprobs=chance if logprobs is None else np.asarray(logprobs, np.float32),
            versions=np.where(actions, 0, -1).astype(np.int32),
        )

    return make
