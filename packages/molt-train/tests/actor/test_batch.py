"""Rows as tensors, padded and packed: by hand, and through a real model that must not see the difference."""

import math

import numpy as np
import pytest
import torch

from molt.train.actor.batch import collate
from molt.train.records.experience import Experience, Payload
from molt.train.records.window import Row

CPU = torch.device("cpu")
BOTH = pytest.mark.parametrize("layout", ["padded", "packed"])


def row_of(payload, advantages, *, rollout=0, weight=1.0, name="r", **arrays):
    experience = Experience(
        segment_id=f"{name}/0",
        rollout_id=name,
        group_id="g",
        num_tokens=len(payload.token_ids),
        num_actions=int(payload.action_mask.sum()),
        oldest_version=0,
        newest_version=0,
        mean_version=0.0,
        payload=None,
    )
    arrays = {key: np.asarray(values, np.float32) for key, values in arrays.items()}
    return payload, Row(
        experience=experience,
        rollout=rollout,
        weight=weight,
        advantages=np.asarray(advantages, np.float32),
        **arrays,
    )


@pytest.fixture
def rows(make_payload):
    long = make_payload([1, 2, 3, 4, 0], [0, 0, 1, 0, 1], [0.0, 0.0, -0.5, 0.0, -0.25])
    short = make_payload([2, 4, 1], [0, 1, 1], [0.0, -1.0, -2.0])
    return [
        row_of(long, [1.0, 2.0], rollout=7, weight=0.25, name="long", reference=[-3.0, -4.0]),
        row_of(short, [-1.0, -2.0], rollout=3, weight=0.125, name="short", reference=[-5.0, -6.0]),
    ]


def test_padded_rows_are_as_long_as_the_longest(rows):
    batch = collate(rows, device=CPU, layout="padded")
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 4, 0], [2, 4, 1, 0, 0]]
    assert batch.attention_mask_BT.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert batch.predicts_action_BT.int().tolist() == [[0, 1, 0, 1, 0], [1, 1, 0, 0, 0]]


def test_packed_rows_lie_end_to_end_and_see_only_themselves(rows):
    batch = collate(rows, device=CPU, layout="packed")
    assert batch.input_ids_BT.tolist() == [[1, 2, 3, 4, 0, 2, 4, 1]]
    assert batch.position_ids_BT.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2]]
    assert batch.predicts_action_BT.int().tolist() == [[0, 1, 0, 1, 0, 1, 1, 0]]
    assert batch.attention_mask_BT.shape == (1, 1, 8, 8)
    assert batch.attention_mask_BT.dtype == torch.bool
    for query in range(8):
        start = 0 if query < 5 else 5
        seen = [key for key in range(8) if batch.attention_mask_BT[0, 0, query, key]]
        assert seen == list(range(start, query + 1))


@BOTH
def test_the_action_axis_runs_row_by_row_token_by_token(rows, layout):
    batch = collate(rows, device=CPU, layout=layout)
    assert batch.targets_N.tolist() == [3, 0, 4, 1]
    assert batch.behaviour_N.tolist() == [-0.5, -0.25, -1.0, -2.0]
    assert batch.advantages_N.tolist() == [1.0, 2.0, -1.0, -2.0]
    assert batch.weights_N.tolist() == [0.25, 0.25, 0.125, 0.125]
    assert batch.rollout_N.tolist() == [7, 7, 3, 3]
    assert batch.sequence_N.tolist() == [0, 0, 1, 1]
    assert batch.reference_N is not None
    assert batch.reference_N.tolist() == [-3.0, -4.0, -5.0, -6.0]
    assert (batch.values_N, batch.returns_N) == (None, None)
    assert (batch.num_sequences, batch.rollout_ids) == (2, ("long", "short"))


@BOTH
def test_every_target_follows_the_position_that_predicts_it(rows, layout):
    batch = collate(rows, device=CPU, layout=layout)
    following = batch.input_ids_BT.roll(-1, dims=1)[batch.predicts_action_BT]
    assert following.tolist() == batch.targets_N.tolist()


@BOTH
def test_types_are_those_that_models_and_losses_take(rows, layout):
    batch = collate(rows, device=CPU, layout=layout)
    integers = (batch.input_ids_BT, batch.position_ids_BT, batch.targets_N, batch.rollout_N, batch.sequence_N)
    assert {tensor.dtype for tensor in integers} == {torch.int64}
    assert {t.dtype for t in (batch.behaviour_N, batch.advantages_N, batch.weights_N)} == {torch.float32}


@pytest.mark.parametrize(
    ("layout", "mask"), [("padded", [[1, 1]]), ("packed", [[[[True, False], [True, True]]]])], ids=["padded", "packed"]
)
def test_no_row_is_one_inert_row(layout, mask):
    batch = collate([], device=CPU, layout=layout)
    assert batch.input_ids_BT.tolist() == [[0, 0]]
    assert batch.attention_mask_BT.tolist() == mask, "it attends to something, or softmax would divide by zero"
    assert not batch.predicts_action_BT.any()
    for name in ("targets", "behaviour", "advantages", "weights", "rollout", "sequence", "reference", "values"):
        assert getattr(batch, f"{name}_N").shape == (0,), name
    assert (batch.num_sequences, batch.rollout_ids) == (0, ())


@BOTH
def test_what_stands_in_slots_that_are_no_actions_changes_nothing(rows, layout):
    """Behaviour log-probs of NaN and infinity beside the actions give bit-equal tensors."""
    spoilt = []
    for i, (payload, row) in enumerate(rows):
        garbage = np.full(len(payload.token_ids), [np.nan, np.inf][i], np.float32)
        logprobs = np.where(payload.action_mask, payload.logprobs, garbage)
        changed = Payload(
            token_ids=payload.token_ids, action_mask=payload.action_mask, logprobs=logprobs, versions=payload.versions
        )
        spoilt.append((changed, row))
    clean, dirty = (collate(of, device=CPU, layout=layout) for of in (rows, spoilt))
    for name, tensor in vars(clean).items():
        if isinstance(tensor, torch.Tensor):
            assert torch.equal(tensor, getattr(dirty, name)), name


def test_an_action_that_nothing_predicts_is_refused(make_payload):
    """Packed, the last token of the row before it would be made to predict it."""
    row = row_of(make_payload([1, 2], [1, 0]), [1.0])
    with pytest.raises(ValueError, match="segment 'r/0' starts with an action, which no token predicts"):
        collate([row], device=CPU, layout="packed")


@pytest.mark.parametrize("field", ["advantages", "reference", "values", "returns"])
def test_arrays_that_do_not_fit_the_actions_are_refused(make_payload, field):
    arrays = {"advantages": [1.0, 1.0]} | {field: [1.0, 2.0, 3.0]}
    row = row_of(make_payload([1, 2, 3], [0, 1, 1]), **arrays)
    with pytest.raises(ValueError, match=rf"segment 'r/0' has 2 actions and 3 {field}"):
        collate([row], device=CPU, layout="padded")


def test_rows_with_and_without_reference_do_not_mix(make_payload):
    payload = make_payload([1, 2], [0, 1])
    mixed = [row_of(payload, [1.0], reference=[-1.0]), row_of(payload, [1.0])]
    with pytest.raises(ValueError, match="of 2 rows only 1 have reference log-probs, values or returns"):
        collate(mixed, device=CPU, layout="padded")


@pytest.fixture(scope="module", params=["transformers", "automodel"])
def model(request):
    """A real Qwen3 of two layers, as transformers and as AutoModel write it."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=50,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=64,
        initializer_range=0.3,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    if request.param == "transformers":
        return transformers.AutoModelForCausalLM.from_config(config).eval()
    from nemo_automodel.components.models.qwen3.model import Qwen3ForCausalLM

    from molt.train.actor.cpu_build import cpu_build

    with cpu_build("nemo_automodel.components.models.qwen3.model"):
        return Qwen3ForCausalLM(config).float().eval()


def random_rows(lengths, seed=0):
    generator = np.random.default_rng(seed)
    rows = []
    for i, length in enumerate(lengths):
        mask = generator.random(length) < 0.5
        mask[0], mask[-1] = False, True
        payload = Payload(
            token_ids=generator.integers(0, 50, length).astype(np.int32),
            action_mask=mask,
            logprobs=np.zeros(length, np.float32),
            versions=np.zeros(length, np.int32),
        )
        rows.append(row_of(payload, np.ones(int(mask.sum())), name=f"r{i}"))
    return rows


def logprobs(model, batch):
    logits_BTV = model(
        input_ids=batch.input_ids_BT,
        attention_mask=batch.attention_mask_BT,
        position_ids=batch.position_ids_BT,
        use_cache=False,
    ).logits
    logprobs_NV = torch.log_softmax(logits_BTV[batch.predicts_action_BT], -1)
    return logprobs_NV.gather(1, batch.targets_N[:, None])[:, 0]


@pytest.mark.parametrize("lengths", [(9, 4, 13), (2, 2), (6,), (5, 5, 5, 5)])
def test_packed_and_padded_rows_have_the_log_probs_of_each_row_alone(model, lengths):
    rows = random_rows(lengths)
    with torch.no_grad():
        padded, packed = (logprobs(model, collate(rows, device=CPU, layout=layout)) for layout in ("padded", "packed"))
        alone = torch.cat([logprobs(model, collate([row], device=CPU, layout="padded")) for row in rows])
    assert alone.std() > 0.1 or len(alone) < 3, "a model that tells tokens apart"
    assert (padded - alone).abs().max() < 1e-5
    assert (packed - alone).abs().max() < 1e-5


def test_packed_and_padded_rows_have_one_gradient(model):
    rows = random_rows((9, 4, 13), seed=1)
    gradients = []
    for layout in ("padded", "packed"):
        model.zero_grad()
        logprobs(model, collate(rows, device=CPU, layout=layout)).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for name, gradient in gradients[0].items():
        scale = gradient.abs().max().clamp(min=1.0)
        assert ((gradients[1][name] - gradient).abs().max() / scale) < 1e-5, name


def test_a_shift_by_one_token_is_seen(model):
    """The parity above would fail if log-probs were read one position late."""
    batch = collate(random_rows((9, 13)), device=CPU, layout="packed")
    with torch.no_grad():
        right = logprobs(model, batch)
        logits_BTV = model(
            input_ids=batch.input_ids_BT,
            attention_mask=batch.attention_mask_BT,
            position_ids=batch.position_ids_BT,
            use_cache=False,
        ).logits
    late_NV = torch.log_softmax(logits_BTV[batch.predicts_action_BT.roll(1, dims=1)], -1)
    late = late_NV.gather(1, batch.targets_N[:, None])[:, 0]
    assert (late - right).abs().max() > 0.1


def test_padding_tokens_and_columns_change_no_log_prob(model):
    """Another row that is longer adds columns; garbage ids in them are never attended to."""
    rows = random_rows((5, 12))
    batch = collate(rows, device=CPU, layout="padded")
    ids_BT = torch.where(batch.attention_mask_BT.bool(), batch.input_ids_BT, 49)
    with torch.no_grad():
        clean = logprobs(model, batch)
        dirty = logprobs(model, type(batch)(**{**vars(batch), "input_ids_BT": ids_BT}))
    assert torch.equal(clean, dirty)


@BOTH
def test_an_empty_microbatch_runs_forward_and_backward_and_adds_nothing(model, layout):
    model.zero_grad()
    batch = collate([], device=CPU, layout=layout)
    loss = (logprobs(model, batch) * batch.weights_N).sum()
    loss.backward()
    assert loss.item() == 0.0
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert math.isclose(parameter.grad.abs().max().item(), 0.0), name
