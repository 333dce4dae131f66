"""Update rules for lists of parameters, and the parameter groups that users see."""
