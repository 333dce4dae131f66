"""What tests share: models, engines, oracles, and ranks to run them on."""
