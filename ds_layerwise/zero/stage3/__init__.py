"""ZeRO stage 3: parameters that DeepSpeed cuts over the ranks and fetches."""
