"""Models that are spread over ranks: pipelines, sequences, tensors."""
