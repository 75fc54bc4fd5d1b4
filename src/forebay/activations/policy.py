"""What becomes of each layer's activations: a plain object, filled in by the user or by a planner."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Mapping, Sequence


class Choice(str, enum.Enum):
    """What becomes of the activations of one layer between its forward and its backward.

    ``KEEP`` leaves them on the device. ``OFFLOAD`` copies them to the host and back. ``RECOMPUTE`` keeps the
    layer's inputs only and runs its forward again in backward. ``RECOMPUTE_OFFLOADED_INPUT`` does the same with
    the inputs on the host meanwhile, so that nothing of the layer stays on the device.
    """

    KEEP = "keep"
    OFFLOAD = "offload"
    RECOMPUTE = "recompute"
    RECOMPUTE_OFFLOADED_INPUT = "recompute_offloaded_input"


_NAMES = tuple(choice.value for choice in Choice)


@dataclasses.dataclass(frozen=True)
class Policy:
    """A choice for each layer, in the order in which the layers run.

    Args:
        choices: one :class:`Choice`, or its name, for each layer.

    Raises:
        ValueError: for a name that is no choice.
    """

    choices: tuple[Choice, ...]

    def __init__(self, choices: Iterable[Choice | str]) -> None:
        # A frozen dataclass sets its fields this way.
        object.__setattr__(self, "choices", tuple(_choice(choice) for choice in choices))

    @classmethod
    def uniform(cls, choice: Choice | str, num_layers: int, *, num_kept: int = 1) -> Policy:
        """Return a policy with the same choice for all layers but the last ``num_kept``, which keep theirs.

        Backward begins with the last layers. It needs what they saved at once, so moving it away frees nothing
        when memory is fullest.

        Args:
            choice: of the other layers.
            num_layers: of the model.
            num_kept: how many keep their activations. Default 1.

        Raises:
            ValueError: for a name that is no choice, or a negative number.
        """
        if num_layers < 0 or num_kept < 0:
            raise ValueError(f"num_layers={num_layers} and num_kept={num_kept} must not be negative")
        num_kept = min(num_kept, num_layers)
        return cls([choice] * (num_layers - num_kept) + [Choice.KEEP] * num_kept)

    @classmethod
    def interleaved(cls, counts: Mapping[Choice | str, int], num_layers: int) -> Policy:
        """Return a policy that spreads each choice evenly over the layers; the last keeps, if any does.

        The link to the host is idle while a layer that keeps or recomputes runs. Evenly spread, the copies of an
        offloaded layer have the time of the layers up to the next one (with ``num_layers_in_flight`` that large).

        Args:
            counts: how many layers have each choice; the rest keep.
            num_layers: of the model.

        Raises:
            ValueError: for a name that is no choice, a negative number, or more choices than layers.
        """
        wanted = {_choice(name): number for name, number in counts.items()}
        num_chosen = sum(wanted.values())
        if min(wanted.values(), default=0) < 0 or num_chosen > num_layers:
            raise ValueError(
                f"the numbers of layers in {dict(counts)} must not be negative, and not be more than the {num_layers} "
                "layers of the model"
            )
        wanted[Choice.KEEP] = wanted.get(Choice.KEEP, 0) + num_layers - num_chosen
        last = [Choice.KEEP] if wanted[Choice.KEEP] else []
        wanted[Choice.KEEP] -= len(last)
        num_spread = num_layers - len(last)
        chosen: list[Choice] = []
        for position in range(1, num_spread + 1):
            # How far each choice lags behind its share so far; where it is the same, the one that was given first.
            lag = {choice: number * position - chosen.count(choice) * num_spread for choice, number in wanted.items()}
            chosen.append(max(wanted, key=lag.__getitem__))
        return cls(chosen + last)

    def count(self, choice: Choice) -> int:
        """Return how many layers have ``choice``."""
        return self.choices.count(choice)


PolicyLike = Policy | Choice | str | Sequence[Choice | str]
"""What is taken for a policy: one, its choices, or one choice for all layers but the last."""


def resolve(policy: PolicyLike, num_layers: int) -> Policy:
    """Return ``policy`` as a :class:`Policy` for ``num_layers``; one choice is meant for all but the last layer.

    Raises:
        ValueError: if the number of choices is not that of the layers.
    """
    if isinstance(policy, str):  # a Choice is one too
        return Policy.uniform(policy, num_layers)
    found = policy if isinstance(policy, Policy) else Policy(policy)
    if len(found.choices) != num_layers:
        raise ValueError(
            f"the policy has {len(found.choices)} choices and the model {num_layers} layers; give one choice for each "
            "layer, or the name of one choice for all but the last (Policy.uniform makes such a policy)"
        )
    return found


def _choice(name: Choice | str) -> Choice:
    try:
        return Choice(name)
    except ValueError:
        raise ValueError(
            f"unknown choice {name!r} for a layer's activations; choose one of {', '.join(_NAMES)}"
        ) from None
