"""The parameter groups that users see: of our own optimizer, or of a script's."""
