"""A step: backward, reduction, update, and what a script does around it."""
