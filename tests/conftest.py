"""Settings for all tests."""

from __future__ import annotations

import torch

# The tensors in these tests are tiny and several processes run them at once: threads would only get in each
# other's way.
torch.set_num_threads(1)
