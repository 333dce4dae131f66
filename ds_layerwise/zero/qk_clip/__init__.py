"""QK-clip: attention logits and the scaling of queries and keys."""
