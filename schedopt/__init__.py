"""Schedules PyTorch training under a memory budget."""
