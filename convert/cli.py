"""``openelm convert <route>``: picks a converter and imports only that one."""

from collections.abc import Sequence

from openelm_mlx.cli import Route, run_route

ROUTES: dict[str, Route] = {
    "corenet": ("convert.corenet", "corenet", "CoreNet .pt (also LoRA / DoRA) -> model folder"),
    "to-corenet": ("convert.corenet", "to_corenet", "model folder -> CoreNet .pt"),
    "huggingface": ("convert.huggingface", "huggingface", "Hub or local folder -> model folder"),
    "to-huggingface": ("convert.huggingface", "to_huggingface", "folder for Apple's PyTorch code"),
    "peft": ("convert.peft", "peft", "PEFT adapter folder -> adapter folder"),
    "to-peft": ("convert.peft", "to_peft", "adapter folder -> PEFT adapter folder"),
    "coreai": ("convert.coreai", "coreai", "model folder -> Core AI bundle (extra coreai)"),
    "verify-coreai": ("convert.coreai", "verify_coreai", "a Core AI bundle against MLX"),
    "coreml": ("convert.coreml", "coreml", "model folder -> Core ML package, verified"),
    "verify-coreml": ("convert.coreml_verify", "verify_coreml", "a Core ML package against MLX"),
    "run-coreml": ("convert.coreml_run", "", "text with a Core ML package, on any machine"),
    "quantize": ("convert.quantize", "quantize", "model folder -> quantised model folder"),
}


def run(argv: Sequence[str]) -> int:
    """Run ``openelm convert`` with the arguments after it."""
    return run_route("openelm convert", ROUTES, argv, description=__doc__)
