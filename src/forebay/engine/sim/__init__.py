"""The adversarial simulator."""

from forebay.engine.sim.clocks import RaceError
from forebay.engine.sim.engine import SimEngine, SimEvent

__all__ = ["RaceError", "SimEngine", "SimEvent"]
