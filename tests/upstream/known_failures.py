"""Tests of diffusers that do not pass on ranks for other reasons than the split, with the reason."""

_LOGS_ON_RANK_0 = "asserts a warning, which diffusers logs on rank 0 alone: it fails on the others"

KNOWN_FAILURES = {
    f"test_models_transformer_{file}.py::Test{name}::test_to_keep_in_fp32_modules_warns": _LOGS_ON_RANK_0
    for file, name in (
        ("wan", "WanTransformer3D"),
        ("wan_vace", "WanVACETransformer3D"),
        ("wan_animate", "WanAnimateTransformer3D"),
        ("chronoedit", "ChronoEditTransformer"),
        ("skyreels_v2", "SkyReelsV2Transformer"),
    )
}
"""By the name of the test, the reason. It must fail on some rank; a test that is not named must not."""
