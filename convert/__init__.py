"""Checkpoints across frameworks: CoreNet, Hugging Face, PEFT, quantised folders, Core ML."""
