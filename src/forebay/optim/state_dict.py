"""The optimizer's state in torch's schema: assembled from chunks of any placement, and taken apart again.

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
from forebay.optim.shares import Share
from forebay.optim.update_rule import MASTER_FIELDS

if TYPE_CHECKING:
    from forebay.optim.placed_optimizer import PlacedOptimizer

_MASTER_ENTRIES = ("master_remainder", "master_checksum", "master_param")


@dataclasses.dataclass
class SavedMaster:
    """Masters from a state dict, until it is known whether they belong to the model's weights."""

    remainder: torch.Tensor | None = None
    checksum: int | None = None
    master: torch.Tensor | None = None


@dataclasses.dataclass
class _Piece:
    share: Share
    chunk: int  # its number in the share
    index: int  # of the segment in the chunk
    segment: Segment
    fields: dict[str, torch.Tensor]
    on_host: bool


def _pieces(optimizer: PlacedOptimizer, only: int | None = None) -> list[list[_Piece]]:
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
                on_host = placement is not Placement.DEVICE
                pieces[segment.param].append(_Piece(share, number, index, segment, fields[index], on_host))
    for own in pieces:
        own.sort(key=lambda piece: piece.segment.start)
    return pieces


def check_intact(optimizer: PlacedOptimizer) -> None:
    """Wait for all updates, and raise :class:`HostTaskError` if one failed: what it left must not be saved."""
    optimizer.placed.settle()
    optimizer.placed.check_tasks()


def _gather(pieces: list[_Piece], name: str, shape: torch.Size) -> torch.Tensor:
    parts = [
        piece.fields[name] if name in MASTER_FIELDS else piece.share.rule.read_moment(piece.fields, name)
        for piece in pieces
    ]
    first = parts[0]
    if len(pieces) == 1 and pieces[0].on_host:
        # As in torch, a reference to live state, not a copy: a second copy of all state might not fit the host.
        # Going through numpy, as bytes, gives it a storage of its own, or torch.save would write the whole slab.
        return torch.from_numpy(first.view(torch.uint8).numpy()).view(first.dtype).view(shape)
    whole = torch.empty(shape, dtype=first.dtype)
    for piece, part in zip(pieces, parts, strict=True):
        whole.view(-1)[piece.segment.start : piece.segment.stop].copy_(part)
    return whole


def _checksum(weight: torch.Tensor) -> int:
    return int(weight.detach().contiguous().view(-1).view(torch.int16).sum(dtype=torch.int64))


def _param_state(param: torch.Tensor, pieces: list[_Piece]) -> dict[str, Any]:
    """Return one parameter's entry; empty if it has never been updated."""
    kept = pieces[0].share.kept(pieces[0].chunk, pieces[0].index) if pieces else None
    if kept is None:
        return {}
    entry = pieces[0].share.scalars(pieces[0].chunk, pieces[0].index)
    entry.update((name, _gather(pieces, name, param.shape)) for name in kept)
    if "remainder" in pieces[0].fields:
        entry["master_remainder"] = _gather(pieces, "remainder", param.shape)
        entry["master_checksum"] = torch.tensor(_checksum(param))
    if "master" in pieces[0].fields:
        entry["master_param"] = _gather(pieces, "master", param.shape)
    return entry


class LazyState(Mapping[torch.Tensor, dict[str, Any]]):
    """``optimizer.state``: each parameter's entry is assembled when it is asked for."""

    def __init__(self, optimizer: PlacedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, param: torch.Tensor) -> dict[str, Any]:
        number = self._optimizer.placed.numbers[param]
        check_intact(self._optimizer)
        return _param_state(param, _pieces(self._optimizer, only=number)[number])

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._optimizer.placed.params)

    def __len__(self) -> int:
        return len(self._optimizer.placed.params)


def pack_groups(optimizer: PlacedOptimizer) -> list[dict[str, Any]]:
    """Return the parameter groups with numbers in place of parameters, counted over all groups as torch does."""
    packed, start = [], 0
    for group in optimizer.param_groups:
        entry = {key: value for key, value in group.items() if key != "params"}
        entry["params"] = list(range(start, start + len(group["params"])))
        start += len(group["params"])
        packed.append(entry)
    return packed


def _in_group_order(optimizer: PlacedOptimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


@torch.no_grad()
def save(optimizer: PlacedOptimizer) -> dict[str, Any]:
    """Return the state dict."""
    state: dict[int, dict[str, Any]] = {}
    numbers = optimizer.placed.numbers
    if numbers:
        check_intact(optimizer)
        optimizer._take_external_writes()
        pieces = _pieces(optimizer)
        for index, param in enumerate(_in_group_order(optimizer)):
            entry = _param_state(param, pieces[numbers[param]]) if param in numbers else {}
            if entry:
                state[index] = entry
    return {"state": state, "param_groups": pack_groups(optimizer)}


def load(optimizer: PlacedOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Take a state dict apart; see :meth:`PlacedOptimizer.load_state_dict`."""
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
    # Some classes have None for a moment that is not there yet.
    entries = {
        param: {name: value for name, value in state_dict["state"].get(number, {}).items() if value is not None}
        for param, number in zip(params, saved_ids, strict=True)
    }
    _check_shapes(optimizer, entries)
    for group, saved in zip(groups, saved_groups, strict=True):
        group.update({key: value for key, value in saved.items() if key not in ("params", "param_names")})
    optimizer._allocate_where(lambda param: param.requires_grad or bool(entries.get(param)))
    pieces = _pieces(optimizer)
    rule = optimizer.placed.rule
    optimizer._pending_masters.clear()
    for param, number in optimizer.placed.numbers.items():
        entry = entries[param]
        own = {name: value for name, value in entry.items() if name not in _MASTER_ENTRIES}
        for piece in pieces[number]:
            piece.share.set_scalars(piece.chunk, piece.index, own if entry else None)
            for name in rule.moments:
                part = own[name].reshape(-1)[piece.segment.start : piece.segment.stop] if name in own else None
                rule.write_moment(piece.fields, name, part)
        if "master_remainder" in entry and "remainder" in pieces[number][0].fields:
            checksum = int(entry["master_checksum"])
            remainder = entry["master_remainder"]
            if any(_shares_memory(remainder, piece.fields["remainder"]) for piece in pieces[number]):
                # It came from this optimizer's own state dict, and the live remainders are zeroed below.
                remainder = remainder.clone()
            optimizer._pending_masters[param] = SavedMaster(remainder, checksum)
        elif "master_param" in entry:
            optimizer._pending_masters[param] = SavedMaster(master=entry["master_param"])
    # Until the saved masters turn out to belong to the weights, the weights are the masters.
    optimizer.refresh_masters()
    optimizer.placed.clear_failures()


def _shares_memory(left: torch.Tensor, right: torch.Tensor) -> bool:
    begin, end = left.data_ptr(), left.data_ptr() + left.nbytes
    return right.data_ptr() < end and begin < right.data_ptr() + right.nbytes


def _check_shapes(optimizer: PlacedOptimizer, entries: Mapping[torch.Tensor, Mapping[str, Any]]) -> None:
    names = {param: name for name, param in optimizer._named(optimizer.param_groups)}
    rule = optimizer.placed.rule
    for param, entry in entries.items():
        for name in rule.moments if entry else ():
            if name not in entry and rule.needs_all_moments:
                raise ValueError(
                    f"the state dict has no {name} for parameter {names[param]}; it was not written by Adam or AdamW"
                )
            if name in entry and entry[name].shape != param.shape:
                raise ValueError(
                    f"the state dict has {name} of shape {tuple(entry[name].shape)} for parameter {names[param]} "
                    f"of shape {tuple(param.shape)}; it belongs to another model"
                )


@torch.no_grad()
def apply_masters(optimizer: PlacedOptimizer) -> None:
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
