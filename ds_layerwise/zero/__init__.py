"""The ZeRO optimizer that DeepSpeed's engine calls."""
