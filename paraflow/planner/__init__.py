"""The planner: chooses plans. Pure Python: it imports neither torch nor the runtime."""

from paraflow.planner.o1 import Choice, Footprint, Machine, choose, choose_accumulation

__all__ = ["Choice", "Footprint", "Machine", "choose", "choose_accumulation"]
