"""Tests of `ckptmove/system/`."""
