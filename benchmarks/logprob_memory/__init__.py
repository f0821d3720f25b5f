"""What log-probs of sampled tokens cost, compared with a head that writes down all its logits."""
