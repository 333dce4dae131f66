"""Configs, commands, documents, and the libraries that users come from."""
