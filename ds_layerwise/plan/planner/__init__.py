"""The planner, from shapes to a layout."""
