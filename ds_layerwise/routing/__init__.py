"""Which recipe each parameter gets, and why."""
