"""The hand vector of most tests here, and how its numbers become what the losses read."""

import torch
from hypothesis import strategies as st

from molt.train.config import AlgorithmConfig
from molt.train.loss import LossInputs

# Two rows of three tokens, of which the last of the second row was no action.
CURRENT = [-1.0, -2.0, -0.5, -0.7, -1.2]
OLD = [-1.2, -1.5, -0.5, -0.7, -0.9]
BEHAVIOUR = [-1.25, -1.45, -0.5, -0.7, -0.4]
ADVANTAGES = [1.0, 1.0, 1.0, -2.0, -2.0]
ROWS = [0, 0, 0, 1, 1]
RATIOS = [1.221403, 0.606531, 1.0, 1.0, 0.740818]
RHO = [1.051271, 0.951229, 1.0, 1.0, 0.606531]

logprobs = st.floats(-6.0, 0.0)
advantages = st.floats(-3.0, 3.0, allow_subnormal=False)
rows = st.integers(0, 3)


def columns_of(*elements, min_size=1):
    """Lists of equal length, one of each of `elements`."""
    return st.lists(st.tuples(*elements), min_size=min_size, max_size=12).map(
        lambda tokens: [[token[i] for token in tokens] for i in range(len(elements))]
    )


def f64(values, *, grad=False):
    return torch.tensor(values, dtype=torch.float64, requires_grad=grad)


def i64(values):
    return torch.tensor(values, dtype=torch.int64)


def inputs_of(current, old, advantages, **others):
    """Inputs whose other fields are what changes nothing: one row, correction 1, behaviour as old."""
    number = len(advantages)
    current, old, advantages = (x if isinstance(x, torch.Tensor) else f64(x) for x in (current, old, advantages))
    sequence = others.pop("rows", [0] * number)
    fields = {
        "correction_N": torch.ones_like(advantages),
        "sequence_N": i64(sequence),
        "num_sequences": max(sequence, default=-1) + 1,
    }
    return LossInputs(current_N=current, old_N=old, advantages_N=advantages, **(fields | others))


def settings_of(**changes):
    return AlgorithmConfig(**changes)


def gradient(scalar, leaf):
    return torch.autograd.grad(scalar, leaf)[0]


def slope(function, values, *, step=1e-6):
    """Central differences of a function of a list of floats."""
    result = []
    for i in range(len(values)):
        above, below = list(values), list(values)
        above[i] += step
        below[i] -= step
        result.append((function(above) - function(below)) / (2 * step))
    return result
