"""Helpers that the tests share: models, engines, oracles, and ranks to run them on."""
