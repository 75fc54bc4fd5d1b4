"""The optimizer's state in torch's AdamW schema: assembled from chunks of any placement, and taken apart again.

Everything happens on the host, a piece at a time, so neither direction needs device memory. Beside torch's
entries a bf16 parameter has the lower halves of its masters, ``master_remainder`` (int16), and
``master_checksum``, a sum over the weights they belong to: remainders are only taken back for those weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from forebay.optim.chunk_state import flat
from forebay.optim.layout import Placement, Segment

if TYPE_CHECKING:
    from forebay.optim.adamw import AdamW

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclasses.dataclass
class SavedMaster:
    """Masters from a state dict, until it is known whether they belong to the model's weights."""

    remainder: torch.Tensor | None = None
    checksum: int | None = None
    master: torch.Tensor | None = None


@dataclasses.dataclass
class _Piece:
    segment: Segment
    fields: dict[str, torch.Tensor]
    step: torch.Tensor  # fp32 scalar view
    on_host: bool


def _pieces(optimizer: AdamW, only: int | None = None) -> list[list[_Piece]]:
    """Return the pieces of each parameter's state, in order, all current and readable by Python.

    With ``only``, the number of a parameter, just that one's are gathered.
    """
    placed = optimizer.placed
    placed.settle()
    pieces: list[list[_Piece]] = [[] for _ in placed.params]
    for placement, share in placed.shares.items():
        for number, state in enumerate(share.chunks):
            if only is not None and all(segment.param != only for segment in state.chunk.segments):
                continue
            fields = state.segment_fields(state.region)
            for index, segment in enumerate(state.chunk.segments):
                step = share.step_counter(number, index, placed.scalars)
                piece = _Piece(segment, fields[index], step, placement is not Placement.DEVICE)
                pieces[segment.param].append(piece)
    for own in pieces:
        own.sort(key=lambda piece: piece.segment.start)
    return pieces


def _gather(pieces: list[_Piece], name: str, shape: torch.Size) -> torch.Tensor:
    first = pieces[0].fields[name]
    if len(pieces) == 1 and pieces[0].on_host:
        # As in torch, a reference to live state, not a copy: a second copy of all state might not fit the host.
        # Going through numpy gives it a storage of its own, or torch.save would write the whole slab with it.
        return torch.from_numpy(first.numpy()).view(shape)
    whole = torch.empty(shape, dtype=first.dtype)
    for piece in pieces:
        whole.view(-1)[piece.segment.start : piece.segment.stop].copy_(piece.fields[name])
    return whole


def _checksum(weight: torch.Tensor) -> int:
    return int(weight.detach().contiguous().view(-1).view(torch.int16).sum(dtype=torch.int64))


def _param_state(param: torch.Tensor, pieces: list[_Piece]) -> dict[str, Any]:
    """Return one parameter's entry; empty if it has never been updated."""
    if not pieces or float(pieces[0].step) == 0:
        return {}
    entry = {"step": pieces[0].step.detach().cpu().clone().reshape(())}
    for name in _MOMENTS:
        entry[name] = _gather(pieces, name, param.shape)
    if "remainder" in pieces[0].fields:
        entry["master_remainder"] = _gather(pieces, "remainder", param.shape)
        entry["master_checksum"] = torch.tensor(_checksum(param))
    if "master" in pieces[0].fields:
        entry["master_param"] = _gather(pieces, "master", param.shape)
    return entry


class LazyState(Mapping[torch.Tensor, dict[str, Any]]):
    """``optimizer.state``: each parameter's entry is assembled when it is asked for."""

    def __init__(self, optimizer: AdamW) -> None:
        self._optimizer = optimizer

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        number = self._optimizer.placed.numbers[param]
        return _param_state(param, _pieces(self._optimizer, only=number)[number])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._optimizer.placed.params)

    def __len__(self) -> int:
        return len(self._optimizer.placed.params)


def pack_groups(optimizer: AdamW) -> list[dict[str, Any]]:
    """Return the parameter groups with numbers in place of parameters, counted over all groups as torch does."""
    packed, start = [], 0
    for group in optimizer.param_groups:
        entry = {key: value for key, value in group.items() if key != "params"}
        entry["params"] = list(range(start, start + len(group["params"])))
        start += len(group["params"])
        packed.append(entry)
    return packed


def _in_group_order(optimizer: AdamW) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@torch.no_grad()
def save(optimizer: AdamW) -> dict[str, Any]:
    """Return the state dict."""
    state: dict[int, dict[str, Any]] = {}
    numbers = optimizer.placed.numbers
    if numbers:
        optimizer._take_external_writes()
        pieces = _pieces(optimizer)
        for index, param in enumerate(_in_group_order(optimizer)):
            entry = _param_state(param, pieces[numbers[param]]) if param in numbers else {}
            if entry:
                state[index] = entry
    return {"state": state, "param_groups": pack_groups(optimizer)}


def load(optimizer: AdamW, state_dict: Mapping[str, Any]) -> None:
    """Take a state dict apart; see :meth:`AdamW.load_state_dict`."""
    groups, saved_groups = optimizer.param_groups, state_dict["param_groups"]
    sizes = [len(group["params"]) for group in groups]
    saved_sizes = [len(group["params"]) for group in saved_groups]
    if sizes != saved_sizes:
        raise ValueError(
            f"the state dict has parameter groups of {saved_sizes} parameters, this optimizer has {sizes}; build "
            "the optimizer with the groups that the checkpoint was written with"
        )
    params = _in_group_order(optimizer)
    saved_ids = [number for group in saved_groups for number in group["params"]]
    entries = {param: state_dict["state"].get(number, {}) for param, number in zip(params, saved_ids, strict=True)}
    _check_shapes(optimizer, entries)
    for group, saved in zip(groups, saved_groups, strict=True):
        group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
    optimizer._allocate_where(lambda param: param.requires_grad or bool(entries.get(param)))
    pieces = _pieces(optimizer)
    optimizer._pending_masters.clear()
    for param, number in optimizer.placed.numbers.items():
        entry = entries[param]
        for piece in pieces[number]:
            piece.step.fill_(float(entry.get("step", 0)))
            for name in _MOMENTS:
                if name in entry:
                    piece.fields[name].copy_(entry[name].reshape(-1)[piece.segment.start : piece.segment.stop])
                else:
                    piece.fields[name].zero_()
        if "master_remainder" in entry and "remainder" in pieces[number][0].fields:
            checksum = int(entry["master_checksum"])
            remainder = entry["master_remainder"]
            if any(_shares_memory(remainder, piece.fields["remainder"]) for piece in pieces[number]):
                # It came from this optimizer's own state dict, and the live remainders are zeroed below.
                remainder = remainder.clone()
            optimizer._pending_masters[param] = SavedMaster(remainder, checksum)
        elif "master_param" in entry:
            optimizer._pending_masters[param] = SavedMaster(master=entry["master_param"])
    steps = (int(float(entry.get("step", 0))) for entry in entries.values())
    optimizer.placed.scalars.most_steps = max(steps, default=0)
    # Until the saved masters turn out to belong to the weights, the weights are the masters.
    optimizer.refresh_masters()


def _shares_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    begin, end = left.data_ptr(), left.data_ptr() + left.nbytes
    return right.data_ptr() < end and begin < right.data_ptr() + right.nbytes


def _check_shapes(optimizer: AdamW, entries: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    names = {param: name for name, param in optimizer._named(optimizer.param_groups)}
    for param, entry in entries.items():
        for name in _MOMENTS:
            if entry and name not in entry:
                raise ValueError(
                    f"the state dict has no {name} for parameter {names[param]}; it was not written by Adam or AdamW"
                )
            if entry and entry[name].shape != param.shape:
                raise ValueError(
                    f"the state dict has {name} of shape {tuple(entry[name].shape)} for parameter {names[param]} "
                    f"of shape {tuple(param.shape)}; it belongs to another model"
                )


@torch.no_grad()
def apply_masters(optimizer: AdamW) -> None:
    """Take saved masters over where the weights are what these masters round to."""
    pending, optimizer._pending_masters = optimizer._pending_masters, {}
    pieces = _pieces(optimizer)
    for param, saved in pending.items():
        own = pieces[optimizer.placed.numbers[param]]
        if saved.remainder is not None:
            if "remainder" in own[0].fields and saved.checksum == _checksum(param):
                for piece in own:
                    part = saved.remainder.reshape(-1)[piece.segment.start : piece.segment.stop]
                    piece.fields["remainder"].copy_(part)
        elif saved.master is not None:
            for piece in own:
                part = saved.master.reshape(-1)[piece.segment.start : piece.segment.stop].float().cpu()
                _apply_full_master(piece, part, flat(param, piece.segment).cpu())


def _apply_full_master(piece: _Piece, master: torch.Tensor, weight: torch.Tensor) -> None:
    if "remainder" in piece.fields:
        upper = weight.view(torch.int16).to(torch.int32) << 16
        difference = master.view(torch.int32).to(torch.int64) - upper
        # A weight rounded to nearest is within half a bf16 step of its master. One that is not was changed
        # since, and is its own master.
        belongs = difference.abs() <= 0x8000
        remainder = difference.clamp(-0x8000, 0x7FFF).to(torch.int16)
        piece.fields["remainder"].copy_(torch.where(belongs, remainder, torch.zeros_like(remainder)))
    elif "master" in piece.fields:
        piece.fields["master"].copy_(torch.where(master.to(weight.dtype) == weight, master, weight.float()))
