"""Tests of `ckptmove/training/`."""
