"""Train a DFlash drafter for a target on text that the target itself generates (README.md here)."""
