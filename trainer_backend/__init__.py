"""The trainer: groups of trajectories in, one FSDP2 optimizer step, new weights out. Start at ``trainer.py``."""
