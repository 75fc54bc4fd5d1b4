"""Hooks around state_dict, load_state_dict and step run, once each, and may change the state dict"""

from __future__ import annotations

from . import Maker
from .common import Side, compare


def check(make: Maker) -> None:
    def script(side: Side) -> dict:
        optimizer, calls = side.optimizer(), []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before step"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after step"))
        optimizer.register_state_dict_post_hook(lambda _, saved: {**saved, "run": "hooked"})
        optimizer.register_load_state_dict_pre_hook(lambda _, saved: calls.append(saved["run"]))
        optimizer.register_load_state_dict_post_hook(lambda _: calls.append("after load"))
        side.train(optimizer, range(2))
        saved = optimizer.state_dict()
        optimizer.load_state_dict(saved)
        side.train(optimizer, range(2, 4))
        return {"hook calls": calls, "what a state dict hook added": saved.get("run")}

    compare(make, script)
