"""Captures a training step as one fx graph with the plain Graph beside it."""

from schedopt.capture.build import capture
from schedopt.capture.captured import Captured
from schedopt.capture.workload import Workload

__all__ = ["Captured", "Workload", "capture"]
