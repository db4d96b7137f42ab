"""Tests of diffusers that do not pass on ranks for other reasons than the split, with the reason."""

LOGS_ON_RANK_0 = "asserts what diffusers logs, on rank 0 alone: it fails on the others"

_KEEPS_FLOAT32 = (
    "wan.py::TestWanTransformer3D",
    "wan_vace.py::TestWanVACETransformer3D",
    "wan_animate.py::TestWanAnimateTransformer3D",
    "chronoedit.py::TestChronoEditTransformer",
    "skyreels_v2.py::TestSkyReelsV2Transformer",
    "helios.py::TestHeliosTransformer3D",
    "minimax_h3.py::TestMiniMaxH3Transformer",
    "anyflow.py::TestAnyFlowTransformer3D",
)
_LORA = (
    "wan.py::TestWanTransformer3DLoRA",
    "wan_vace.py::TestWanVACETransformer3DLoRA",
    "hunyuan_video.py::TestHunyuanVideoTransformerLoRA",
    "ltx.py::TestLTXTransformerLoRA",
    "ltx2.py::TestLTX2TransformerLoRA",
    "cogvideox.py::TestCogVideoXTransformerLoRA",
    "mochi.py::TestMochiTransformerLoRA",
    "cogview4.py::TestCogView4TransformerLoRA",
    "helios.py::TestHeliosTransformer3DLoRA",
    "minimax_h3.py::TestMiniMaxH3TransformerLoRA",
    "motif_video.py::TestMotifVideoTransformerLora",
    "flux.py::TestFluxTransformerLoRA",
    "flux2.py::TestFlux2TransformerLoRA",
    "qwenimage.py::TestQwenImageTransformerLoRA",
    "sd3.py::TestSD3TransformerLoRA",
    "chroma.py::TestChromaTransformerLoRA",
    "z_image.py::TestZImageTransformerLoRA",
)
_LORA_LOGS = (
    "test_lora_missing_keys_warning",
    "test_lora_unexpected_keys_warning",
    "test_logs_info_when_no_lora_keys_found",
)

KNOWN_FAILURES = {
    f"test_models_transformer_{of_class}::{test}": LOGS_ON_RANK_0
    for classes, tests in ((_KEEPS_FLOAT32, ("test_to_keep_in_fp32_modules_warns",)), (_LORA, _LORA_LOGS))
    for of_class in classes
    for test in tests
}
"""By the name of the test, the reason. It must fail on some rank; a test that is not named must not."""
