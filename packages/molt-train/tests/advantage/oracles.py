"""Every estimator a second time, by another road: plain Python floats, loops over rollouts and their tokens.

A rollout here is a dict: `reward`, `group`, and one list a token signal (`penalties`, `values`, `gaps`), whose common
length is its number of action tokens.
"""

import math


def rollout(reward, group=0, num_actions=1, *, penalties=None, values=None, gaps=None):
    signals = {"penalties": penalties, "values": values, "gaps": gaps}
    lengths = {len(given) for given in signals.values() if given is not None} or {num_actions}
    (length,) = lengths
    return {"reward": reward, "group": group} | {k: v or [0.0] * length for k, v in signals.items()}


def mean(numbers):
    return math.fsum(numbers) / len(numbers)


def outcome(one):
    return one["reward"] - math.fsum(one["penalties"])


def broadcast(rollouts, numbers):
    return [[number] * len(one["penalties"]) for one, number in zip(rollouts, numbers, strict=True)]


def against_group(rollouts, compare):
    """`compare(own, others)` for each rollout; 0 in a group of one or of equal outcomes."""
    numbers = []
    for i, one in enumerate(rollouts):
        others = [outcome(two) for j, two in enumerate(rollouts) if j != i and two["group"] == one["group"]]
        flat = not others or set(others) == {outcome(one)}
        numbers.append(0.0 if flat else compare(outcome(one), others))
    return numbers


def standardised(own, others):
    everyone = [own, *others]
    variance = math.fsum((x - mean(everyone)) ** 2 for x in everyone) / len(others)
    return (own - mean(everyone)) / (math.sqrt(variance) + 1e-6)


def whitened(nested):
    flat = [x for tokens in nested for x in tokens]
    if not flat or min(flat) == max(flat):
        return [[0.0 for _ in tokens] for tokens in nested]
    std = math.sqrt(mean([(x - mean(flat)) ** 2 for x in flat]))
    return [[(x - mean(flat)) / (std + 1e-8) for x in tokens] for tokens in nested]


def token_returns(one, gamma):
    running, backwards = 0.0, []
    for position in range(len(one["penalties"]) - 1, -1, -1):
        terminal = one["reward"] if not backwards else 0.0
        running = terminal - one["penalties"][position] + gamma * running
        backwards.append(running)
    return backwards[::-1]


def token_gae(one, gamma, lam):
    """The double sum of the paper: A_t = sum over l of (gamma lam)^l delta_(t+l)."""
    length = len(one["values"])
    deltas = []
    for t in range(length):
        last = t == length - 1
        reward = (one["reward"] if last else 0.0) - one["penalties"][t]
        deltas.append(reward + (0.0 if last else gamma * one["values"][t + 1]) - one["values"][t])
    return [math.fsum((gamma * lam) ** (u - t) * deltas[u] for u in range(t, length)) for t in range(length)]


def reinforce_pp_baseline(rollouts):
    centred = broadcast(rollouts, against_group(rollouts, lambda own, others: own - mean([own, *others])))
    alone = [sum(two["group"] == one["group"] for two in rollouts) == 1 for one in rollouts]
    compared = iter(whitened([tokens for tokens, one in zip(centred, alone, strict=True) if not one]))
    return [[0.0] * len(tokens) if one else next(compared) for tokens, one in zip(centred, alone, strict=True)]


def oracle(name, rollouts, *, gamma=1.0, lam=1.0, coef=1.0):
    """The advantages of each rollout's tokens."""
    if name == "reinforce":
        return [token_returns(one, gamma) for one in rollouts]
    if name == "reinforce_pp":
        return whitened([token_returns(one, gamma) for one in rollouts])
    if name == "gae":
        return whitened([token_gae(one, gamma, lam) for one in rollouts])
    if name == "distillation":
        return [[coef * gap for gap in one["gaps"]] for one in rollouts]
    if name == "reinforce_pp_baseline":
        return reinforce_pp_baseline(rollouts)
    if name == "batch_mean":
        everyone = [outcome(one) for one in rollouts]
        flat = len(set(everyone)) == 1
        return broadcast(rollouts, [0.0 if flat else own - mean(everyone) for own in everyone])
    compare = {
        "group_mean": lambda own, others: own - mean([own, *others]),
        "rloo": lambda own, others: own - mean(others),
        "grpo": standardised,
    }[name]
    return broadcast(rollouts, against_group(rollouts, compare))
