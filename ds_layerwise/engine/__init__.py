"""What is hooked into DeepSpeed."""
