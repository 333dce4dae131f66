"""The plan of a run: layout, costs, forecasts. It loads neither torch nor deepspeed."""
