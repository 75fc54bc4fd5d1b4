"""Activations on the host, or computed again: what layers save for backward leaves the device until backward.

``offload`` puts it together; ``policy`` says what becomes of each layer's activations, ``layers`` finds the layers,
``handles`` packs and unpacks what autograd saves, ``ranges`` owns the memory, ``schedule`` orders the copies.
"""

from forebay.activations.offload import ActivationOffload, offload_activations
from forebay.activations.policy import Choice, Policy

__all__ = ["ActivationOffload", "Choice", "Policy", "offload_activations"]
