"""The adversarial simulator."""

from forebay.engine.sim.clocks import RaceError
from forebay.engine.sim.engine import SimEngine, SimEvent
from forebay.engine.sim.graph import SimGraph

__all__ = ["RaceError", "SimEngine", "SimEvent", "SimGraph"]
