"""The memory plan: each item by hand, activations against what autograd keeps, and settings without effect refused."""

import resource

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from molt.train.actor.memory import PeakMeter, shape_of
from molt.train.actor.memory_plan import GIB, ModelShape, check_offload, compare, plan_memory
from molt.train.config import ActorConfig, Config, CriticConfig, OptimizerConfig, TrainConfig
from molt.train.errors import ConfigError

# 1,000 embedding weights, 2 layers of 450; 800 weights in the layers' matrices.
SHAPE = ModelShape(
    num_parameters=1900,
    num_embedding_parameters=1000,
    num_matrix_parameters=800,
    num_layers=2,
    hidden_size=10,
    query_size=12,
    key_value_size=4,
    feed_forward_size=20,
    num_experts_per_token=0,
    vocabulary_size=100,
)
TRAIN = TrainConfig(microbatch_tokens=7)


def plan(*, shapes=None, critic=None, **actor):
    config = Config(train=TRAIN, actor=ActorConfig(**actor), critic=critic or CriticConfig())
    return plan_memory(config, shapes or {"policy": SHAPE})


def items(made):
    return {item.name: item.num_bytes for item in made.items}


def phases(made):
    return {item.name: item.phase for item in made.items}


def test_weights_gradients_and_two_states_of_four_bytes_a_parameter():
    made = items(plan())
    assert made["policy: weights"] == made["policy: gradients"] == 4 * 1900
    assert made["policy: optimizer states"] == 2 * 4 * 1900
    assert made["copies for computing"] == 0, "a single rank computes with its own weights"


def test_three_ranks_hold_a_third_each_rounded_up_and_gather_two_layers():
    made = items(plan(num_ranks=3))
    assert made["policy: weights"] == 4 * 634
    assert made["policy: optimizer states"] == 4 * 1267
    assert made["copies for computing"] == 4 * (1000 + 2 * 450) + (4 + 4) * 450


def test_bfloat16_is_gathered_in_two_bytes_or_copied_by_a_single_rank():
    assert items(plan(num_ranks=2, dtype="bfloat16"))["copies for computing"] == 2 * (1000 + 2 * 450) + (2 + 4) * 450
    assert items(plan(dtype="bfloat16"))["copies for computing"] == 2 * 1900
    assert items(plan(dtype="bfloat16"))["policy: weights"] == 4 * 1900, "the masters stay float32"


def test_muon_has_one_state_for_its_matrices():
    made = items(plan(optimizer=OptimizerConfig(name="muon")))
    assert made["policy: optimizer states"] == 4 * (800 + 2 * 1100)


def test_activations_of_all_layers_or_their_inputs_and_one_layer():
    layer = 26 * 10 + 4 * 4 * (12 + 4 + 20)
    assert items(plan())["activations"] == 7 * 2 * layer
    assert items(plan(activation_checkpointing=True))["activations"] == 7 * (2 * 4 * 10 + layer)


def test_a_chunk_of_logits_twice_and_the_gradient_of_the_head():
    assert items(plan(logprob_chunk=3))["a chunk of logits"] == 2 * 4 * 3 * 100 + 4 * 100 * 10
    assert items(plan())["a chunk of logits"] == 2 * 4 * 7 * 100 + 4 * 100 * 10, "no more than there are tokens"


def test_a_critic_is_trained_as_well_and_frozen_models_have_weights_only():
    shapes = {"policy": SHAPE, "critic": SHAPE, "reference": SHAPE}
    made = items(plan(shapes=shapes, critic=CriticConfig(optimizer=OptimizerConfig(name="muon"))))
    assert made["critic: weights"] == made["critic: gradients"] == made["reference: weights"] == 4 * 1900
    assert made["critic: optimizer states"] == 4 * (800 + 2 * 1100), "by its own optimizer"
    assert [name for name in made if name.startswith("reference")] == ["reference: weights"]


def test_the_peak_has_activations_or_with_states_fetched_for_the_step_those():
    made = plan()
    assert made.peak_bytes == sum(items(made).values()), "states that stay are there during the passes too"
    always, states = 2 * 4 * 1900, 8 * 1900
    for num_tokens, activations in ((7, 21304), (1, 6472)):
        config = Config(train=TrainConfig(microbatch_tokens=num_tokens), actor=ActorConfig(offload="optimizer"))
        fetched = plan_memory(config, {"policy": SHAPE})
        assert phases(fetched)["policy: optimizer states"] == "step"
        assert sum(item.num_bytes for item in fetched.items if item.phase == "pass") == activations
        assert fetched.peak_bytes == always + max(states, activations)


def test_under_full_offload_the_device_holds_only_what_is_computed_with():
    made = plan(offload="full", num_ranks=2)
    on_host = {name for name, phase in phases(made).items() if phase == "host"}
    assert on_host == {"policy: weights", "policy: gradients", "policy: optimizer states"}
    assert made.peak_bytes == sum(size for name, size in items(made).items() if name not in on_host)


def test_the_table_has_a_line_an_item_largest_first_and_the_peak():
    big = ModelShape(**{**_fields(SHAPE), "num_parameters": GIB // 4})
    lines = plan(shapes={"policy": big}, offload="optimizer").render().splitlines()
    assert lines[0] == "memory of each of 1 rank(s), GiB, planned:"
    assert lines[1].split() == ["policy:", "optimizer", "states", "2.000", "optimizer", "step"]
    assert lines[2].split() == ["policy:", "weights", "1.000"]
    assert lines[-1].split() == ["peak", "4.000"]
    assert not any("copies" in line for line in lines), "what takes nothing is left out"


def _fields(shape):
    return {name: getattr(shape, name) for name in shape.__dataclass_fields__}


def test_the_measured_peak_is_compared_in_one_line():
    big = ModelShape(**{**_fields(SHAPE), "num_parameters": GIB // 4})
    line = compare(plan(shapes={"policy": big}), 3 * GIB)
    assert line == "memory after the first window: peak 3.000 GiB a rank, planned 4.000 (75% of the plan)"


SIZES = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
MODELS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "qwen3_moe": (
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96},
    ),
}


def build(kind, num_layers):
    config_class, model_class, more = MODELS[kind]
    torch.manual_seed(0)
    return model_class(config_class(**SIZES, **more, num_hidden_layers=num_layers))


def kept_bytes(model, num_tokens, dtype):
    """Bytes of the distinct storages that autograd keeps of a forward pass of the trunk."""
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = (storage.nbytes(), tensor)  # the tensor stays, so that its address does too
        return tensor

    ids = torch.arange(num_tokens).remainder(64).unsqueeze(0)
    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        model.model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
    return sum(size for size, _ in kept.values())


def kept_per_token(kind, dtype):
    """Bytes of a token and a layer: weights, and copies of them, do not grow with the tokens and fall out."""
    few, many = build(kind, 1), build(kind, 3)
    at = {n: kept_bytes(many, n, dtype) - kept_bytes(few, n, dtype) for n in (256, 768)}
    return (at[768] - at[256]) / 512 / 2


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", "float32"),
        ("llama", "bfloat16"),
        ("qwen3", "float32"),
        ("qwen3", "bfloat16"),
        ("qwen3_moe", "float32"),  # autocast on the CPU leaves experts in float32
    ],
)
def test_the_estimate_of_activations_is_what_autograd_keeps_of_a_layer(kind, dtype):
    config = Config(train=TrainConfig(microbatch_tokens=100), actor=ActorConfig(dtype=dtype))
    planned = items(plan_memory(config, {"policy": shape_of(build(kind, 3))}))["activations"] / 100 / 3
    assert planned == pytest.approx(kept_per_token(kind, dtype), rel=0.25)


def test_the_shape_of_a_model_is_read_off_its_weights_and_config():
    shape = shape_of(build("qwen3", 2))
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 160
    assert shape.num_embedding_parameters == 2 * 64 * 64
    assert shape.num_matrix_parameters == 2 * layer
    norms = 2 * (2 * 64 + 2 * 16) + 64
    assert shape.num_parameters == 2 * 64 * 64 + 2 * layer + norms
    assert (shape.query_size, shape.key_value_size, shape.feed_forward_size) == (64, 32, 160)


def test_experts_count_as_a_token_uses_them_and_are_not_muons():
    shape = shape_of(build("qwen3_moe", 1))
    assert (shape.feed_forward_size, shape.num_experts_per_token) == (192, 2)
    attention, router = 64 * (64 + 2 * 32) + 64 * 64, 8 * 64
    assert shape.num_matrix_parameters == attention + router


def test_an_offload_without_effect_is_refused():
    check_offload(ActorConfig(), has_cuda=False)
    check_offload(ActorConfig(offload="optimizer"), has_cuda=True)
    check_offload(ActorConfig(offload="full", num_ranks=2), has_cuda=True)
    for offload in ("optimizer", "full"):
        with pytest.raises(ConfigError, match=f"actor.offload is '{offload}', which has no effect without CUDA"):
            check_offload(ActorConfig(offload=offload, num_ranks=2), has_cuda=False)
    with pytest.raises(ConfigError, match=r"actor\.num_ranks 1, where nothing is sharded"):
        check_offload(ActorConfig(offload="full"), has_cuda=True)


def test_the_peak_of_this_process_grows_with_what_it_holds_and_stays():
    size = 2 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # more than any test before has left
    meter = PeakMeter()
    block = torch.ones(size // 4)
    del block
    assert meter.peak_bytes() == pytest.approx(size, rel=0.1)
