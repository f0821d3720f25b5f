"""On-policy distillation (arXiv:2306.13649): each sampled token is judged by a frozen teacher."""

from molt.train.advantage.batch import Advantages, EstimatorSettings, RolloutBatch, refuse_discount


def distillation(batch: RolloutBatch, settings: EstimatorSettings) -> Advantages:
    """`distillation_coef` * (teacher log-prob - old log-prob) of each action token.

    Its expectation is minus the reverse divergence from the teacher at the token. No reward, no baseline and no
    whitening; no later token counts for an earlier one (a discount of 0).

    Returns:
        float64 [N].

    Raises:
        ConfigError: `settings.gamma` is not 1.
        ValueError: The batch has no teacher log-probs.
    """
    refuse_discount(settings, "distillation")
    if batch.teacher_gap_N is None:
        raise ValueError("distillation needs the teacher's log-probs of the action tokens")
    return Advantages(settings.distillation_coef * batch.teacher_gap_N)
