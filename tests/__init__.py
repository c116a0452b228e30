"""The tests of ckptmove, with what they share: makers, oracles and strategies."""
