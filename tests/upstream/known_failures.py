"""Tests of diffusers that do not pass on ranks for other reasons than the split, with the reason."""

KNOWN_FAILURES: dict[str, str] = {}
"""By the name of the test, the reason. It must fail on some rank; a test that is not named must not."""
