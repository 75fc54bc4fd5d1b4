"""What this machine can do at most: ``python -m forebay.report.ceilings DTYPE RESULT.json``.

Measured through the engine and the kernel that training uses, each alone and the best of a few rounds, so a run can
come near these rates and not pass them by more than noise.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from forebay.engine import Engine, Lane, get_engine
from forebay.engine.measure import Copies, HostUpdate
from forebay.report.points import write_json

_NUM_ROUNDS = 5
_COPY_BYTES = {"cuda": 256 * 2**20, "sim": 16 * 2**20}
_UPDATE_ELEMENTS = {"cuda": 2**25, "sim": 2**22}


def measure_ceilings(engine: Engine, dtype: torch.dtype) -> dict[str, float]:
    """Return ``down_gbps`` and ``up_gbps`` of pinned copies, and ``update_gparams`` of AdamW on the host.

    Args:
        engine: whose device and host are measured.
        dtype: of weights and gradients.
    """
    copies = Copies(engine, _COPY_BYTES[engine.kind], 2)
    result = {f"{lane.value}_gbps": copies.gbps([lane], _NUM_ROUNDS) for lane in (Lane.DOWN, Lane.UP)}
    copies.release()
    update = HostUpdate(engine, _UPDATE_ELEMENTS[engine.kind], dtype)
    result["update_gparams"] = update.gparam_per_s(_NUM_ROUNDS)
    update.release()
    return result


def main(argv: list[str]) -> int:
    """Measure with weights of the dtype that the first word names and write the answer to the second."""
    engine = get_engine("cuda" if torch.cuda.is_available() else "cpu")
    write_json(Path(argv[1]), measure_ceilings(engine, getattr(torch, argv[0])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
