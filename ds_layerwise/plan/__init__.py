"""The plan of a run: layout, costs, forecasts."""
