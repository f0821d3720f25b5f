"""Baselines and scales that several estimators share. R rollouts, N action tokens, G groups of the window."""

import torch
from torch import Tensor

EPSILON = 1e-8


def centre(values_R: Tensor, groups_R: Tensor) -> tuple[Tensor, Tensor]:
    """Each rollout's value minus the mean of its group, float64 [R], and the size of the group, int64 [R].

    Exactly 0 in a group of one, and where all values of the group are equal: a floating mean of equal numbers need not
    be that number, and what is left would be blown up to unit size by a division by its own deviation.
    """
    _, index_R, sizes_G = torch.unique(groups_R, return_inverse=True, return_counts=True)
    empty_G = torch.zeros(len(sizes_G), dtype=values_R.dtype)
    means_G = empty_G.index_add(0, index_R, values_R) / sizes_G
    low_G = empty_G.scatter_reduce(0, index_R, values_R, "amin", include_self=False)
    high_G = empty_G.scatter_reduce(0, index_R, values_R, "amax", include_self=False)
    centred_R = torch.where((low_G == high_G)[index_R], 0.0, values_R - means_G[index_R])
    return centred_R, sizes_G[index_R]


def group_sums(values_R: Tensor, groups_R: Tensor) -> Tensor:
    """The sum of `values_R` over each rollout's group, [R] -> [R]."""
    _, index_R = torch.unique(groups_R, return_inverse=True)
    return torch.zeros_like(values_R).index_add(0, index_R, values_R)[index_R]


def whiten(values_N: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-8) over all tokens, with the population standard deviation, float64 [N].

    Exactly 0 where all values are equal. `values_N` holds action tokens only, so there is no masked slot to spoil.
    """
    if not len(values_N) or values_N.min() == values_N.max():
        return torch.zeros_like(values_N)
    return (values_N - values_N.mean()) / (values_N.std(correction=0) + EPSILON)
