"""What a run will be, before it is one: layout, costs, forecasts. Loads neither torch nor
deepspeed.
"""
